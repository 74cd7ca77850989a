"""Exercise 17.7: what each rank holds of the model, and whether it is trained as a whole one."""


def look(exercise, rank, world_size):
    model, losses = exercise.train(50)
    parts = [parameter.to_local() for parameter in model.parameters()]
    return [number for part in parts for number in part.flatten().tolist()], losses


def judge(seen):
    for rank, (numbers, losses) in enumerate(seen):
        text = f"rank {rank}: holds {len(numbers)} of the model's 258 numbers"
        yield len(numbers) == 129, f"{text} (right: 129)"
        text = f"rank {rank}: loss {losses[0]:.4f} in step 0, {losses[-1]:.4f} in step 49"
        yield losses[-1] < 0.5 * losses[0], f"{text} (limit {0.5 * losses[0]:.4f})"
    halves = [numbers for numbers, _ in seen]
    for node in (0, 1):
        differ = halves[2 * node] != halves[2 * node + 1]
        text = f"node {node}: its ranks hold {'different' if differ else 'the same'} numbers"
        yield differ, f"{text} (right: different)"
    same = halves[0] == halves[2] and halves[1] == halves[3]
    yield same, f"the nodes hold {'the same' if same else 'different'} numbers (right: the same)"
