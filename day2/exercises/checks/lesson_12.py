import io
import math
import time
from pathlib import Path

import torch
from exercises.common import Fact, attempt, gap, noted


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
    for size in (3, 10):
        job = exercise.Job()
        rows = noted(job.model, "forward")
        parts, error = attempt(
            lambda job, size: sum(job.gradient(rank, size) for rank in range(size)),
            job,
            size,
        )
        yield Fact(f"making {size} parts ended with error:", error, "parts")
        what = f"{size} parts beside one process: loss"
        loss = math.nan if error else parts[0].item()
        yield Fact(what, loss, "parts", right=right[0].item(), close=1e-9)
        most = exercise.BATCH // size + exercise.BATCH % size
        largest = max((len(x) for (x,), _ in rows), default=0)
        what = f"points of the largest of {size} parts:"
        yield Fact(what, largest, "parts", most=most)
    die, add_up, form = exercise.Crew.die, exercise.Crew.add_up, exercise.Crew.form
    agree, new = exercise.agree, exercise.NEW
    members, how = 4, "killed"

    def note(line, kind):
        with Path(f"{how}: {kind}").open("a") as file:
            file.write(f"{line}\n")

    def read(kind):
        file = Path(f"{how}: {kind}")
        return file.read_text().splitlines() if file.exists() else []

    def noted_agree(crew, job):
        before = job.step
        agree(crew, job)
        note(f"{crew.number} {before} {job.step}", "agreed")

    def form_with_new_first(crew, expected):
        if hasattr(crew, "size"):
            # The new one is there first, and of those who are left one comes last.
            time.sleep(0.3 * (expected > crew.size or crew.name == 1))
        form(crew, expected if hasattr(crew, "size") else members)

    def noted_add_up(crew, vector):
        note(crew.name, "sums")
        total = add_up(crew, vector)
        crew.calls = getattr(crew, "calls", 0) + 1
        if members == 5 and crew.calls == exercise.LAST_STEP + 1:
            if crew.name == exercise.KILLED:
                die(crew)
            if crew.name not in (1, exercise.NEW):  # now 1 is a step ahead
                raise RuntimeError("Connection closed by peer")
        return total

    def one_more(number):
        """Be range for run_members, which starts range(4), but for nobody after it."""
        del exercise.range
        return range(number + 1)

    exercise.agree = noted_agree
    exercise.Crew.add_up, exercise.Crew.form = noted_add_up, form_with_new_first
    for members in (4, 5):
        found = exercise.run_members()
        left = [x for x in range(members) if x != exercise.KILLED]
        all_crews = [[*range(members)], left, [*left, exercise.NEW]]
        for name in (*left, exercise.NEW):
            _, losses, crews, _ = found.get(name, (None, [], [], None))
            key = "crews" if name in left else "agree"
            right_crews = all_crews if name in left else all_crews[2:]
            what = f"{how}: crews of member {name}:"
            yield Fact(what, str(crews), key, right=str(right_crews))
            what = f"{how}: losses of member {name}:"
            yield Fact(what, losses, "agree", right=right, close=1e-9)
        states = [state for state, *_ in found.values()]
        far = max([gap(state, states[0]) for state in states], default=math.inf)
        what = f"{how}: what members have at the end differs by"
        yield Fact(what, far, "agree", most=0)
        steps = [[int(x) for x in line.split()] for line in read("agreed")]
        furthest = {crew: 0 for crew, *_ in steps}
        for crew, before, _ in steps:
            furthest[crew] = max(furthest[crew], before)
        behind = sum(after < furthest[crew] for crew, _, after in steps)
        what = f"{how}: times that one goes on from an earlier step than another's:"
        yield Fact(what, behind, "agree", most=0)
        sums = read("sums")
        most = max(map(sums.count, sums))
        what = f"{how}: sums of a member, at most:"
        yield Fact(what, most, "crews", most=1.5 * exercise.STEPS)
        how = "five members, one killed when one has the sum"
        exercise.Crew.die = lambda crew: crew.store.set("death", str(time.time()))
        exercise.NEW = new + 1
        exercise.range = one_more
