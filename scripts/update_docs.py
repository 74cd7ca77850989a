"""Fill in the made parts of the READMEs: lesson tables, diffs between lessons, recorded outputs.

A made part stands between two lines. The first says what belongs there, the second ends it:

    <!-- begin lessons day1 -->      the table of a day's lessons, from course.toml
    <!-- begin diff 4 6 -->          what changes from one lesson to another, foldable
    <!-- begin output 4 -->          what the lesson printed when it was last recorded
    <!-- begin measured -->          the proof lines of the last recording, with date and machine
    <!-- begin faults -->            what the tests of tests/faults saw when they were last recorded
    <!-- end -->

What a lesson's docstring says to look for is the proof line of its recorded output, too.

Usage: scripts/update_docs.py              fill in tables, diffs and what to look for
       scripts/update_docs.py --check      change nothing; exit status 1 if something is stale
       scripts/update_docs.py --record     run every lesson first and fill in its output too
       scripts/update_docs.py --record 8   run these lessons only, and keep the other outputs
       scripts/update_docs.py --faults     run the tests of faults and fill in what they saw
"""

import argparse
import difflib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run_course import ROOT, command_of, read_course, start

PAGES = ["README.md", "day1/README.md", "day2/README.md"]
PART = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def lesson_table(lessons, day):
    """Return a Markdown table of the lessons of a day."""
    rows = ["| lesson | the one new idea | builds on |", "|---|---|---|"]
    for x in lessons:
        folder, _, name = x["file"].partition("/")
        if folder == day:
            link = f"[{name}]({{folder}}{name})"
            rows.append(f"| {link} | {x['idea']} | {x.get('parent', '')} |")
    return "\n".join(rows) + "\n"


def diff(old, new):
    """Return a foldable unified diff of two lesson files."""
    names = [Path(x["file"]).name for x in (old, new)]
    texts = [(ROOT / x["file"]).read_text().splitlines() for x in (old, new)]
    lines = list(difflib.unified_diff(*texts, *names, lineterm="", n=2))
    added = sum(line.startswith("+") for line in lines) - 1
    removed = sum(line.startswith("-") for line in lines) - 1
    head = f"<summary>What changes from lesson {old['id']}: +{added} -{removed} lines</summary>"
    return "\n".join(["<details>", head, "", "```diff", *lines, "```", "", "</details>", ""])


def record(lesson, folder):
    """Run a lesson as run_course.sh would. Return its Markdown: command and output."""
    print(f"recording lesson {lesson['id']}", flush=True)
    process = start(lesson, cwd=folder)
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"lesson {lesson['id']} failed")
    program, arguments = command_of(lesson)
    # What another machine would print too: without where the repository lies here.
    output = output.rstrip().replace(f"{ROOT}/", "").replace(sys.executable, "python")
    return f"```console\n$ {' '.join([program, *arguments])}\n{output}\n```\n"


def recorded():
    """Return the outputs that stand in the pages, {lesson id: Markdown}."""
    parts = [PART.findall((ROOT / page).read_text()) for page in PAGES]
    return {
        words.strip(): old for part in parts for _, kind, words, old, _ in part if kind == "output"
    }


