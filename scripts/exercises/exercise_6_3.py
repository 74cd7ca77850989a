"""Exercise 6.3: what load() does with a checkpoint of save(), and with names that don't fit."""

from exercises.common import attempt, flat, shared_folder


def look(exercise, rank, world_size):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    folder = shared_folder(rank)
    torch.manual_seed(3)
    model = DistributedDataParallel(exercise.make_model())
    exercise.save(model, folder / "checkpoint.pt")
    torch.manual_seed(4)
    loaded, error = attempt(exercise.load, folder / "checkpoint.pt")
    torch.save({"another.weight": torch.zeros(1)}, folder / f"wrong{rank}.pt")
    _, refusal = attempt(exercise.load, folder / f"wrong{rank}.pt")
    return flat(model), error or flat(loaded), refusal


def judge(seen):
    for rank, (trained, loaded, refusal) in enumerate(seen):
        if isinstance(loaded, str):
            yield False, f"rank {rank}: loading the checkpoint: {loaded} (right: no error)"
            continue
        same = sum(x == y for x, y in zip(trained, loaded))
        text = f"rank {rank}: numbers that are the trained ones after loading: {same}"
        yield same == len(trained), f"{text} (right: {len(trained)})"
        if same == len(trained):
            text = f"rank {rank}: loading the checkpoint of a different model"
            yield bool(refusal), f"{text}: {refusal or 'no error'} (right: an error)"
