"""Loss curves: what lessons wrote for TensorBoard."""

import numpy as np


def losses(path, tag="loss/train"):
    """Return the losses in an event file, or in a folder of them, as [(images seen, loss), ...].

    Raises KeyError if there are none. Of a step that was taken again after a restart, only the last
    loss is left, because the writer has said purge_step.
    """
    # Only here: this takes a second.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def thinned(curve, points):
    """Return images seen and mean loss since the point before, of [points] each, or fewer.

    curve is [(images seen, loss), ...]. A point stands for many steps, because a single batch is
    noisy.
    """
    seen, means = [], []
    steps = np.array(curve, dtype=float)
    images = np.diff(steps[:, 0], prepend=0)
    for part in np.array_split(np.arange(len(curve)), min(points, len(curve))):
        seen.append(int(steps[part[-1], 0]))
        means.append(float(np.average(steps[part, 1], weights=images[part])))
    return seen, means
