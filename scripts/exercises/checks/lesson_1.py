import torch.distributed as dist
from exercises.common import Fact, SlowQueue


def check_1_1(exercise, rank, world_size):
    """What time_all_reduce() measures where a simulated all_reduce takes 20 ms."""
    network = SlowQueue()

    def slow(tensor, *arguments, async_op=False, **options):
        network.add(0.02)
        return network if async_op else network.wait()

    dist.all_reduce = slow
    measured = 1000 * exercise.time_all_reduce(1000, 5)
    yield Fact("calls of all_reduce:", len(network.ends) - 1, least=5)
    yield Fact("ms that it measures for an all_reduce of 20 ms:", measured, least=18, most=60)
