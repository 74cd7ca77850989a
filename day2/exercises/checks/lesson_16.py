import math

import torch
from exercises.common import Fact, Messages, kept_for_backward


def check_16_1(exercise, rank, world_size):
    torch.manual_seed(1)
    linear = torch.nn.Linear(4, 2)
    x = torch.randn(1, 4)
    mine = exercise.RowWise(linear)(x.chunk(world_size, dim=1)[rank])
    yield Fact("a layer with a bias gives", mine, right=linear(x))
    shared, alone = exercise.train(20, True), exercise.train(20, False)
    yield Fact("loss in step 19", shared[-1], right=alone[-1])


def check_16_2(exercise, rank, world_size):
    x = torch.randn(exercise.POSITIONS, exercise.WIDTH)
    limits = {"sequence": (4 + 36 / world_size, 16), "again": (40 / world_size, 20)}
    for way, (most_kept, most_sent) in limits.items():
        with Messages() as sent:
            results, *_ = exercise.run(way, x)
        right = exercise.right_for(way, x)
        yield Fact(f"{way}: output", results[0], "output", right=right[0])
        what = f"{way}: gradients of x, up, down"
        yield Fact(what, results[1:4], "backward", right=right[1:4])
        yield Fact(
            f"{way}: gradients of the norm", results[4:], "norm", right=right[4:]
        )
        share = exercise.own_part(x, 0).requires_grad_()
        kept = kept_for_backward(exercise.Block(way), share)[1] / x.numel()
        # The norm keeps two more numbers for each position.
        what = f"{way}: bytes kept for each number of x:"
        yield Fact(what, kept, "bytes", most=most_kept + 0.1)
        # An all_reduce of the norm's two gradients comes to the formulas.
        most = (most_sent + 16 / len(x)) * (1 - 1 / world_size) + 1e-6
        what = f"{way}: bytes sent for each number of x:"
        yield Fact(what, sent.bytes / x.numel(), "bytes", most=most)


def check_16_3(exercise, rank, world_size):
    hidden, *others = exercise.make_data()
    for logits, times in (
        ("small", 1),
        ("large", 100),
    ):  # above 88: their exp is infinite
        data = [hidden * times, *others]
        with Messages() as sent:
            loss, *mine, _ = exercise.run(exercise.loss_in_parts, *data)
        right_loss, *right = exercise.run_alone(*data)
        key = "loss" if math.isfinite(loss) else "large"
        yield Fact(f"{logits} logits: loss", loss, key, right=right_loss)
        yield Fact(f"{logits} logits: gradients", mine, key, right=right)
    # A number a position in each of three messages; in backward hidden's gradient.
    most = 2 * (1 - 1 / world_size) * 4 * (3 * len(hidden) + hidden.numel())
    yield Fact("bytes sent:", sent.bytes, "bytes", most=most)


def check_16_4(exercise, rank, world_size):
    model = exercise.make_model(together=True)
    whole = sum(
        block.up.weight.numel() for block in exercise.make_model(together=False)
    )
    kept = sum(x.numel() for x in model.parameters() if x.dim() == 2)
    yield Fact(
        "numbers of matrices that it keeps:", kept, "keep", most=2 * whole // world_size
    )
    with Messages() as messages:
        losses = exercise.train(model, 20)
    right = exercise.train(exercise.make_model(together=False), 20)
    yield Fact("losses:", losses, "losses", right=right, close=1e-4)
    # Out of each block, and the second one's x in backward; nobody needs the first's.
    most = 20 * 3 * 32 * exercise.WIDTH * 4 * 2 * (1 - 1 / world_size)
    sent = messages.bytes
    yield Fact("bytes sent:", sent, "sent", least=most / 2, most=most)  # not nothing
