"""Exercise 17.5: the answers that each token gets, and the tokens that each expert sees."""

from exercises.common import compared


def look(exercise, rank, world_size):
    import torch

    torch.manual_seed(rank)
    tokens = torch.randn(3 + rank, exercise.WIDTH)  # not the same number on all ranks
    # Nobody asks the last expert, many ask expert 0.
    choice = torch.randint(world_size - 1, (len(tokens),)) * torch.randint(2, (len(tokens),))
    arrived = []

    def expert(x, number=rank):
        arrived.append(len(x))
        return x.cumsum(1) * (number + 1)

    with torch.no_grad():
        result, load = exercise.ask_experts(tokens, choice, expert)
    right = torch.stack([(e + 1) * x.cumsum(0) for e, x in zip(choice, tokens)])
    results = [tensor.flatten().tolist() for tensor in (result, right)]
    return choice.tolist(), sum(arrived), load, *results


def judge(seen):
    for rank, (_, arrived, load, mine, right) in enumerate(seen):
        wanted = sum(choice.count(rank) for choice, *_ in seen)
        text = f"rank {rank}: its expert gets {arrived} tokens, the load is {load}"
        yield arrived == load == wanted, f"{text} (right: {wanted})"
        holds, words = compared(mine, right)
        yield holds, f"rank {rank}: answers: {words}"
