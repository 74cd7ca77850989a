import torch
from exercises.common import Fact


def check_14_1(exercise, rank, world_size):
    gradient, rest = torch.tensor([8.0, -5.0, 2.2]), torch.zeros(3)
    sent = [exercise.largest(gradient.clone(), rest).tolist() for _ in range(6)]
    most = max(sum(x != 0 for x in step) for step in sent)
    yield Fact("numbers that it sends in a step, at most:", most, most=1)
    total = [sum(column) for column in zip(*sent, rest.tolist())]
    yield Fact("sent and kept in 6 steps:", total, right=[48.0, -30.0, 13.2])
    places = [[abs(x) for x in step].index(max(map(abs, step))) for step in sent]
    yield Fact("which of the three numbers it sends, step by step:", places)
    yield Fact(
        "how far it ends from the best numbers:", exercise.train(300, rank), most=0.3
    )
