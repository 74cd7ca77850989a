import torch
import torch.distributed as dist
from exercises.common import noted


def check_16_1(exercise, rank, world_size, report):
    torch.manual_seed(1)
    linear = torch.nn.Linear(4, 2)
    x = torch.randn(1, 4)
    own = x.chunk(world_size, dim=1)[rank]
    mine = exercise.RowWise(linear)(own)
    shared, alone = exercise.train(20, True), exercise.train(20, False)
    if report.numbers("a layer with a bias gives", mine, linear(x)):
        report.numbers("loss in step 19", shared[-1:], alone[-1:], 1e-5)


def check_16_2(exercise, rank, world_size, report):
    torch.manual_seed(2)
    x = torch.randn(exercise.POSITIONS, exercise.WIDTH)
    parts = {"output": slice(1), "gradients of x, up, down": slice(1, 4)}
    parts["gradients of the norm"] = slice(4, 6)
    limits = {"sequence": (4 + 36 / world_size, 16), "again": (40 / world_size, 20)}
    for way, (most_kept, most_sent) in limits.items():
        results, kept, sent = exercise.run(way, x)
        right = exercise.right_for(way, x)
        for what, part in parts.items():
            report.numbers(f"{way}: {what}", results[part], right[part])
        # The norm keeps two more numbers for each position.
        report.at_most(f"{way}: bytes kept for each number of x:", kept, most_kept + 0.1)
        most_sent *= 1 - 1 / world_size
        report.at_most(f"{way}: bytes sent for each number of x:", sent, most_sent + 1e-6)


def check_16_3(exercise, rank, world_size, report):
    hidden, *others = exercise.make_data()
    for logits, times in (("small", 1), ("large", 100)):  # above 88: their exp is infinite
        data = [hidden * times, *others]
        loss, *mine, sent = exercise.run(exercise.loss_in_parts, *data)
        right_loss, *right = exercise.run_alone(*data)
        report.numbers(f"{logits} logits: loss", loss, right_loss, 1e-3)
        report.numbers(f"{logits} logits: gradients", mine, right)
    three = 3 * 2 * (1 - 1 / world_size) * 4 * len(hidden)  # a number a position in each
    report.at_most("bytes sent in forward:", sent, three)


def check_16_4(exercise, rank, world_size, report):
    model = exercise.make_model(together=True)
    whole = sum(block.up.weight.numel() for block in exercise.make_model(together=False))
    kept = sum(x.numel() for x in model.parameters() if x.dim() == 2)
    report.at_most("numbers of matrices that it keeps:", kept, 2 * whole // world_size)
    messages = noted(dist, "all_reduce")
    losses = exercise.train(model, 20)
    report.numbers("losses:", losses, exercise.train(exercise.make_model(together=False), 20), 1e-5)
    # Out of each block, and of the second one's x in backward. Nobody needs the first one's.
    sent = sum(x[0].numel() for x, _ in messages)
    report.at_most("numbers that go into all_reduce:", sent, 20 * 3 * 32 * exercise.WIDTH)
