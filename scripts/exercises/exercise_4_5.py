"""Exercise 4.5: the images that train() reads on each rank, its parameters and its losses."""

from itertools import chain

from exercises.common import flat, gap, short

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
    # One process, with the images that all ranks together had in each step.
    steps = [list(chain(*parts)) for parts in zip(*(batches(x) for x in every))]
    return visits, flat(model), losses.tolist(), alone(exercise, images, labels, steps)


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
    for rank, (_, parameters, _, _) in enumerate(seen[1:], start=1):
        far = gap(parameters, seen[0][1])
        text = f"rank {rank}: its parameters differ from rank 0's by up to {far:.1g}"
        yield far == 0, f"{text} (right: 0)"
    _, _, losses, expected = seen[0]
    text = f"rank 0: losses of {len(losses)} steps within {gap(losses, expected):.0e}"
    yield gap(losses, expected) <= 1e-5, f"{text} of one process (limit 1e-05)"
