"""Starting a lesson, as run_course.py and update_docs.py do."""

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
    """Run one lesson and pass its output on, line by line. Return a dict; the options are Popen's.

    output    all that it printed
    showed    its last line that begins with "=>", or ""
    seconds   how long it took
    problem   what went wrong in a few words, or ""
    skipped   the lesson's own sentence if it cannot run here, or ""
    """
    showed = ""
    last_line = ""
    with start(lesson, **options) as job:
        for line in job.lines():
            print(f"   {line}", end="", flush=True)
            last_line = line.strip() or last_line
            if line.startswith("=>"):
                showed = line.strip()
    for process in job.left:
        print(f"   left behind, ended now: process {process}", flush=True)
    cannot_run = job.status == os.EX_UNAVAILABLE and last_line and not (job.stopped or job.left)
    return {
        "output": job.output,
        "showed": showed,
        "seconds": job.seconds,
        "problem": "" if cannot_run else problem(job, showed),
        "skipped": last_line if cannot_run else "",
    }


def problem(job, showed):
    """Return what was wrong with a lesson that has ended, in a few words; "" if nothing was."""
    if showed.endswith(": WRONG"):
        return "WRONG"
    if job.trouble or showed.endswith(": ok"):
        return job.trouble
    return "no proof line"
