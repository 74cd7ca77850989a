"""What was recorded, and the tables of it: outputs, faults, versions, GPUs, devices."""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from course import machine
from launcher import processes
from course.lists import ROOT, read_course
from course.environment import numbers
from course.machine import recorded
from docs.pages import PAGES, PART
from course.run_lesson import command_of, run

FAULTS_LIMIT = 7200  # seconds that the tests of faults may take
WORKS_WITH = ROOT / "tests" / "works_with.json"
RECORDS = ROOT / "tests" / "records"  # of update_docs.py --record, and of tests/on_gpu.py
RECORD = "python scripts/update_docs.py --record"
SHOWN = "2-cpu-cores"  # the record whose output the pages show
WAYS = ("course", "all", "shared", "one")  # of --record, then groups of tests/on_gpu.py
GROUPS = ["processes", "network", "data", "checkpoints", "use", "numerics"]


def clean(text, folder):
    """Return a text without the names of this machine, of its nodes and of its folders."""
    paths = {f"{folder}": ".", sys.executable: "python", f"{ROOT}/": "", f"{ROOT}": "."}
    for path, instead in paths.items():
        text = text.replace(path, instead)
    text = re.sub(r"(?<![\w./:~-])/([\w.+-]+/)+", "", text)  # of every other path only the file
    for number, name in enumerate(names_of_nodes(), 1):
        text = re.sub(rf"\b{re.escape(name)}\b(\.[\w-]+)*", f"node{number}", text)  # and domain
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "this-machine", text)


@functools.cache
def names_of_nodes():
    """Return the names of the nodes of the Slurm allocation in which this is, [] without one."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    if not command[-1] or shutil.which(command[0]) is None:
        return []
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()


def write_record(path, record):
    """Write a record of this machine, or end with a sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        sys.exit(f"The record cannot be written: {error.filename}: {error.strerror}")


def record(lessons):
    """Run lessons as run_course.sh would, and put them into the record of this machine.

    What it has of other lessons stays. Return its path, and the lessons that failed, {id: why}.
    Raises ValueError with a sentence if torch cannot be asked about the machine.
    """
    here, failed = machine.look(), {}
    here |= {"cores": machine.cores(), "nodes": machine.nodes()}
    path = RECORDS / f"{machine.name_of(here)}.json"
    known = json.loads(path.read_text())["items"] if path.exists() else []
    items = {x["item"]: x for x in known}
    gpus = f"{here['count']} x {here['name']}" if here["count"] else ""
    nodes = [f"{here['nodes']} nodes"] if here["nodes"] > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        for lesson in lessons:
            name = f"course:{lesson['id']}"
            print(f"recording lesson {lesson['id']}", flush=True)
            result = run(lesson, cwd=folder)
            if result["problem"]:
                failed[lesson["id"]] = result["problem"]
                continue
            if result["skipped"]:
                print(f"lesson {lesson['id']} is not recorded: {result['skipped']}")
                continue
            program, arguments = command_of(lesson)
            items[name] = {
                "item": name,
                "recorded": time.strftime("%Y-%m-%d"),
                "on": machine.described(gpus, *nodes),
                "command": " ".join([program, *arguments]),
                "verdict": "same",
                "seconds": round(result["seconds"], 1),
                "showed": result["showed"],
                "output": clean(result["output"].rstrip(), folder).splitlines(),
            }
            in_order = [items[x] for x in map("course:{}".format, names_of_lessons()) if x in items]
            write_record(path, {"command": RECORD, "machine": here, "items": in_order})
    return path, failed


def names_of_lessons():
    """Return the ids of all lessons, in their order."""
    return [x["id"] for x in read_course()]


