"""Start a lesson, for run_course.py and update_docs.py."""

import os
import sys

from catalog import LAUNCHER, ROOT
from processes import Job
from progress import SignOfLife


def lesson_command(lesson):
    """Return how to start a lesson, as (program, arguments); paths are from the repository's root.

    A lesson for several nodes runs on the nodes of the current Slurm allocation. Outside of one, it
    runs on two simulated nodes.
    """
    if not lesson["nodes"]:
        return "python", [lesson["file"], *lesson["arguments"]]
    where = [] if "SLURM_JOB_ID" in os.environ else ["--local", "2x2"]
    options = lesson.get("launcher", [])
    return LAUNCHER, [*where, *options, lesson["file"], *lesson["arguments"]]


def run_lesson(lesson, limit=600, **options):
    """Run a lesson and pass its output on, line by line. Return a dict; the options are Job's.

    output    everything that it printed
    showed    its last line that begins with "=>", or ""
    seconds   how long it took
    problem   what went wrong in a few words, or ""
    skipped   why the lesson cannot run here, as it says itself, or ""
    """
    program, arguments = lesson_command(lesson)
    begin = [sys.executable, "-u"] if program == "python" else [ROOT / program]
    # This works from any folder. A path that is already absolute stays as it is.
    arguments = [ROOT / x if x == lesson["file"] else x for x in arguments]
    env = {**os.environ, "PYTHON": sys.executable}  # for the launcher
    with SignOfLife("   ") as life, Job([*begin, *arguments], limit, env=env, **options) as job:
        for line in job.lines():
            print(f"   {line}", end="", flush=True)
            life.said()
    for process in job.left:
        print(f"   left behind, so killed: process {process}", flush=True)
    lines = [line.rstrip() for line in job.output.splitlines() if line.strip()]
    proofs = [line for line in lines if line.startswith("=>")]
    showed = proofs[-1] if proofs else ""
    result = {"output": job.output, "showed": showed, "seconds": job.seconds, "skipped": ""}
    result["problem"] = job.trouble
    if showed.endswith(": WRONG"):
        result["problem"] = "WRONG"
    elif job.trouble == f"exit status {os.EX_UNAVAILABLE}" and lines:
        result.update(problem="", skipped=lines[-1])
    elif not job.trouble and not showed.endswith(": ok"):
        result["problem"] = "no proof line"
    return result


def summary(results):
    """Return in a few words how many lessons ended well, for the table and the report."""
    ran = [x for x in results if not x["skipped"]]
    words = [f"{sum(not x['problem'] for x in ran)} of {len(ran)} lessons ok"]
    if len(ran) < len(results):
        words.append(f"{len(results) - len(ran)} skipped")
    words.append(f"{sum(x['seconds'] for x in results):.0f} seconds in total")
    return ", ".join(words)
