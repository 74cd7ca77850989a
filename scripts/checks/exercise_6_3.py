"""Exercise 6.3: what load() makes of a checkpoint by save(), and of one whose names do not fit."""

from checks.common import attempt, close, flat, shared_folder


def look(exercise, rank, world_size):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    folder = shared_folder(rank)
    torch.manual_seed(3)
    model = DistributedDataParallel(exercise.make_model())
    exercise.save(model, folder / "checkpoint.pt")
    torch.manual_seed(4)
    loaded, error = attempt(exercise.load, folder / "checkpoint.pt")
    saved, _ = attempt(torch.load, folder / "checkpoint.pt", weights_only=True)
    torch.save({"another.weight": torch.zeros(1)}, folder / f"wrong{rank}.pt")
    _, refusal = attempt(exercise.load, folder / f"wrong{rank}.pt")
    return flat(model), error or flat(loaded), list(saved or [None]), refusal


def judge(seen):
    for rank, (trained, loaded, written, refusal) in enumerate(seen):
        if isinstance(loaded, str):
            yield False, f"rank {rank}: the checkpoint cannot be loaded: {loaded}"
        else:
            same = sum(x == y for x, y in zip(trained, loaded))
            yield (
                close(trained, loaded, 0) and bool(trained),
                f"rank {rank}: {same} of {len(trained)} numbers are right after loading; "
                f"the first name in the file is {written[0]}",
            )
        how = "an error" if refusal else "no error"
        yield bool(refusal), f"rank {rank}: loading a checkpoint whose names do not fit: {how}"
