"""What the check of each exercise of lesson 6 does."""

import torch
import torch.distributed as dist
from exercises.common import attempt, flat, gap, names, noted, shared_folder
from torch.nn.parallel import DistributedDataParallel


def check_6_1(exercise, rank, world_size, report):
    """The parameters after train(), beside the other ranks' and one process's."""
    model, losses = exercise.train(rank, world_size)
    alone, _ = exercise.train(0, 1)
    first, last = losses[0], losses[-1]
    report(last < first, f"loss {last:.4f} at the end (limit {first:.4f}, the first)")
    far = gap(flat(model), flat(alone))
    report(far <= 1e-5, f"parameters within {far:.1g} of one process's (limit 1e-05)")
    return flat(model)


def compare_6_1(seen, report):
    for rank, parameters in enumerate(seen):
        far = gap(parameters, seen[0])
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.2g}"
        report(far <= 1e-6, f"{text} (limit 1e-06)")


def check_6_2(exercise, rank, world_size, report):
    """What each rank reads from the file after save(), and how often it was written."""
    path = shared_folder(rank) / "checkpoint.pt"
    # A large model on a slow disk, and never at the same moment.
    calls = noted(torch, "save", 0.3 + 0.2 * rank)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    exercise.save(model, path)
    state, error = attempt(torch.load, path, weights_only=True)
    report.no_error("read the file:", error)
    return len(calls), error, None if error else state["weight"].item()


def compare_6_2(seen, report):
    if not any(error for _, error, _ in seen):
        weights = sorted({round(weight) for _, _, weight in seen})
        text = f"all ranks: the weights that they read are from {names(weights)}"
        if report(len(weights) == 1, f"{text} (right: from one rank)"):
            calls = sum(calls for calls, _, _ in seen)
            report.equal("all ranks: times that the file was written:", calls, 1)


def check_6_3(exercise, rank, world_size, report):
    """What load() does with a checkpoint of save(), and with names that don't fit."""
    folder = shared_folder(rank)
    torch.manual_seed(3)
    model = DistributedDataParallel(exercise.make_model())
    exercise.save(model, folder / "checkpoint.pt")
    torch.manual_seed(4)
    loaded, error = attempt(exercise.load, folder / "checkpoint.pt")
    torch.save({"another.weight": torch.zeros(1)}, folder / f"wrong{rank}.pt")
    _, refusal = attempt(exercise.load, folder / f"wrong{rank}.pt")
    if error:
        report.no_error("loading the checkpoint:", error)
        return
    trained = flat(model)
    same = sum(x == y for x, y in zip(trained, flat(loaded)))
    if report.equal("numbers that are the trained ones after loading:", same, len(trained)):
        text = "loading the checkpoint of a different model"
        report(refusal, f"{text}: {refusal or 'no error'} (right: an error)")


def check_6_4(exercise, rank, world_size, report):
    """The weights just after load() and 10 steps later, and without a stop."""
    path = shared_folder(rank) / "checkpoint.pt"
    first = exercise.begin()
    losses = exercise.train(*first, 10)
    exercise.save(path, *first)
    stopped = flat(first[0])
    exercise.train(*first, 10)
    second = exercise.begin()
    exercise.load(path, *second)
    loaded = flat(second[0])
    exercise.train(*second, 10)
    text = f"loss {losses[-1]:.4f} after 10 steps"
    report(losses[-1] < losses[0], f"{text} (limit {losses[0]:.4f}, the first)")
    far = gap(stopped, loaded)
    report(far == 0, f"weights after loading differ by {far:.2g} (limit 0)")
    far = gap(flat(first[0]), flat(second[0]))
    report(far <= 1e-6, f"weights 10 steps later differ by {far:.2g} (limit 1e-06)")
