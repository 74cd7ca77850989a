import torch
from exercises.common import Fact
from torch.optim import SGD


def check_2_1(exercise, rank, world_size):
    x = torch.linspace(-1, 1, 10)[:, None]
    batches = list(zip(x.split(4), (2 * x - 1).split(4)))
    model = torch.nn.Linear(1, 1)
    loss = exercise.train_one_epoch(model, SGD(model.parameters(), lr=0.1), batches)
    yield Fact("after batches of 4, 4 and 2 points the parameters are", model, "step")
    yield Fact("mean loss", loss, "mean")
