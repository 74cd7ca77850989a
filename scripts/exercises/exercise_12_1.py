"""Exercise 12.1: points and parameters of a Job that is stopped, and of one without a stop."""

import io

from exercises.common import flat, gap


def look(exercise, rank, world_size):
    import torch

    results = []
    for stop in (2, 5, 7):
        straight, first, second = exercise.Job(), exercise.Job(), exercise.Job()
        expected = straight.train(12)
        used = first.train(stop)
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)  # so it is a copy, as a file would be
        buffer.seek(0)
        second.load_state_dict(torch.load(buffer, weights_only=True))
        used += second.train(12 - stop)
        lost = len(set(expected[:24]) - set(used[:24])) + len(set(expected[24:]) - set(used[24:]))
        results.append((stop, lost, flat(straight.model), flat(second.model)))
    return results


def judge(seen):
    for rank, results in enumerate(seen):
        for stop, lost, straight, resumed in results:
            where = f"rank {rank}: stopped after {stop} steps"
            yield lost == 0, f"{where}: {lost} points are left out of their epoch (right: 0)"
            if lost == 0:
                far = gap(straight, resumed)
                yield far == 0, f"{where}: parameters at the end differ by {far:.1g} (limit 0)"
