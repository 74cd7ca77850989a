"""Exercise 13.1: the weights after step() with three batches, and how often gradients were sent."""

from exercises.common import compared, flat


def look(exercise, rank, world_size):
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    net = torch.nn.Linear(2, 1)
    x = torch.randn(world_size, 9, 2)
    alone = torch.nn.Linear(2, 1)
    alone.load_state_dict(net.state_dict())
    alone(x.flatten(0, 1)).square().mean().backward()
    expected = [p - 0.5 * p.grad for p in alone.parameters()]
    messages = []

    def counting(_, bucket):
        messages.append(bucket.index())
        return allreduce_hook(None, bucket)

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, counting)
    group = [(part, torch.zeros(len(part), 1)) for part in x[rank].split(4)]
    exercise.step(model, torch.optim.SGD(net.parameters(), lr=0.5), group)
    return flat(net), torch.cat([p.flatten() for p in expected]).tolist(), len(messages)


def judge(seen):
    for rank, (mine, right, messages) in enumerate(seen):
        holds, words = compared(mine, right)
        yield holds, f"rank {rank}: after batches of 4, 4 and 1 points the weights are {words}"
        yield messages == 1, f"rank {rank}: messages in a step: {messages} (right: 1)"
