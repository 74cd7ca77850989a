"""Exercise 4.5: each rank's images in train(), the mean gradient, the parameters, the losses."""

from itertools import chain

from exercises.common import attempt, flat, gap, short

IMAGES, BATCH, EPOCHS = 96, 8, 2


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist

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
    expected = alone(exercise, images, labels, steps)
    return visits, mean, flat(model), losses.tolist(), expected, trouble


def batches(visits):
    """Return the images of each step: an epoch's last batch may be shorter."""
    size = len(visits) // EPOCHS
    epochs = [visits[i * size : (i + 1) * size] for i in range(EPOCHS)]
    return [x[i : i + BATCH] for x in epochs for i in range(0, size, BATCH)]


def alone(exercise, images, labels, steps):
    """Return the losses of one process that takes these images in each step."""
    import torch

    torch.manual_seed(0)
    model = exercise.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    losses = []
    for indices in steps:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def judge(seen):
    halves = [visits[: len(visits) // EPOCHS] for visits, *_ in seen]
    every = list(chain(*halves))
    once = sum(every.count(image) == 1 for image in range(IMAGES))
    text = f"all ranks: images seen exactly once in epoch 0: {once} of {IMAGES}"
    yield once == IMAGES, f"{text} (right: {IMAGES})"
    later = seen[0][0][len(halves[0]) :]
    text = f"rank 0: epoch 0 begins with {short(halves[0])}, epoch 1 with {short(later)}"
    yield halves[0] != later, f"{text} (right: a new order)"
    means, *_, trouble = zip(*(one[1:] for one in seen))
    text = "all ranks: with a weight that is frozen, average_gradients() "
    text += trouble[0] or f"turns 1, 2, 3, 4 into {short(means)}"
    yield set(means) == {2.5}, f"{text} (right: 2.5 on each)"
    for rank, (_, _, parameters, *_) in enumerate(seen[1:], start=1):
        far = gap(parameters, seen[0][2])
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.1g}"
        yield far == 0, f"{text} (right: 0)"
    *_, losses, expected, _ = seen[0]
    text = f"rank 0: losses of {len(losses)} steps within {gap(losses, expected):.0e}"
    text += " of one process with all ranks' images"
    yield gap(losses, expected) <= 1e-5, f"{text} (limit 1e-05)"
