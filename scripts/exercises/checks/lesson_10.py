import os
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import attempt, noted, shared_folder


def check_10_1(exercise, rank, world_size, report):
    for count in (10, 12, 3):
        labels = [1, 1] + [0] * (count - 2)  # so the first two are wrong
        (right, total), looked_at = evaluate(exercise, labels, rank, world_size)
        text = f"counts {right} of {total} (right: {count - 2} of {count})"
        if report((right, total) == (count - 2, count), text):
            report.at_most(f"images that it looked at, of {count}:", *looked_at)


def evaluate(exercise, labels, rank, world_size):
    """Evaluate a model that says 0 to all images.

    Return the result, and how many images this rank has looked at, and may look at.
    """
    model = torch.nn.Identity()
    calls = noted(model, "forward")
    images = torch.tensor([[1.0, 0.0]]).repeat(len(labels), 1)
    result = exercise.evaluate(model, images, torch.tensor(labels), rank, world_size)
    looked_at = sum(len(x) for (x,), _ in calls)
    return result, (looked_at, -(-len(labels) // world_size))


GPUS = [4, 2, 0]  # on a node, for pick_device() of exercise 10.3


def check_10_3(exercise, rank, world_size, report):
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    path = shared_folder(rank) / "model.pt"
    writes = noted(torch, "save", 0.3)  # a large model on a slow disk
    soon = dist.new_group(timeout=timedelta(seconds=5))
    with mock.patch.object(dist, "barrier", partial(dist.barrier, group=soon)):
        _, error = attempt(exercise.save, torch.nn.Linear(1, 1), path)
    error = error or attempt(torch.load, path, weights_only=True)[1]
    devices = ", ".join(str(exercise.pick_device(rank, gpus)) for gpus in GPUS)
    # What start() would join is noted only: the rank stays in its group.
    joined = []
    dist.init_process_group = lambda *_, **options: joined.append(options)
    torch.cuda.device_count = lambda: 0
    exercise.main = lambda device: None
    picked, asked = noted(exercise, "pick_device"), noted(exercise, "pick_backend")
    exercise.start()
    local_ranks = ", ".join(str(arguments[0]) for arguments, _ in picked)
    report.equal("its local rank is", local_ranks or "never used", str(rank % 2))
    right = ", ".join(f"cuda:{rank % gpus}" if gpus else "cpu" for gpus in GPUS)
    report.equal(f"local rank {rank} gets, on nodes with 4, 2 and 0 GPUs,", devices, right)
    for options in joined or [{"rank": None}]:
        place, size = options.get("rank", rank), options.get("world_size", world_size)
        report.equal("its rank in its group is", f"{place} of {size}", f"{rank} of {world_size}")
    report.equal("pick_backend() is", "asked" if asked else "not asked", "asked")
    timeout = any(options.get("timeout") == exercise.TIMEOUT for options in joined)
    report.equal("TIMEOUT is", "passed on" if timeout else "not passed on", "passed on")
    seen = yield len(writes), error
    report.equal("all ranks: times that the file was written:", sum(x for x, _ in seen), 1)
    errors = [error for _, error in seen if error]
    report.no_error("all ranks: save(), then read the file:", errors[0] if errors else None)
