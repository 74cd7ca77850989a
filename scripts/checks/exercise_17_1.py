"""Exercise 17.1: whether the optimizer has the model's parameters, how many, and the loss."""


def look(exercise, rank, world_size):
    model, optimizer, losses = exercise.train(50)
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    fits = [id(parameter) in own for parameter in model.parameters()]
    parts = [parameter.to_local().numel() for parameter in model.parameters()]
    return sum(fits), len(fits), sum(parts), losses[0], losses[-1]


def judge(seen):
    for rank, (fits, count, numbers, first, last) in enumerate(seen):
        yield fits == count, f"rank {rank}: {fits} of {count} parameters are known to the optimizer"
        yield numbers < 193, f"rank {rank}: keeps {numbers} of the model's 193 numbers"
        yield last < first / 4, f"rank {rank}: loss {first:.2g} at first, {last:.2g} at last"
