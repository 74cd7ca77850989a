import io

import torch
from exercises.common import Fact, gap


def check_12_1(exercise, rank, world_size):
    for stop in (2, 5, 7):
        straight, first, second = exercise.Job(), exercise.Job(), exercise.Job()
        straight.train(12)
        used = first.train(stop)
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)  # so it is a copy, as a file would be
        buffer.seek(0)
        second.load_state_dict(torch.load(buffer, weights_only=True))
        used += second.train(12 - stop)
        lost = 2 * 24 - len(set(used[:24])) - len(set(used[24:]))
        where = f"stopped after {stop} steps:"
        yield Fact(f"{where} points that are left out of their epoch:", lost, "place")
        far = gap(straight.model, second.model)
        yield Fact(f"{where} parameters at the end differ by", far, "state", most=0)
