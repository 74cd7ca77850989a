"""Files started quickly, for what must hold in many runs of a lesson.

A lesson takes seconds to import torch, in the launcher and again in the ranks. Here one process
imports it, and each rank is a fork of that one. A rank gets the variables that torchrun would set,
so no lesson launches others. That they start as the READMEs say is tested elsewhere.
"""

import contextlib
import multiprocessing
import os
import re
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from launcher.forks import run_file
from torch.distributed import TCPStore

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "support.forked_ranks",
        "h5py",
        "matplotlib.figure",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "torchvision.datasets",
    ]
)


def be_rank(file, arguments, cwd, env, output):
    """Be the process of one rank, which adds what it prints to the file output."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
        stream.reconfigure(line_buffering=True)
    multiprocessing.set_start_method(None, force=True)  # a fork server is for this module only
    os.chdir(cwd)
    os.environ.update(env)
    # Several tests run at a time. With many threads each, they would wait for each other.
    torch.set_num_threads(1)
    sys.exit(run_file(file, arguments))


def run_ranks(ranks, file, *arguments, cwd, env=None, timeout=200, ranks_per_node=None, without=()):
    """Run a file on this many ranks; return (exit status, what they printed).

    They are on one node, unless it is said how many are on each. Of torchrun's variables, those in
    without are missing. Where one rank fails, its status is returned, and the others are ended.
    """
    ranks_per_node = ranks_per_node or ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 starts no server of its own
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        **(env or {}),
    }
    processes, end = [], time.monotonic() + timeout
    with tempfile.NamedTemporaryFile() as output, contextlib.ExitStack() as stack:
        for rank in range(ranks):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_node)}
            own = {name: own[name] for name in own if name not in without}
            rest = [str(x) for x in arguments], str(cwd), own, output.name
            processes.append(FORKS.Process(target=be_rank, args=(str(file), *rest)))
            processes[-1].start()
            stack.callback(processes[-1].kill)
        alive = processes
        while alive and not any(process.exitcode for process in processes):
            assert wait([x.sentinel for x in alive], end - time.monotonic()), "it takes too long"
            alive = [process for process in alive if process.exitcode is None]
        status = next((x.exitcode for x in processes if x.exitcode), 0)
        return status, Path(output.name).read_text()


def skip_what_cannot_run(status, output):
    """Skip with a lesson's own sentence where an older torch cannot run it, as it has said."""
    if status == os.EX_UNAVAILABLE:
        assert torch.__version__ < (2, 8), output  # every newer one runs every lesson
        pytest.skip(re.search("^torch .* cannot .*$", output, re.M)[0])
