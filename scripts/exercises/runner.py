"""Run an exercise on its ranks, and say what each of them really did.

The ranks are forks of one process that has imported torch, which this process needs not. Each
checks its part of the exercise; then rank 0 compares what all of them saw.
"""

import contextlib
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from inspect import isgenerator
from multiprocessing.connection import wait

from exercises.common import Report, sentence_of

START_LIMIT, RUN_LIMIT = 120, 20  # seconds: until all ranks have started, and until all are done
PATIENCE = 1  # seconds that the other ranks still get once one has failed


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


def end_with(process):
    """Exit when a different process has ended, however it ended."""
    process.join()
    os._exit(1)


def set_up(rank, world_size, folder):
    """Be a rank, as torchrun would make one, join the group, and wait until all have joined."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
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
    store = dist.FileStore("store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()


def be_rank(rank, world_size, exercise_id, file, folder, pipe):
    """Be one rank: join the group, load the exercise, check it, tell, and wait for the others."""
    report = Report(f"rank {rank}: ")
    try:
        set_up(rank, world_size, folder)
        pipe.send(("started", None))
        exercise = load(file)
        module = importlib.import_module(f"exercises.checks.lesson_{exercise_id.split('.')[0]}")
        name = f"check_{exercise_id.replace('.', '_')}"
        if not hasattr(module, name):
            raise NotImplementedError(f"scripts/{module.__name__} has no {name}")
        check = getattr(module, name)(exercise, rank, world_size, report)
        value = next(check, None) if isgenerator(check) else None
        pipe.send(("seen", (report.lines, value)))
        # A rank that leaves early breaks the connections of the others. Only rank 0 gets all.
        seen = pipe.recv()
        report.who, report.lines = "", []
        if isgenerator(check):
            with contextlib.suppress(StopIteration):
                check.send(seen)
        pipe.send(("compared", report.lines))
    except SystemExit as error:
        pipe.send(("failed", f"called exit({error.code!r})"))
    except BaseException as error:
        text = sentence_of(error, file)
        if isinstance(error, TypeError | ValueError | IndexError) and "line " not in text[:5]:
            text = f"the result cannot be read ({text}). Return what the docstring says."
        pipe.send(("failed", text))
    with contextlib.suppress(EOFError):
        pipe.recv()  # until this process is killed
    os._exit(0)


# The side of this process.


def import_once(exercise):
    """Have torch, and what an exercise needs besides, imported once for all of its ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["KINETO_LOG_LEVEL"] = "99"  # hides the profiler's messages about itself
    if sys.platform == "linux":  # not safe on a Mac
        multiprocessing.set_forkserver_preload(["torch._dynamo", *exercise["imports"]])


@contextlib.contextmanager
def running_ranks(exercise, file, folder):
    """Start the ranks of an exercise; yield {pipe: rank}. At the end none of them is left."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = {}, []
    try:
        for rank in range(exercise["processes"]):
            ours, theirs = context.Pipe()
            arguments = (rank, exercise["processes"], exercise["id"], str(file), folder, theirs)
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


def receive(pipe):
    """Return the next message of a rank: its kind and its value."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return "failed", "the process ended without a message"


def collect(pipes, limit):
    """Return what each rank saw, and how some failed: {rank: value}, {rank: text}.

    A rank in neither was too late.
    """
    seen, failed = {}, {}
    end = time.monotonic() + START_LIMIT
    while len(seen) + len(failed) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in seen | failed]
        ready = wait(waiting, max(0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            kind, value = receive(pipe)
            if kind == "started" and not failed:  # all ranks have joined the group
                end = time.monotonic() + limit
            elif kind == "seen":
                seen[pipes[pipe]] = value
            elif kind == "failed":
                if not failed:  # the others may have something to say, or wait for ever
                    end = min(end, time.monotonic() + PATIENCE)
                failed[pipes[pipe]] = value
    return seen, failed


def run(exercise, file, limit=RUN_LIMIT):
    """Run an exercise, at most limit seconds. Return the lines (right, sentence)."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running_ranks(exercise, file, folder) as pipes,
    ):
        seen, failed = collect(pipes, limit)
        if len(seen) == len(pipes):
            lines, values = zip(*(seen[rank] for rank in sorted(seen)))
            first = next(iter(pipes))
            first.send(values)
            kind, both = receive(first)
            both = [(False, f"all ranks: {both}")] if kind == "failed" else both
            return [*itertools.chain(*lines), *both]
    if failed:
        # "Connection closed by peer" is what a rank says when another has failed: not the cause.
        causes = {rank: text for rank, text in failed.items() if "by peer" not in text}
        return [
            (False, f"rank {rank}: {text}") for rank, text in sorted((causes or failed).items())
        ]
    late = ", ".join(str(rank) for rank in pipes.values() if rank not in seen)
    return [(False, f"rank {late}: not finished (limit {limit} s)")]
