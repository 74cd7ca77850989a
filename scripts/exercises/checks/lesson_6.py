import torch
import torch.distributed as dist
from exercises.common import attempt, gap, noted, shared_folder, train_alone


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


def check_6_1(exercise, rank, world_size, report):
    backward, all_reduce = torch.Tensor.backward, dist.all_reduce
    flying, most, during = [], [], []

    class Message:
        def __init__(self, work):
            self.work = work
            flying.append(self)

        def wait(self):
            if self in flying:
                flying.remove(self)
            return self.work.wait()

    def watched(tensor, *arguments, async_op=False, **options):
        work = all_reduce(tensor, *arguments, async_op=True, **options)
        message = Message(work)
        most.append(len(flying))
        return message if async_op else message.wait()

    def noting(loss, *arguments, **options):
        before = len(most)
        backward(loss, *arguments, **options)
        during.append(len(most) - before)

    torch.Tensor.backward, dist.all_reduce = noting, watched
    model, _ = exercise.train(5)
    torch.Tensor.backward, dist.all_reduce = backward, all_reduce
    alone, count = exercise.make_model(), 2 * exercise.LAYERS
    seeds = [torch.Generator().manual_seed(other) for other in range(world_size)]
    x = torch.cat([torch.randn(8, 16, generator=seed) for seed in seeds])
    train_alone(alone, [(x, x.roll(1, 1).sin())] * 5, lr=0.5)
    report.like_one_process(model, alone, 1e-5)
    report.equal("messages that backward starts, in each step:", during, [count] * 5)
    report.equal("messages in flight at a time, at most:", max(most), count)
    report.equal("messages that nobody has waited for:", len(flying), 0)
