"""Starting the lessons, as run_course.py and update_docs.py do."""

import os
import sys

from course.lists import LAUNCHER, ROOT
from launcher.processes import Job


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
    """Start a lesson from any folder; return the Job. The options are Popen's.

    The lesson gets ten times as long as it should need; then it has to end.
    """
    program, arguments = command_of(lesson)
    begin = [sys.executable, "-u"] if program == "python" else [str(ROOT / program)]
    arguments = [str(ROOT / x) if x == lesson["file"] else x for x in arguments]
    env = {**os.environ, "PYTHON": sys.executable}  # for the launcher
    return Job([*begin, *arguments], 10 * lesson["seconds"], env=env, **options)


def run(lesson, **options):
    """Run one lesson, its output passed on line by line. Return what came of it, a dict.

    The options are Popen's.

    output is the text; showed is its line beginning with "=>" or ""; seconds is how long it took;
    problem is a few words or ""; skipped is the lesson's sentence if it cannot run here, or "".
    """
    showed, said = "", ""
    with start(lesson, **options) as job:
        for line in job.lines():
            print(f"   {line}", end="", flush=True)
            said = line.strip() or said
            if line.startswith("=>"):
                showed = said
    for process in job.left:
        print(f"   left behind, ended now: process {process}", flush=True)
    problem, skipped = job.trouble, ""
    if job.status == os.EX_UNAVAILABLE and said and not (job.stopped or job.left):
        problem, skipped = "", said
    elif showed.endswith(": WRONG"):
        problem = "WRONG"
    elif not problem and not showed.endswith(": ok"):
        problem = "no proof line"
    return {
        "output": job.output,
        "showed": showed,
        "seconds": job.seconds,
        "problem": problem,
        "skipped": skipped,
    }
