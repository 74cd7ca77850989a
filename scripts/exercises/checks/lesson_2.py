"""What the check of each exercise of lesson 2 does."""

import torch
from exercises.common import flat, gap, train_alone


def check_2_1(exercise, rank, world_size, report):
    """The parameters and the mean loss after train_one_epoch(), and the right ones."""
    x = torch.linspace(-1, 1, 10)[:, None]
    batches = list(zip(x.split(4), (2 * x - 1).split(4)))
    torch.manual_seed(1)
    model, alone = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    alone.load_state_dict(model.state_dict())
    first = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = float(exercise.train_one_epoch(model, optimizer, batches))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = train_alone(alone, optimizer, batches)
    mean = sum(loss * len(x) for loss, (x, _) in zip(losses, batches)) / len(x)
    moved = gap(flat(model), first)
    report(moved > 0, f"the parameters have moved by {moved:.3g} (right: more than 0)")
    report.numbers("after batches of 4, 4 and 2 points they are", flat(model), flat(alone))
    if moved:
        report.numbers("mean loss", [loss], [mean])
