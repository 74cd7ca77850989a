"""Check an exercise: start it on its ranks and see what each of them really does.

A check says what was measured on each rank and what is allowed: symptoms, no causes. --hint gives
the next of three hints and runs nothing. Once an exercise has passed, it says what was wrong.

Without an id: list the exercises and which of them have passed. With a lesson, such as 4: list its
exercises. With next: check the first one that has not passed yet. What has passed, and after how
many minutes, is remembered in runs/exercises.json. exercises/records.py says what of it is
handed in with --hand-in.

What a check looks at is in exercises/, one file for each exercise. The list of the exercises, with
their hints, is exercises.toml. Reading it there takes the fun out of it: ask with --hint.
"""

import argparse
import ast
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

from exercises.common import sentence_of
from exercises import records
from course.lists import ROOT, read_exercises

MARKS = {True: "ok", False: "NO", None: "->"}  # None: the explanation
START_LIMIT, RUN_LIMIT = 120, 20  # seconds: until all ranks stand, and until all are done


class Ended(Exception):
    """A rank did not come to its end. Its text says which rank, and what it said last."""


# Running an exercise: the side of the ranks.


def load(file):
    """Return the exercise as a module. It is called as multiprocessing calls a main module."""
    spec = importlib.util.spec_from_file_location("__mp_main__", file)
    module = importlib.util.module_from_spec(spec)
    # Then processes that it starts, for example those of a DataLoader, find its classes too.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    module.__spec__ = None
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return module


def check_of(exercise_id):
    """Return the module with look and judge for an exercise: exercises.exercise_4_1 for 4.1."""
    return importlib.import_module(f"exercises.exercise_{exercise_id.replace('.', '_')}")


