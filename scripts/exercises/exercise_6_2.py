"""Exercise 6.2: what each rank reads from the file after save(), and how often it was written."""

import time

from exercises.common import attempt, names, shared_folder


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    path = shared_folder(rank) / "checkpoint.pt"
    original, calls = torch.save, []

    def save(thing, file, *arguments, **options):
        calls.append(str(file))
        time.sleep(0.3 + 0.2 * rank)  # a large model on a slow disk, and never at the same moment
        original(thing, file, *arguments, **options)

    torch.save = save
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    exercise.save(model, path)
    state, error = attempt(torch.load, path, weights_only=True)
    return len(calls), error, None if error else state["weight"].item()


def judge(seen):
    for rank, (_, error, _) in enumerate(seen):
        yield not error, f"rank {rank}: read the file: {error or 'no error'} (right: no error)"
    if not any(error for _, error, _ in seen):
        weights = sorted({round(weight) for _, _, weight in seen})
        text = f"all ranks: the weights that they read are from {names(weights)}"
        yield len(weights) == 1, f"{text} (right: from one rank)"
        calls = sum(calls for calls, _, _ in seen)
        if len(weights) == 1:
            yield calls == 1, f"all ranks: times that the file was written: {calls} (right: 1)"
