"""What the check of each exercise of lesson 4 does."""

from itertools import chain, pairwise

import torch
import torch.distributed as dist
from exercises.common import attempt, flat, gap, short, train_alone
from torch.nn.functional import cross_entropy, mse_loss


def check_4_1(exercise, rank, world_size, report):
    """The parameters after train(), and one process's parameters."""
    x, y = exercise.make_points()
    model, losses = exercise.train(x, y, rank, world_size)
    torch.manual_seed(0)
    alone = torch.nn.Linear(x.shape[1], 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    train_alone(alone, optimizer, [(x, y)] * len(losses), clip=1.0)
    far = gap(flat(model), flat(alone))
    report(far <= 1e-3, f"parameters within {far:.1g} of one process's (limit 0.001)")


def check_4_2(exercise, rank, world_size, report):
    """The numbers that each rank trains with in three epochs, and in which order."""
    epochs = exercise.train(torch.arange(40.0), 3, 2, rank, world_size)[1]
    orders = len({tuple(order) for order in epochs})
    first, second = (short(order[:4]) for order in epochs[:2])
    text = f"epoch 0 begins with {first}, epoch 1 with {second}"
    report.equal(f"{text}; different orders in 3 epochs:", orders, 3)
    return epochs


def compare_4_2(seen, report):
    for epoch in range(3):
        visits = [number for epochs in seen for number in epochs[epoch]]
        once = sum(visits.count(number) == 1 for number in range(40))
        report.equal(f"all ranks: numbers seen exactly once in epoch {epoch}:", once, 40)


def check_4_3(exercise, rank, world_size, report):
    """The parameters of all ranks after train(), and the loss over all points."""
    x = torch.linspace(-2, 2, 32)[:, None]
    y = torch.sin(x)
    model = exercise.train(x, y, rank, world_size)
    return flat(model), mse_loss(model(x), y).item(), y.square().mean().item()


def compare_4_3(seen, report):
    for rank, (parameters, loss, begin) in enumerate(seen):
        far = gap(parameters, seen[0][0])
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.2g}"
        if report(far <= 1e-6, f"{text} (limit 1e-06)"):
            report(loss < begin / 20, f"rank {rank}: loss {loss:.2g} (limit {begin / 20:.2g})")


def check_4_4(exercise, rank, world_size, report):
    """The images that my_part() gives to each rank, in two epochs, of 20 and of 21."""
    first, second = [exercise.my_part(20, epoch, rank, world_size).tolist() for epoch in range(2)]
    more = exercise.my_part(21, 0, rank, world_size).tolist()
    for count, part in ((20, first), (21, more)):
        fair = count // world_size
        report(len(part) == fair, f"{len(part)} of {count} images (right: {fair})")
    text = f"images {short(first)}, then in epoch 1 {short(second)}"
    report(first != second, f"{text} (right: a new order)")
    falls = sum(x > y for x, y in pairwise(first))
    text = f"images with a lower number than the one before: {falls}"
    report(falls > 0, f"{text} (right: 1 or more)")
    return first, second


def compare_4_4(seen, report):
    for epoch in range(2):
        visits = [image for parts in seen for image in parts[epoch]]
        twice = len(visits) - len(set(visits))
        report.equal(f"all ranks: images that came more than once in epoch {epoch}:", twice, 0)
    unknown = len(set(visits) - set(range(20)))
    report.equal("all ranks: numbers that belong to no image:", unknown, 0)


IMAGES, BATCH, EPOCHS = 96, 8, 2  # of exercise 4.5


def check_4_5(exercise, rank, world_size, report):
    """Each rank's images in train(), the mean gradient, the parameters, the losses."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (IMAGES, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (IMAGES,), generator=generator)
    visits = []

    class Noting(torch.utils.data.Dataset):
        def __len__(self):
            return IMAGES

        def __getitem__(self, index):
            visits.append(int(index))
            return images[index], labels[index]

    exercise.MAX_STEPS = None
    model, losses = exercise.train(Noting(), BATCH, EPOCHS)
    every = [None] * world_size
    dist.all_gather_object(every, visits)
    one = torch.nn.Linear(1, 1)
    one.weight.requires_grad = False
    one.bias.grad = torch.full_like(one.bias, rank + 1.0)
    _, trouble = attempt(exercise.average_gradients, one)
    mean = one.bias.grad.item()
    # One process, with the images that all ranks together had in each step.
    steps = [list(chain(*parts)) for parts in zip(*(batches(x) for x in every))]
    torch.manual_seed(0)
    alone = exercise.Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.015, momentum=0.9)
    data = [(images[step], labels[step]) for step in steps]
    expected = train_alone(alone, optimizer, data, cross_entropy)
    return visits, mean, flat(model), losses.tolist(), expected, trouble


def batches(visits):
    """Return the images of each step: an epoch's last batch may be shorter."""
    size = len(visits) // EPOCHS
    epochs = [visits[i * size : (i + 1) * size] for i in range(EPOCHS)]
    return [x[i : i + BATCH] for x in epochs for i in range(0, size, BATCH)]


def compare_4_5(seen, report):
    halves = [visits[: len(visits) // EPOCHS] for visits, *_ in seen]
    every = list(chain(*halves))
    once = sum(every.count(image) == 1 for image in range(IMAGES))
    text = f"all ranks: images seen exactly once in epoch 0: {once} of {IMAGES}"
    report(once == IMAGES, f"{text} (right: {IMAGES})")
    later = seen[0][0][len(halves[0]) :]
    text = f"rank 0: epoch 0 begins with {short(halves[0])}, epoch 1 with {short(later)}"
    report(halves[0] != later, f"{text} (right: a new order)")
    means, *_, trouble = zip(*(one[1:] for one in seen))
    text = "all ranks: with a weight that is frozen, average_gradients() "
    text += trouble[0] or f"turns 1, 2, 3, 4 into {short(means)}"
    report(set(means) == {2.5}, f"{text} (right: 2.5 on each)")
    for rank, (_, _, parameters, *_) in enumerate(seen[1:], start=1):
        far = gap(parameters, seen[0][2])
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.1g}"
        report(far == 0, f"{text} (right: 0)")
    *_, losses, expected, _ = seen[0]
    far = gap(losses, expected)
    text = f"rank 0: losses of {len(losses)} steps within {far:.0e}"
    text += " of one process with all ranks' images"
    report(far <= 1e-5, f"{text} (limit 1e-05)")