def be_rank(rank, world_size, exercise_id, file, folder, pipe):
    """Be one rank: join the group, load the exercise, look, tell, and wait until all are done."""
    launcher = multiprocessing.parent_process()  # end with it, however it ends
    threading.Thread(target=lambda: launcher.join() or os._exit(1), daemon=True).start()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(folder)
    output = os.open(f"output of rank {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if sys.platform == "linux":  # the workers of a DataLoader: quick, and as in lesson 11
            multiprocessing.set_start_method("fork", force=True)
        store = dist.FileStore("store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()
        pipe.send(("started", None))
        pipe.send(("seen", check_of(exercise_id).look(load(file), rank, world_size)))
    except SystemExit as error:
        pipe.send(("failed", f"ended itself by exit({error.code!r})"))
    except BaseException as error:
        pipe.send(("failed", sentence_of(error, file)))
    with contextlib.suppress(EOFError):
        pipe.recv()  # who leaves early breaks the connections of the others
    os._exit(0)


# Running an exercise: the side of this process, which needs no torch.


def start_ranks(exercise, file, folder):
    """Start the ranks. Return {pipe: rank} and the processes."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = {}, []
    for rank in range(exercise["processes"]):
        ours, theirs = context.Pipe()
        arguments = (rank, exercise["processes"], exercise["id"], str(file), folder, theirs)
        processes.append(context.Process(target=be_rank, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes[ours] = rank
    return pipes, processes


def collect(pipes):
    """Return what each rank saw, in rank order. Raise Ended if one fails or does not end."""
    seen, failed, started = {}, {}, set()
    end = time.monotonic() + START_LIMIT
    while len(seen) + len(failed) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in seen | failed]
        ready = wait(waiting, max(0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                kind, value = "failed", "the process ended without a message"
            if kind == "started":
                started.add(rank)
                if len(started) == len(pipes):
                    end = time.monotonic() + RUN_LIMIT
            elif kind == "seen":
                seen[rank] = value
            else:
                if not failed:  # the others may have something to say, or wait in vain for this one
                    end = min(end, time.monotonic() + 1)
                failed[rank] = value
    if len(seen) == len(pipes):
        return [seen[rank] for rank in sorted(seen)]
    # "Connection closed by peer" is what a rank says when another has failed: not the cause.
    causes = {rank: text for rank, text in failed.items() if "by peer" not in text} or failed
    if causes:
        raise Ended(*(f"rank {rank}: {text}" for rank, text in sorted(causes.items())))
    late = ", ".join(str(rank) for rank in pipes.values() if rank not in seen)
    raise Ended(f"rank {late}: not finished (limit {RUN_LIMIT} s)")


def run(exercise, file):
    """Run an exercise. Return whether it passed, and the lines (right, sentence)."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes, processes = start_ranks(exercise, file, folder)
        try:
            seen = collect(pipes)
            lines = list(check_of(exercise["id"]).judge(seen))
            if all(right for right, _ in lines):
                lines.append((None, f"What was wrong: {exercise['consequence']}"))
        except Ended as error:
            lines = [(False, text) for text in error.args]
        except Exception as error:  # what the ranks returned is of another kind than expected
            text = f"the result cannot be read ({type(error).__name__}: {error})"
            lines = [(False, f"all ranks: {text}. Return what the docstring says.")]
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:  # they are done, or will never be
                process.kill()
            for process in processes:
                process.join()
    return all(right is not False for right, _ in lines), lines


# What has passed, and the command.


def state_of(exercise, record):
    """Return passed, not yet, or - for an exercise that was changed since it was checked."""
    known = record.get(exercise["id"], {})
    same = known.get("digest") == records.digest(ROOT / exercise["file"])
    return known.get("state", "-") if same else "-"


def next_exercise(exercises, record):
    """Return the id of the first exercise that has not passed yet; None if all have."""
    open_ones = [x["id"] for x in exercises.values() if state_of(x, record) != "passed"]
    return open_ones[0] if open_ones else None


def list_exercises(exercises, record):
    """Print these exercises, with what is known of them."""
    for exercise in exercises:
        state = state_of(exercise, record)
        print(f"{exercise['id']:>5}  {state:8}  {exercise['kind']:15} {exercise['file']}")
    command = f"python scripts/check.py {exercises[0]['id']}"
    print(f"Check one: {command}      A hint: {command} --hint")
    print("The first that has not passed yet: python scripts/check.py next")


def print_task(exercise):
    """Print what an exercise asks for, as its file says it."""
    with contextlib.suppress(OSError, SyntaxError, TypeError, ValueError):
        lines = ast.get_docstring(ast.parse((ROOT / exercise["file"]).read_text())).splitlines()
        begin = [line.startswith(("Task:", "Symptom:")) for line in lines].index(True)
        end = [line.startswith("Run:") for line in lines].index(True)
        print("\n".join(lines[begin:end]))


def file_of(exercise, solution):
    """Return the path of an exercise, or of its solution."""
    file = ROOT / exercise["file"]
    return file.parent / "solutions" / file.name if solution else file


def check(exercise, record, solution, show_task=False):
    """Check one exercise, print its lines, keep the state. Return whether it passed."""
    file = file_of(exercise, solution)
    title = f"{exercise['id']}  {file.relative_to(ROOT)}"
    print(f"{title}, ranks: {exercise['processes']}" + (", the solution" if solution else ""))
    if show_task:
        print_task(exercise)
    begin = time.time()
    if file.exists():
        passed, lines = run(exercise, file)
    else:
        passed, lines = False, [(False, f"the file is missing: git checkout {title.split()[1]}")]
    for right, sentence in lines:
        print(f"  {MARKS[right]}  {sentence}")
    print("passed" if passed else "not yet", flush=True)
    if not solution:
        known = record.setdefault(exercise["id"], {})
        records.note(known, passed, records.digest(file), begin, time.time())
    return passed


def give_hint(exercise, record):
    """Print the next hint; after the last one the first again."""
    known, count = record.setdefault(exercise["id"], {}), len(exercise["hints"])
    number = known.get("hints", 0) % count
    known["hints"] = number + 1
    print(f"{exercise['id']}, hint {number + 1} of {count}: {exercise['hints'][number]}")


def parse_args(exercises):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "such as 4.1, or all, or next; a lesson, such as 4, or nothing: list them"
    parser.add_argument("id", nargs="*", help=text)
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--hint", action="store_true", help="the next of three hints, no check")
    options.add_argument("--solution", action="store_true", help="check the solution instead")
    text = "write what you have passed, without your name, into a folder of your class"
    options.add_argument("--hand-in", type=Path, metavar="FOLDER", help=text)
    text = "the table of what was handed in there"
    options.add_argument("--class", type=Path, metavar="FOLDER", dest="class_folder", help=text)
    args = parser.parse_args()
    if (args.hand_in or args.class_folder) and args.id:
        parser.exit(2, "--hand-in and --class stand alone, each with a folder.\n")
    lessons = {exercise["lesson"] for exercise in exercises.values()}
    for name in args.id:
        if name not in {"all", "next", *lessons, *exercises}:
            parser.exit(2, f"There is no exercise {name}. python scripts/check.py lists them.\n")
        if name in lessons and (len(args.id) > 1 or args.hint or args.solution):
            text = f"python scripts/check.py {name} lists its exercises"
            parser.exit(2, f"{name} is a lesson and stands alone: {text}.\n")
    if "next" in args.id and (len(args.id) > 1 or args.solution):
        parser.exit(2, "next stands alone: python scripts/check.py next, with --hint or without.\n")
    if args.hint and (len(args.id) != 1 or "all" in args.id):
        parser.exit(2, "--hint takes one exercise: python scripts/check.py 4.1 --hint\n")
    if "all" in args.id:
        args.id = list(exercises)
    return args


def hand_in(record, folder):
    """Hand in a record; return the exit status."""
    try:
        file = records.hand_in(record, folder)
    except records.RecordError as error:
        sys.exit(str(error))
    print(f"handed in: {file}")
    return 0


def show_class(exercises, folder):
    """Print the table of a class; return the exit status."""
    try:
        handed_in, damaged = records.read_class(folder)
    except records.RecordError as error:
        sys.exit(str(error))
    print("\n".join(records.class_table(exercises, handed_in)))
    if damaged:
        names = ", ".join(map(ascii, damaged))
        print(f"Left out, because they are no records: {names}", file=sys.stderr)
    return 1 if damaged else 0


def main():
    """Do what the command line asks for; return the exit status."""
    exercises = {exercise["id"]: exercise for exercise in read_exercises()}
    args = parse_args(exercises)
    if args.class_folder:
        return show_class(exercises, args.class_folder)
    try:
        record = records.read_record()
    except records.RecordError as error:
        print(error, file=sys.stderr)
        record = {}
    if args.hand_in:
        return hand_in(record, args.hand_in)
    listed = [x for x in exercises.values() if not args.id or x["lesson"] in args.id]
    if listed:
        list_exercises(listed, record)
        return 0
    go_on = args.id == ["next"]
    wanted = [next_exercise(exercises, record)] if go_on else args.id
    if wanted == [None]:
        print(f"All {len(exercises)} exercises have passed.")
        return 0
    if args.hint:
        give_hint(exercises[wanted[0]], record)
        records.write_record(record)
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("This Python has no torch. First: source .venv/bin/activate")
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # the ranks end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["KINETO_LOG_LEVEL"] = "99"  # hides what the profiler says of itself
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        modules = ["torch", "torch._dynamo", "torch.distributed", "torch.profiler", "h5py"]
        modules += [name for x in wanted for name in exercises[x].get("imports", [])]
        multiprocessing.set_forkserver_preload(modules)
    passed = 0
    for name in wanted:
        passed += check(exercises[name], record, args.solution, go_on)
        records.write_record(record)
    if len(wanted) > 1:
        print(f"{passed} of {len(wanted)} passed")
    if go_on and passed:
        following = next_exercise(exercises, record)
        print(f"next: {exercises[following]['file']}" if following else "That was the last one.")
    return 0 if passed == len(wanted) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # who reads the output, for example head, has gone
        os._exit(1)
