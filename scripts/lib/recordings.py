"""What was recorded, and the tables of it: outputs, faults, versions, GPUs, devices."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from lib import processes
from lib.course import ROOT, read_course
from lib.environment import numbers
from lib.machine import recorded
from lib.pages import PAGES, PART
from lib.run_lesson import command_of, run

FAULTS_LIMIT = 7200  # seconds that the tests of faults may take
WORKS_WITH = ROOT / "tests" / "works_with.json"
RECORDS = ROOT / "tests" / "records"  # of tests/on_gpu.py
GROUPS = ["processes", "network", "data", "checkpoints", "use", "numerics"]


def record(lesson, folder, old):
    """Run a lesson as run_course.sh would. Return its Markdown: command and output.

    That is the old one where the lesson cannot run on this machine.
    """
    print(f"recording lesson {lesson['id']}", flush=True)
    result = run(lesson, cwd=folder)
    if result["problem"]:
        sys.exit(f"lesson {lesson['id']} failed: {result['problem']}")
    if result["skipped"]:
        print(f"lesson {lesson['id']} keeps its old output: {result['skipped']}")
        return old
    program, arguments = command_of(lesson)
    # What another machine would print too: without where the repository lies here.
    output = result["output"].rstrip().replace(f"{ROOT}/", "").replace(sys.executable, "python")
    return f"```console\n$ {' '.join([program, *arguments])}\n{output}\n```\n"


def folded(output):
    """Return a recorded output as it stands in a page: to be unfolded after the prediction."""
    summary = "<summary>What it printed when it was recorded</summary>"
    return f"<details>\n{summary}\n\n{output}\n</details>\n"


def unfolded(text):
    """Return the output in what folded has made; "" if there is none yet."""
    found = re.search(r"```console\n.*?```\n", text, re.DOTALL)
    return found[0] if found else ""


def outputs_of_pages():
    """Return the outputs that stand in the pages, {lesson id: Markdown}, as the lessons stand."""
    parts = [PART.findall((ROOT / page).read_text()) for page in PAGES]
    found = {words: old for part in parts for _, kind, words, old, _ in part if kind == "output"}
    names = [x["id"] for x in read_course()]
    return {name: unfolded(found[f" {name}"]) for name in names if f" {name}" in found}


def record_faults(file):
    """Run the tests of faults. Return what they saw, a list of dicts, in the order of the tests."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "tests/faults"]
    env = {**os.environ, "FAULTS_RECORD": str(file)}
    job = processes.run(command, FAULTS_LIMIT, cwd=ROOT, env=env, stdout=None)
    if job.stopped or job.status:
        sys.exit("a test of faults failed")
    return sorted(map(json.loads, file.read_text().splitlines()), key=place)


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
    return recorded("python scripts/update_docs.py --faults") + "\n" + "\n".join(rows) + "\n"


def seen_in(x):
    """Return what a fault made the job say, without the folder where the test ran, and the cure."""
    lines = [re.sub(r"(?<!\S)/\S+/(?=\S)", "", line).strip() for line in x["says"].splitlines()]
    lines = lines if len(lines) < 3 else [lines[0], "", lines[-1]]
    says = " ".join(f"`{line}`" if line else "..." for line in lines)
    return says or "the prompt", x["do"]


def measured(outputs):
    """Return the table of the proof lines of all recorded outputs."""
    rows = ["| lesson | what it showed |", "|---|---|"]
    for name, output in outputs.items():
        proofs = [line for line in output.splitlines() if line.startswith("=>")]
        rows += [f"| {name} | `{proof}` |" for proof in proofs]
    return recorded("python scripts/update_docs.py --record") + "\n" + "\n".join(rows) + "\n"


def setting(record):
    """Return what a record of run_tests.sh --torch is of: torch, Python such as 3.11, machine."""
    return record["torch"], record["Python"].rpartition(".")[0], record["machine"]


def take_records():
    """Put the records of runs/works_with/ into tests/works_with.json, in the place of older ones.

    Raises FileNotFoundError with a sentence if there are none.
    """
    files = sorted((ROOT / "runs" / "works_with").glob("*.json"))
    if not files:
        todo = "First: ./scripts/run_tests.sh --torch VERSION"
        raise FileNotFoundError(f"There is nothing in runs/works_with. {todo}")
    known = json.loads(WORKS_WITH.read_text()) if WORKS_WITH.exists() else []
    newest = {setting(x): x for x in [*known, *(json.loads(file.read_text()) for file in files)]}
    records = sorted(newest.values(), key=lambda x: numbers(x["torch"]) + numbers(x["Python"]))
    WORKS_WITH.write_text(json.dumps(records[::-1], indent=1) + "\n")


def works_with():
    """Return the table of the versions that the course was tested with."""
    rows = ["| torch | torchvision | Python | on | date | tests | lessons |"]
    rows.append("|---|---|---|---|---|---|---|")
    for x in json.loads(WORKS_WITH.read_text()):
        counts = [f"{x[kind]} {kind}" for kind in ("passed", "failed", "skipped") if x[kind]]
        absent = [f"{name} ({reason})" for name, reason in x["lessons"].items() if reason]
        lessons = "all" + (f" but {', '.join(absent)}" if absent else "")
        cells = [x[key] for key in ("torch", "torchvision", "Python", "machine", "date")]
        rows.append(f"| {' | '.join([*cells, ', '.join(counts), lessons])} |")
    return "\n".join(rows) + "\n"


def gpu_table():
    """Return the table of what was recorded on machines with GPUs, or that there is nothing yet."""
    rows = [
        "| recorded | GPUs | torch | as expected | different | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        machine, names = record["machine"], {"same": [], "DIFFERENT": [], "skipped": []}
        for x in record["items"]:
            names[x["verdict"]].append(f"`{x['item']}`")
        nccl = f", NCCL {machine['NCCL']}" if "NCCL" in machine else ""
        cells = [
            f"[{record['recorded']}]({path.relative_to(ROOT)})",
            f"{machine['count']} x {machine['name']}",
            f"{machine['torch']}{nccl}",
            f"{len(names['same'])} of {record['planned']}",
            ", ".join(names["DIFFERENT"]) or "nothing",
            ", ".join(names["skipped"]) or "nothing",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n" if rows[2:] else "Nothing has been recorded on a GPU yet.\n"


def device_table(day):
    """Return the table of the devices that a day's lessons choose on many kinds of machines."""
    command = [sys.executable, str(ROOT / "tests" / "standin" / "devices.py"), day]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
