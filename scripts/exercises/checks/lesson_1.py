import torch.distributed as dist
from exercises.common import SlowQueue


def check_1_1(exercise, rank, world_size, report):
    """What time_all_reduce() measures where a simulated all_reduce takes 20 ms."""
    network = SlowQueue()

    def slow(tensor, *arguments, async_op=False, **options):
        network.add(0.02)
        return network if async_op else network.wait()

    dist.all_reduce = slow
    measured = exercise.time_all_reduce(1000, 5)
    calls = len(network.ends) - 1
    report(calls >= 5, f"calls of all_reduce: {calls} (right: 5 or more)")
    text = f"measured {1000 * measured:.2f} ms for an all_reduce of 20 ms"
    report(0.018 < measured < 0.06, f"{text} (limits 18 and 60 ms)")
