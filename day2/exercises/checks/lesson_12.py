import io
import math
import time

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


def check_12_2(exercise, rank, world_size):
    right = exercise.train_in_one_process()
    parts = sum(exercise.Job().gradient(rank, 3) for rank in range(3))
    what = "three parts beside one process: loss"
    yield Fact(what, parts[:1], "parts", right=right[:1], close=1e-9)
    die, add_up = exercise.Crew.die, exercise.Crew.add_up

    def add_up_and_die(crew, vector):
        total = add_up(crew, vector)
        crew.calls = getattr(crew, "calls", 0) + 1
        if crew.calls == exercise.LAST_STEP + 1:
            if crew.name == exercise.KILLED:
                die(crew)
            if crew.name in (0, 3):  # now 1 is a step ahead of them
                raise RuntimeError("Connection closed by peer")
        return total

    for how in ("killed", "killed when one has the sum"):
        found = exercise.run_members()
        for name in (0, 1, 3, exercise.NEW):
            _, losses, crews, _ = found.get(name, (None, [], [], None))
            key = "crews" if name != exercise.NEW else "agree"
            right_crews = [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3, 4]][
                2 * (name == exercise.NEW) :
            ]
            yield Fact(
                f"{how}: crews of member {name}:",
                str(crews),
                key,
                right=str(right_crews),
            )
            what = f"{how}: losses of member {name}:"
            yield Fact(what, losses, "agree", right=right, close=1e-9)
        states = [state for state, *_ in found.values()]
        far = max([gap(state, states[0]) for state in states], default=math.inf)
        yield Fact(
            f"{how}: what members have at the end differs by", far, "agree", most=0
        )
        exercise.Crew.add_up = add_up_and_die
        exercise.Crew.die = lambda crew: crew.store.set("death", str(time.time()))
