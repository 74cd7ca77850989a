import copy

import torch
from exercises.common import train_alone
from torch.optim import SGD


def check_2_1(exercise, rank, world_size, report):
    x = torch.linspace(-1, 1, 10)[:, None]
    batches = list(zip(x.split(4), (2 * x - 1).split(4)))
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    alone = copy.deepcopy(model)
    loss = exercise.train_one_epoch(model, SGD(model.parameters(), lr=0.1), batches)
    losses = train_alone(alone, batches, lr=0.1)
    mean = (4 * losses[0] + 4 * losses[1] + 2 * losses[2]) / 10
    if report.numbers("after batches of 4, 4 and 2 points the parameters are", model, alone):
        report.numbers("mean loss", loss, mean)
