"""Loss curves: what lessons wrote for TensorBoard."""

import itertools


def losses(path):
    """Return the losses in an event file, or in a folder of them, as [(images seen, loss), ...]."""
    # Only here: this takes a second.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss/train")]


def thinned(curve, points):
    """Return images seen and mean loss since the point before, of [points] each, or fewer.

    curve is [(images seen, loss), ...]. A point stands for many steps, because a single batch is
    noisy.
    """
    points = min(points, len(curve))
    bounds = [round(i * len(curve) / points) for i in range(points + 1)]
    seen = [0, *(images for images, _ in curve)]
    means = []
    for begin, end in itertools.pairwise(bounds):
        total = sum((seen[i + 1] - seen[i]) * curve[i][1] for i in range(begin, end))
        means.append(total / (seen[end] - seen[begin]))
    return [seen[end] for end in bounds[1:]], means
