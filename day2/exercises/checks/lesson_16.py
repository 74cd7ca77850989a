import math

import torch
import torch.distributed as dist
from exercises.common import Fact, Messages, kept_for_backward, noted
from torch.utils._pytree import tree_leaves


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
    kept = numbers_kept(model)
    shapes = [x.shape for x in exercise.make_model(together=False).parameters()]
    matrices = sum(math.prod(x) for x in shapes if len(x) == 2)
    biases = sum(math.prod(x) for x in shapes if len(x) == 1)
    # Its own part may still be a view of the whole, or the whole be kept beside it.
    what = "numbers of matrices that stay in memory:"
    yield Fact(what, kept - biases, "keep", most=matrices // world_size)
    barriers = noted(dist, "barrier")
    with Messages() as messages:
        losses = exercise.train(model, 20)
    waited = len(barriers)
    right = exercise.train(exercise.make_model(together=False), 20)
    yield Fact("losses:", losses, "losses", right=right, close=5e-6)
    # Out of each block, and the second one's x in backward; nobody needs the first's.
    most = 20 * 3 * 32 * exercise.WIDTH * 4 * 2 * (1 - 1 / world_size)
    sent = messages.bytes
    yield Fact("bytes sent:", sent, "sent", least=most / 2, most=most)  # not nothing
    yield Fact("barriers:", waited, "sent", most=0)
    world = dist.distributed_c10d._world
    whole, world.default_pg = world.default_pg, dist.new_subgroups(1)[0]
    losses = exercise.train(exercise.make_model(together=True), 20)
    world.default_pg = whole
    yield Fact("losses of one rank:", losses, "losses", right=right, close=5e-6)


def numbers_kept(model):
    """Return how many numbers the memory holds of which a model's tensors are views."""
    leaves = tree_leaves([dict(vars(module)) for module in model.modules()])
    modules = [x for x in leaves if isinstance(x, torch.nn.Module)]
    tensors = [x for x in leaves if torch.is_tensor(x)]
    tensors += [x for module in modules for x in module.parameters()]
    storages = [x.untyped_storage() for x in tensors if x.is_floating_point()]
    return sum({x.data_ptr(): x.nbytes() // 4 for x in storages}.values())
