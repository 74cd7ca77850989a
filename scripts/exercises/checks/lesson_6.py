import torch
import torch.distributed as dist
from exercises.common import attempt, flat, gap, noted, shared_folder
from torch.nn.parallel import DistributedDataParallel


def check_6_2(exercise, rank, world_size, report):
    path = shared_folder(rank) / "checkpoint.pt"
    # A large model on a slow disk, and never at the same moment.
    calls = noted(torch, "save", 0.3 + 0.2 * rank)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, rank)  # so that the file tells who wrote it
    dist.barrier()
    exercise.save(model, path)
    state, error = attempt(torch.load, path, weights_only=True)
    report.no_error("read the file:", error)
    seen = yield len(calls), "none" if error else f"{state['weight'].item():.0f}"
    counts, weights = zip(*seen)
    writers = sorted({*weights} - {"none"})
    text = f"all ranks: the weights that they read are from rank {', '.join(writers)}"
    report(len(writers) == 1, f"{text} (right: from one rank)")
    report.equal("all ranks: times that the file was written:", sum(counts), 1)


def check_6_3(exercise, rank, world_size, report):
    folder = shared_folder(rank)
    torch.manual_seed(3)
    model = DistributedDataParallel(exercise.make_model())
    exercise.save(model, folder / "checkpoint.pt")
    torch.manual_seed(4)
    loaded, error = attempt(exercise.load, folder / "checkpoint.pt")
    if not report.no_error("loading the checkpoint:", error):
        return
    trained = flat(model)
    same = sum(x == y for x, y in zip(trained, flat(loaded)))
    if report.equal("numbers that are the trained ones after loading:", same, len(trained)):
        torch.save({"another.weight": torch.zeros(1)}, folder / f"wrong{rank}.pt")
        _, refusal = attempt(exercise.load, folder / f"wrong{rank}.pt")
        text = "loading the checkpoint of a different model"
        report(refusal, f"{text}: {refusal or 'no error'} (right: an error)")


def check_6_4(exercise, rank, world_size, report):
    path = shared_folder(rank) / "checkpoint.pt"
    first = exercise.begin()
    losses = exercise.train(*first, 10)
    exercise.save(path, *first)
    exercise.train(*first, 10)
    second = exercise.begin()
    exercise.load(path, *second)
    exercise.train(*second, 10)
    report.learned(losses)
    report.at_most("weights 10 steps after loading differ by", gap(first[0], second[0]), 1e-6)
