import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset


def check_20_1(exercise, rank, world_size, report):
    x = torch.linspace(-1, 1, 80).unsqueeze(1)
    rates = exercise.train(Accelerator(cpu=True), TensorDataset(x, 2 * x))
    steps = 20 // world_size
    report.numbers("learning rates", rates, [0.1 - 0.09 * step / steps for step in range(steps)])
