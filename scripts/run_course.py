"""Run the lessons of scripts/course.toml, print what each of them showed and write a report.

Called by run_course.sh, which sees to the environment. The exit status is 0 if every lesson ended
well and printed its proof line, 1 if one did not or the report could not be written, 2 for a wrong
argument, 130 after Ctrl-C.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = "scripts/multinode_setup_and_run.sh"
REPORT = Path("runs", "report.html")  # where the lessons put their curves


def read_course():
    """Return the lessons, a list of the tables [[lesson]] in course.toml, in their order."""
    return tomllib.loads((ROOT / "scripts" / "course.toml").read_text())["lesson"]


def choose(lessons, wanted):
    """Return the lessons that were asked for by id or day; all where nothing was.

    Raises ValueError with a sentence for the user if a name is not known.
    """
    for name in wanted:
        if not any(name == x["id"] or x["file"].startswith(f"{name}/") for x in lessons):
            known = ", ".join(x["id"] for x in lessons)
            raise ValueError(f"There is no lesson {name!r}. There are day1, day2 and {known}.")
    return [
        x
        for x in lessons
        if not wanted or x["id"] in wanted or x["file"].partition("/")[0] in wanted
    ]


def command_of(lesson):
    """Return how to start a lesson, as (program, arguments); paths are from the repository's root.

    A lesson for several nodes runs on those of the Slurm allocation that this is in, or else on two
    imitated ones.
    """
    if not lesson.get("nodes"):
        return "python", [lesson["file"], *lesson["arguments"]]
    where = [] if "SLURM_JOB_ID" in os.environ else ["--local", "2x2"]
    options = lesson.get("launcher", [])
    return LAUNCHER, [*where, *options, lesson["file"], *lesson["arguments"]]


def start(lesson, **options):
    """Start a lesson from any folder; return the Popen object. The options are Popen's."""
    program, arguments = command_of(lesson)
    begin = [sys.executable, "-u"] if program == "python" else [str(ROOT / program)]
    arguments = [str(ROOT / x) if x == lesson["file"] else x for x in arguments]
    env = {**os.environ, "PYTHON": sys.executable}  # for the launcher
    return subprocess.Popen(
        [*begin, *arguments], stdout=subprocess.PIPE, text=True, env=env, **options
    )


def event_files():
    """Return the paths of all files of TensorBoard's that lie where the lessons put theirs."""
    return set(REPORT.parent.rglob("events.out.tfevents.*"))


def run(lesson):
    """Run one lesson, its output passed on line by line. Return what came of it, a dict.

    output is the text; showed is its line beginning with "=>" or ""; seconds is how long it took;
    problem is a few words or "".
    """
    output, showed, begin = "", "", time.monotonic()
    process = start(lesson)
    # The lesson gets ten times as long as it should need; then it has to end.
    limit = 10 * lesson["seconds"]
    timer = threading.Timer(limit, process.terminate)
    timer.start()
    try:
        for line in process.stdout:
            print(f"   {line}", end="", flush=True)
            output += line
            if line.startswith("=>"):
                showed = line.strip()
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    seconds, problem = time.monotonic() - begin, ""
    if seconds > limit:
        problem = f"stopped after {limit} s"
    elif status:
        problem = f"exit status {status}"
    elif not re.fullmatch(lesson["proof"], showed):
        problem = "its proof line is missing or wrong"
    return {"output": output, "showed": showed, "seconds": seconds, "problem": problem}


def write_report(results, began):
    """Write the report of a run that began at this time (seconds). Return whether it worked."""
    from report import write  # here, because what it imports takes seconds to load

    try:
        write(REPORT, results, shlex.join(["scripts/run_course.sh", *sys.argv[1:]]), began)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        print(f"There is no report: {REPORT} cannot be written ({reason}).", file=sys.stderr)
        return False
    print(f"report: {REPORT}")
    return True


def main():
    """Run the lessons asked for, then print the table."""
    parser = argparse.ArgumentParser(prog="run_course.sh", description=__doc__.splitlines()[0])
    parser.add_argument("lesson", nargs="*", help="lesson ids, day1 or day2; all if none is given")
    parser.add_argument("--list", action="store_true", help="show the lessons and run nothing")
    args = parser.parse_args()
    try:
        lessons = choose(read_course(), args.lesson)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for x in lessons:
            print(f"{x['id']:>12}  {x['file']:<38} {x['idea']}")
        return 0
    began, results = time.time(), []
    for number, lesson in enumerate(lessons, 1):
        program, arguments = command_of(lesson)
        shown, before = shlex.join([program, *arguments]), event_files()
        print(f"\n[{number}/{len(lessons)}] {lesson['idea']}\n   $ {shown}", flush=True)
        result = {"id": lesson["id"], "idea": lesson["idea"], "command": shown, **run(lesson)}
        results.append({**result, "events": sorted(event_files() - before)})
    name = max(len("lesson"), *(len(x["id"]) for x in results))
    width = max(len(x["showed"]) for x in results)
    print(f"\n{'lesson':>{name}}  {'what it showed':<{width}}  {'seconds':>7}")
    for x in results:
        state = x["problem"] or "ok"
        print(f"{x['id']:>{name}}  {x['showed']:<{width}}  {x['seconds']:7.1f}  {state}")
    well = sum(not x["problem"] for x in results)
    total = sum(x["seconds"] for x in results)
    print(f"\n{well} of {len(results)} lessons ok, {total:.0f} seconds in all", flush=True)
    written = write_report(results, began)
    return 0 if well == len(results) and written else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
