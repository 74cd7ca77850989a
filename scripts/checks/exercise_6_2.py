"""Exercise 6.2: which ranks write the file in save(), and what each rank reads from it."""

import time

from checks.common import attempt, names, ranks, shared_folder


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

    path = shared_folder(rank) / "checkpoint.pt"
    original, calls = torch.save, []

    def save(thing, file, *arguments, **options):
        calls.append(str(file))
        time.sleep(0.3)  # a large model on a slow disk: who does not wait reads too early
        original(thing, file, *arguments, **options)

    torch.save = save
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    exercise.save(model, path)
    state, error = attempt(torch.load, path, weights_only=True)
    return len(calls), error, None if error else state["weight"].item()


def judge(seen):
    writers = ranks(seen, lambda mine: mine[0] > 0)
    for rank, (calls, error, weight) in enumerate(seen):
        wrote = f"wrote the file {calls} times" if calls else "did not write"
        read = f"could not read it: {error}" if error else f"read rank {weight:.0f}'s weights"
        yield not error and calls <= 1 and len(writers) == 1, f"rank {rank}: {wrote}, then {read}"
    yield len(writers) == 1, f"all ranks: one file, written by {names(writers) or 'nobody'}"