def read_records():
    """Return all records of tests/records, {path: record}."""
    return {path: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def lessons_in(record):
    """Return the item of each lesson in a record, {lesson id: item}.

    on_gpu.py runs a lesson in several ways. The one that is most like run_course.sh counts.
    """
    items = {x["item"]: x for x in record.get("items", [])}
    return {
        name: next(items[f"{way}:{name}"] for way in WAYS if f"{way}:{name}" in items)
        for name in names_of_lessons()
        if any(f"{way}:{name}" in items for way in WAYS)
    }


def column(kind, records):
    """Return the record that stands for a kind of machine in the table; None if there is none.

    That is the one with the most lessons; of equal ones, the newest. On machines without a GPU it
    is the one whose output the pages show.
    """
    those = {path: x for path, x in records.items() if machine.kind_of(x["machine"]) == kind}
    shown = [x for path, x in those.items() if path.stem == SHOWN]
    return max(shown or those.values(), key=lambda x: (len(lessons_in(x)), newest(x)), default=None)


def newest(record):
    """Return the newest date in a record."""
    return max((date_of(record, x) for x in record.get("items", [])), default="")


def date_of(record, item):
    """Return when an item was recorded: on_gpu.py has one date for all."""
    return item.get("recorded") or record["recorded"]


def outputs():
    """Return what the pages show, {lesson id: Markdown}: command and output, without a GPU.

    Where there are several such records, it is that of two cores, if it has the lesson.
    """
    items, records = {}, read_records()
    for path in sorted(records, key=lambda path: path.stem == SHOWN):
        if machine.kind_of(records[path]["machine"]) == "no GPU":
            items |= lessons_in(records[path])
    return {
        name: "\n".join(["```console", f"$ {x['command']}", *x["output"], "```\n"])
        for name, x in items.items()
    }


def measured():
    """Return the table of what each lesson showed, with a column for each kind of machine."""
    records = read_records()
    columns = {kind: column(kind, records) for kind in machine.KINDS}
    found = {kind: lessons_in(x) if x else {} for kind, x in columns.items()}
    rows = [f"| lesson | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in names_of_lessons():
        cells = [said(items[name]) if name in items else "" for items in found.values()]
        rows.append(f"| {' | '.join([name, *cells])} |")
    lines = [line for kind, x in columns.items() if x for line in when(x, found[kind])]
    return "\n".join(["\n\n".join(lines), "", *rows, ""])


def said(item):
    """Return what stands in the table of a lesson on a machine."""
    return f"`{item['showed']}`" if item["verdict"] == "same" else item["verdict"]


def when(record, items):
    """Return lines on when, how and where the lessons of a column were recorded.

    update_docs.py --record may have recorded some lessons later: a line on a few names them.
    """
    groups = {}
    for name, x in items.items():
        groups.setdefault((date_of(record, x), x.get("on") or record["on"]), []).append(name)
    lines = []
    for (date, where), names in sorted(groups.items(), key=lambda x: -len(x[1])):
        few = record["command"] == RECORD and 2 * len(names) <= len(names_of_lessons())
        command = " ".join([record["command"], *(names if few else [])])
        lines.append(f"Recorded on {date} with `{command}`: {where}.")
    return lines


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


def setting(record):
    """Return what a record of run_tests.sh --torch is of: torch, Python such as 3.11, machine."""
    return record["torch"], record["Python"].rpartition(".")[0], record["machine"]


def take_records():
    """Put the records of runs/works_with/ into tests/works_with.json, in the place of older ones.

    The packages of the newest one go into tests/constraints.txt.

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
    newest = next((x for x in records[::-1] if "packages" in x), None)
    if newest:
        head = f"# What was tested on {newest['date']} with Python {newest['Python']}."
        lines = [f"{name}=={version}" for name, version in newest["packages"].items()]
        lines = [head, "# python scripts/update_docs.py --works-with has written them.", *lines]
        WORKS_WITH.with_name("constraints.txt").write_text("\n".join(lines) + "\n")


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
    for path, record in read_records().items():
        if "planned" not in record:  # it is one of update_docs.py --record
            continue
        gpus, names = record["machine"], {"same": [], "DIFFERENT": [], "skipped": []}
        for x in record["items"]:
            names[x["verdict"]].append(f"`{x['item']}`")
        nccl = f", NCCL {gpus['NCCL']}" if "NCCL" in gpus else ""
        cells = [
            f"[{record['recorded']}]({path.relative_to(ROOT)})",
            f"{gpus['count']} x {gpus['name']}",
            f"{gpus['torch']}{nccl}",
            f"{len(names['same'])} of {record['planned']}",
            ", ".join(names["DIFFERENT"]) or "nothing",
            ", ".join(names["skipped"]) or "nothing",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n" if rows[2:] else "Nothing has been recorded on a GPU yet.\n"


def device_table(day):
    """Return the table of the devices that a day's lessons choose on many kinds of machines."""
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "devices.py"), day]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
