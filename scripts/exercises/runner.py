"""Run an exercise on its ranks, and say what each of them really did.

The ranks are forks of one process that has imported torch, which this process needs not.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from itertools import zip_longest
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import NamedTuple

import catalog
from catalog import ROOT

LIMIT = 30  # seconds until all ranks are done, with the solution and with the exercise
PATIENCE = 1  # seconds that the other ranks still get once one has failed


class Finding(NamedTuple):
    """What a check has seen on some ranks, such as (0, 2), and what is allowed."""

    right: bool
    what: str
    seen: str = ""
    allowed: str = ""
    key: str = ""  # of the hints about it
    ranks: tuple = ()

    def __str__(self):
        ranks = ", ".join(map(str, self.ranks))
        who = f"rank{'s' * (len(self.ranks) > 1)} {ranks}"
        words = f"{who}: {self.what} {self.seen}".rstrip()
        return f"{words} ({self.allowed})" if self.allowed else words


# The side of the ranks.


def load(file):
    """Return the exercise as a module. It is called as multiprocessing calls a main module."""
    sys.dont_write_bytecode = True  # a learner's folder holds what the learner has put there
    spec = importlib.util.spec_from_file_location("__mp_main__", file)
    module = importlib.util.module_from_spec(spec)
    # Then processes that it starts, such as the workers of a DataLoader, find its classes too.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    module.__spec__ = None
    spec.loader.exec_module(module)
    return module


def set_up(rank, world_size, folder):
    """Be a rank, as torchrun would make one, join the group, and wait until all have joined."""
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    import torch  # once all variables are set
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":  # the workers of a DataLoader: quick, and as in lesson 11
        multiprocessing.set_start_method("fork", force=True)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()


def check_of(name):
    """Return the check of an exercise, which stands beside the exercises of its day."""
    (file,) = ROOT.glob(f"day*/exercises/checks/lesson_{name.partition('.')[0]}.py")
    return getattr(catalog.load(file), f"check_{name.replace('.', '_')}")


def facts_of(file, name, folder, rank, world_size):
    """Yield the facts of an exercise, or of its solution, in a folder that is new."""
    import torch
    import torch.distributed as dist

    from exercises.common import plain

    check = check_of(name)
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    exercise = load(file)
    torch.manual_seed(0)
    dist.barrier()
    for fact in check(exercise, rank, world_size):
        yield fact._replace(value=plain(fact.value))


def end_with(pipe):
    """End this process with the one at the other end of a pipe, however that ends."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


def be_rank(rank, world_size, name, files, folder, pipe):
    """Be one rank: check the exercise, tell what was found, and wait for the others."""
    threading.Thread(target=end_with, args=(pipe,), daemon=True).start()
    findings, key, what = [], "", ""
    file, solution = files
    try:
        set_up(rank, world_size, folder)
        from exercises.common import judge

        rights = [*facts_of(solution, name, f"{folder}/solution", rank, world_size)]
        facts = facts_of(file, name, f"{folder}/exercise", rank, world_size)
        for right in rights:
            key, what = right.key, right.what
            fact = next(facts, None)
            if fact:  # not if it needs what has failed
                findings.append(judge(fact, right))
    except BaseException as error:
        from exercises.common import sentence_of

        text = sentence_of(error, file)
        if isinstance(error, TypeError | ValueError | IndexError) and not text.startswith("line"):
            text = f"the result cannot be read ({text}). Return what the docstring says."
        if what:  # without its end: the one of several cases in which it happened
            text += f" (asked for: {what.rstrip(':')})"
        findings.append(Finding(False, text, key=key))
    pipe.send([finding._replace(ranks=(rank,)) for finding in findings])
    threading.Event().wait()  # a rank that leaves breaks the connections of the others


# The side of this process.


def import_once(exercises):
    """Have torch, and what exercises need besides, imported once for all of their ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["KINETO_LOG_LEVEL"] = "99"  # hides the profiler's messages about itself
    if sys.platform == "linux":  # not safe on a Mac
        imports = [name for exercise in exercises for name in exercise["imports"]]
        multiprocessing.set_forkserver_preload(["torch._dynamo", *imports])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process alone
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    first = multiprocessing.get_context("forkserver").Process()  # ends once all is imported
    first.start()
    first.join()


@contextlib.contextmanager
def running_ranks(exercise, files, folder):
    """Start the ranks of an exercise; yield {pipe: rank}. At the end none of them is left."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = {}, []
    try:
        for rank in range(exercise["processes"]):
            ours, theirs = context.Pipe()
            arguments = (rank, exercise["processes"], exercise["id"], files, folder, theirs)
            process = context.Process(target=be_rank, args=arguments)
            process.start()
            processes.append(process)
            theirs.close()
            pipes[ours] = rank
        yield pipes
    finally:
        for process in processes:  # they are done, or will never be
            process.kill()
        for process in processes:
            process.join()


def collect(pipes, limit):
    """Return what each rank has found in time: {rank: findings}."""
    findings = {}
    end = time.monotonic() + limit
    while len(findings) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in findings]
        ready = wait(waiting, max(0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]
            try:
                findings[rank] = pipe.recv()
            except (EOFError, OSError):
                text = "the process ended without a message"
                findings[rank] = [Finding(False, text, ranks=(rank,))]
            if has_failed(findings[rank]):  # the others may have something to say, or wait for ever
                end = min(end, time.monotonic() + PATIENCE)
    return findings


def has_failed(findings):
    """Return whether a rank's findings end with an error."""
    return not findings[-1].allowed


def run(exercise, file, limit=LIMIT):
    """Run an exercise, at most limit seconds. Return what was found, in the order of the check."""
    solution = ROOT / exercise["file"]
    files = str(file), str(solution.parent / "solutions" / solution.name)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running_ranks(exercise, files, folder) as pipes,
    ):
        findings = collect(pipes, limit)
    failed = [rank for rank in findings if has_failed(findings[rank])]
    late = tuple(rank for rank in pipes.values() if rank not in findings)
    if late and not failed:
        return [Finding(False, "not finished", allowed=f"limit {limit} s", ranks=late)]
    # "Connection closed by peer" is what a rank says when another has failed: not the cause.
    causes = [rank for rank in failed if "by peer" not in findings[rank][-1].what]
    rows = zip_longest(*(findings[rank] for rank in sorted(causes or failed or findings)))
    same = {}  # what several ranks have found
    for finding in (finding for row in rows for finding in row if finding):
        same.setdefault(finding._replace(ranks=()), []).extend(finding.ranks)
    return [finding._replace(ranks=tuple(ranks)) for finding, ranks in same.items()]
