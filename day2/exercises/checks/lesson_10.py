import os
import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import Fact, attempt, gather, noted


def check_10_1(exercise, rank, world_size):
    for count in (10, 12, 3):  # the first two are wrong
        yield from evaluate(exercise, [1, 1] + [0] * (count - 2), rank, world_size)


def evaluate(exercise, labels, rank, world_size):
    """Evaluate a model that says 0 to all images; count those it was given here."""
    model = torch.nn.Identity()
    calls = noted(model, "forward")
    count = len(labels)
    images = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
    result = exercise.evaluate(model, images, torch.tensor(labels), rank, world_size)
    yield Fact(f"for {count} images, evaluate() gave", result)
    looked_at = sum(len(x) for (x,), _ in calls)
    most = -(-count // world_size)
    yield Fact(f"images that it looked at, of {count}:", looked_at, most=most)


def check_10_3(exercise, rank, world_size):
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    path = Path("model.pt")
    writes = noted(torch, "save", 0.3)  # a large model on a slow disk
    soon = dist.new_group(timeout=timedelta(seconds=5))
    with (
        mock.patch.object(dist, "barrier", partial(dist.barrier, group=soon)),
        mock.patch("time.sleep"),  # takes no time: too short to wait for others
    ):
        _, error = attempt(exercise.save, torch.nn.Linear(1, 1), path)
    error = error or attempt(torch.load, path, weights_only=True)[1]
    devices = [str(exercise.pick_device(rank, gpus)) for gpus in (4, 2, 0)]
    # What start() would join is noted only: the rank stays in its group.
    joined = []

    def join(backend=None, *_, **options):
        joined.append({"backend": backend, **options})

    exercise.main = lambda device: None
    picked = noted(exercise, "pick_device")
    exercise.pick_backend = lambda gpus: f"backend for {gpus} GPUs"
    with (
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(dist, "init_process_group", join),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        exercise.start()
    yield Fact("its local rank is", [arguments[0] for arguments, _ in picked], "local")
    what = f"local rank {rank} gets, on nodes with 4, 2 and 0 GPUs,"
    yield Fact(what, devices, "device")
    options = joined[-1] if joined else {}
    yield Fact("process groups joined:", len(joined), "join")
    yield Fact(
        "its rank in its group is", options.get("rank", rank), "join", right=rank
    )
    size = options.get("world_size", world_size)
    yield Fact("the size of its group is", size, "join", right=world_size)
    what, right = "what it joins with, of pick_backend(gpus):", "backend for 0 GPUs"
    yield Fact(what, options.get("backend"), "join", right=right)
    passed_on = any(options.get("timeout") == exercise.TIMEOUT for options in joined)
    yield Fact("TIMEOUT is passed on:", passed_on, "join")
    yield Fact("save(), then reading the file, ended with error:", error, "file")
    yield Fact("times that the file was written:", sum(gather(len(writes))), "file")


def check_10_4(exercise, rank, world_size):
    started = exercise.simulate(exercise.SCRIPT)
    for node in range(exercise.NODES):
        count = sum(place == node for place, _ in started)
        key = "tasks" if count else "srun"
        yield Fact(f"torchruns that start on node{node}:", count, key, right=1)
    words = " ".join(words for _, words in started)
    hosts = {*re.findall(r"(?:endpoint|addr)[= ]([^: ]+)", words)}
    yield Fact("where they meet:", sorted(hosts), "meet")
    counts = re.findall(r"nproc.per.node[= ](\d+)", words)
    yield Fact("ranks that they start:", sum(map(int, counts)), "tasks")
    places = re.findall(r"node.rank[= ](\d+)", words)  # a script may do without
    yield Fact(
        "node ranks that two of them have:", len(places) - len(set(places)), "meet"
    )
