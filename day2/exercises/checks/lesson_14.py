import torch
from exercises.common import Fact, Messages


def check_14_1(exercise, rank, world_size):
    for what, numbers in (("", [8.0, -5.0, 2.2]), ("of equals: ", [3.0, -3.0, 3.0])):
        gradient = torch.tensor(numbers, dtype=torch.float64)
        rest = torch.zeros_like(gradient)
        with Messages() as messages:
            steps = [exercise.largest(gradient.clone(), rest).clone() for _ in range(6)]
        sent = [step.tolist() for step in steps]
        most = max(sum(x != 0 for x in step) for step in sent)
        yield Fact(f"{what}numbers that it sends in a step, at most:", most, most=1)
        total = [sum(column) for column in zip(*sent, rest.tolist())]
        right = [6 * x for x in numbers]
        what = f"{what}sent and kept in 6 steps:"
        yield Fact(what, total, right=right, close=1e-5)
        if numbers[0] == 8:  # of equals, each may come first
            places = [step.index(max(step, key=abs)) for step in sent]
            yield Fact("which of the three numbers it sends, step by step:", places)
    yield Fact("type of what it sends, for float64:", str(steps[0].dtype))
    calls = sum(messages.calls.values())
    yield Fact("messages that largest() sends itself:", calls, most=0)
    yield Fact(
        "how far it ends from the best numbers:", exercise.train(300, rank), most=0.3
    )
