import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import Fact, attempt, gather, noted
from torch.distributed.run import get_args_parser


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
    parser = get_args_parser()

    def read(words):
        """Return what torchrun reads in its options, or None if it stops at them."""
        try:
            return parser.parse_args(words.split())
        except SystemExit:
            return None

    started = exercise.simulate(exercise.SCRIPT)
    for node in exercise.NODES:
        count = sum(place == node for place, _ in started)
        key = "tasks" if count else "srun"
        yield Fact(f"torchruns that start on {node}:", count, key, right=1)
    options = [read(words) for _, words in started]
    yield Fact("torchruns that can't read their options:", options.count(None), right=0)
    options = [x for x in options if x]
    meetings = [meeting_of(x) for x in options]
    hosts = sorted({host for host, *_ in meetings})
    yield Fact("where they meet:", hosts, "meet", right=exercise.NODES[:1])
    different = len({*meetings})
    yield Fact("different ports, ids or kinds of meeting:", different, "meet")
    expected = [int(x.nnodes.split(":")[-1]) for x in options]
    yield Fact("nodes that each of them waits for:", expected, "meet")
    each = [x.nproc_per_node for x in options]  # codespell:ignore
    ranks = [4 if x in ("gpu", "auto") else int(x) for x in each]
    yield Fact("ranks that they start:", sum(ranks), "tasks")
    # Only c10d finds out itself who is the first node.
    places = [x.node_rank for x in options if kind_of(x) != "c10d"]
    same = len(places) - len({*places})
    yield Fact("node ranks that two of them have:", same, "meet", right=0)
    other = exercise.simulate(exercise.SCRIPT, ("gpu07", "gpu12"))
    options = [read(words) for _, words in other]
    hosts = sorted({meeting_of(x)[0] for x in options if x})
    what = "where they meet in a job on gpu07 and gpu12:"
    yield Fact(what, hosts, "meet", right=["gpu07"])


def meeting_of(options):
    """Return where and how a torchrun meets others: host, port, id, kind."""
    if options.standalone:
        return "localhost", "", "", "standalone"
    place = options.rdzv_endpoint  # codespell:ignore
    place = place or f"{options.master_addr}:{options.master_port}"
    host, _, port = place.partition(":")
    return host, port, options.rdzv_id, kind_of(options)


def kind_of(options):
    return options.rdzv_backend  # codespell:ignore