def record_faults(file):
    """Run the tests of faults. Return what they saw, a list of dicts, in the order of the tests."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-n", "2", "tests/faults"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "FAULTS_RECORD": str(file)})
    if done.returncode:
        sys.exit("a test of faults failed")
    return sorted(map(json.loads, file.read_text().splitlines()), key=place)


GROUPS = ["processes", "network", "data", "checkpoints", "use", "numerics"]


def place(row):
    """Return where a fault stands in the tests: group, line of the test, name."""
    file, _, test = row["test"].rpartition("::")
    group = Path(file).stem.removeprefix("test_")
    text = (ROOT / "tests" / "faults" / Path(file).name).read_text()
    return GROUPS.index(group), text.index(f"def {test}("), row["fault"]


def fault_table(seen):
    """Return the table of the faults, group by group."""
    rows = ["| fault | what you will see | seconds | what to do |", "|---|---|---|---|"]
    for number, group in enumerate(GROUPS):
        rows.append(f"| **{group}** | | | |")
        alike = {}  # {the rest of the row: faults that look so}
        for x in seen:
            if place(x)[0] == number:
                alike.setdefault(seen_in(x), {})[x["fault"]] = x["seconds"]
        for (says, do), faults in alike.items():
            longest = max((x for x in faults.values() if x is not None), default=None)
            seconds = "" if longest is None else f"{longest:.0f}"
            rows.append(f"| {'; '.join(faults)} | {says} | {seconds} | {do} |")
    return machine("--faults") + "\n" + "\n".join(rows) + "\n"


def seen_in(x):
    """Return what a fault made the job say, without the folder where the test ran, and the cure."""
    lines = [re.sub(r"(?<!\S)/\S+/(?=\S)", "", line).strip() for line in x["says"].splitlines()]
    lines = lines if len(lines) < 3 else [lines[0], "", lines[-1]]
    says = " ".join(f"`{line}`" if line else "..." for line in lines)
    return says or "the prompt", x["do"]


def machine(option="--record"):
    """Return one line on where and when a recording was made."""
    import torch

    accelerator = "no GPU"
    if torch.accelerator.is_available():
        accelerator = (
            f"{torch.accelerator.device_count()} {torch.accelerator.current_accelerator()}"
        )
    return (
        f"Recorded on {time.strftime('%Y-%m-%d')} with `python scripts/update_docs.py {option}`: "
        f"{platform.system()}, {torch.get_num_threads()} CPU cores, {accelerator}, "
        f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}.\n"
    )


def measured(outputs):
    """Return the table of the proof lines of all recorded outputs."""
    rows = ["| lesson | what it showed |", "|---|---|"]
    for name, output in outputs.items():
        proofs = [line for line in output.splitlines() if line.startswith("=>")]
        rows += [f"| {name} | `{proof}` |" for proof in proofs]
    return machine() + "\n" + "\n".join(rows) + "\n"


def look_for(text, output):
    """Return a lesson's text whose docstring says to look for the proof line of an output."""
    proof = re.search(r"^=> .*$", output, re.MULTILINE)
    if not proof:  # not recorded yet
        return text
    return re.sub(r"^Look for:  .*$", lambda _: f"Look for:  {proof[0]}", text, count=1, flags=re.M)


def fill(text, page, lessons, outputs, seen):
    """Return a page's text with its made parts filled in.

    outputs, of the lessons, and seen, of the faults, are None to leave them be.
    """
    by_id = {x["id"]: x for x in lessons}

    def part(match):
        begin, kind, words, old, end = match.groups()
        words = words.split()
        if kind == "lessons":
            folder = "" if page.startswith(f"{words[0]}/") else f"{words[0]}/"
            new = lesson_table(lessons, words[0]).replace("{folder}", folder)
        elif kind == "diff":
            new = diff(by_id[words[0]], by_id[words[1]])
        elif kind == "output":
            new = outputs[words[0]] if outputs else old
        elif kind == "measured":
            new = measured(outputs) if outputs else old
        elif kind == "faults":
            new = fault_table(seen) if seen else old
        else:
            sys.exit(f"{page}: there is no made part of the kind {kind!r}.")
        return begin + new + end

    return PART.sub(part, text)


def main():
    """Update or check all pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    parser.add_argument("--record", nargs="*", metavar="ID", help="run lessons, take their output")
    parser.add_argument("--faults", action="store_true", help="run tests/faults, take what it saw")
    args = parser.parse_args()
    lessons = read_course()
    outputs, seen, known = None, None, recorded()
    if args.faults:
        with tempfile.TemporaryDirectory() as folder:
            seen = record_faults(Path(folder, "faults"))
    if args.record is not None:
        with tempfile.TemporaryDirectory() as folder:
            outputs = {
                x["id"]: record(x, folder)
                if x["id"] in args.record or not args.record
                else known.get(x["id"], "")
                for x in lessons
            }
    stale = []

    def update(file, change):
        path = ROOT / file
        old = path.read_text()
        new = change(old)
        if new != old:
            stale.append(file)
            if not args.check:
                path.write_text(new)

    for x in lessons:  # before the pages, which show what changes from lesson to lesson
        update(x["file"], lambda text, x=x: look_for(text, (outputs or known).get(x["id"], "")))
    for page in PAGES:
        update(page, lambda text, page=page: fill(text, page, lessons, outputs, seen))
    if args.check and stale:
        print(f"Stale: {', '.join(stale)}. Run: python scripts/update_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
