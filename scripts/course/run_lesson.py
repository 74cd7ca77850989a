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
    if not lesson["nodes"]:
        return "python", [lesson["file"], *lesson["arguments"]]
    where = [] if "SLURM_JOB_ID" in os.environ else ["--local", "2x2"]
    options = lesson.get("launcher", [])
    return LAUNCHER, [*where, *options, lesson["file"], *lesson["arguments"]]


def run(lesson, **options):
    """Run one lesson and pass its output on, line by line. Return a dict; the options are Popen's.

    output    all that it printed
    showed    its last line that begins with "=>", or ""
    seconds   how long it took
    problem   what went wrong in a few words, or ""
    skipped   the lesson's own sentence if it cannot run here, or ""
    """
    program, arguments = command_of(lesson)
    begin = [sys.executable, "-u"] if program == "python" else [ROOT / program]
    # From any folder. A path that is absolute already stays as it is.
    arguments = [ROOT / x if x == lesson["file"] else x for x in arguments]
    env = {**os.environ, "PYTHON": sys.executable}  # for the launcher
    with Job([*begin, *arguments], lesson.get("limit", 600), env=env, **options) as job:
        for line in job.lines():
            print(f"   {line}", end="", flush=True)
    for process in job.left:
        print(f"   left behind, ended now: process {process}", flush=True)
    lines = [line.rstrip() for line in job.output.splitlines() if line.strip()]
    proofs = [line for line in lines if line.startswith("=>")]
    showed = proofs[-1] if proofs else ""
    cannot_run = job.trouble == f"exit status {os.EX_UNAVAILABLE}" and lines
    return {
        "output": job.output,
        "showed": showed,
        "seconds": job.seconds,
        "problem": "" if cannot_run else problem(job, showed),
        "skipped": lines[-1] if cannot_run else "",
    }


def problem(job, showed):
    """Return what was wrong with a lesson that has ended, in a few words; "" if nothing was."""
    if showed.endswith(": WRONG"):
        return "WRONG"
    if job.trouble or showed.endswith(": ok"):
        return job.trouble
    return "no proof line"


def summary(results):
    """Return in a few words how many lessons ended well, for the table and the report."""
    ran = [x for x in results if not x["skipped"]]
    words = [f"{sum(not x['problem'] for x in ran)} of {len(ran)} lessons ok"]
    if len(ran) < len(results):
        words.append(f"{len(results) - len(ran)} skipped")
    words.append(f"{sum(x['seconds'] for x in results):.0f} seconds in all")
    return ", ".join(words)
