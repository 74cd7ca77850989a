"""Records of what the lessons printed and of what the tests of faults saw, and their tables.

A record is a file of tests/records for a kind of machine: {lesson id: what is known of its run}.
"""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from course.lists import ROOT
from docs.pages import table

RECORDS = ROOT / "tests" / "records"
COMMAND = "python scripts/update_docs.py --record"
SHOWN = "2-cpu-cores"  # the record whose output the pages show
AREAS = ["processes", "network", "data", "checkpoints", "use", "numerics"]


def read_records():
    """Return all records, {kind of machine: record}; the one that the pages show comes first."""
    files = sorted(RECORDS.glob("*.json"), key=lambda file: (file.stem != SHOWN, file.stem))
    return {file.stem: json.loads(file.read_text()) for file in files}


def note(command, result, where, folder):
    """Return what a record holds of a lesson; where is the line on this machine."""
    return {
        "recorded": time.strftime("%Y-%m-%d"),
        "on": where,
        "command": command,
        "seconds": round(result["seconds"], 1),
        "showed": result["showed"],
        "output": clean(result["output"].rstrip(), folder).splitlines(),
    }


def write_record(where, notes, lessons):
    """Put notes, {lesson id: note}, into the record of this kind of machine. Return its path.

    What it has of other lessons stays. Ends with a sentence where it cannot be written.
    """
    path = RECORDS / f"{kind_of(where)}.json"
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= notes
        in_order = {name: known[name] for name in lessons if name in known}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(in_order, indent=1) + "\n")
    except OSError as error:
        sys.exit(f"The record cannot be written: {error.filename}: {error.strerror}")
    return path


def kind_of(where):
    """Return the name for a kind of machine: 2-cpu-cores, 4-nvidia-a100, 2-nodes-4-nvidia-a100.

    where is a line such as "Linux, 2 CPU cores, no GPU, Python 3.11.7, torch 2.15.0".
    """
    _, cores, gpus, *rest = where.split(", ")
    name = cores if gpus == "no GPU" else gpus.replace(" x ", " ")
    nodes = [x for x in rest if x.endswith(" nodes")]
    return re.sub(r"[^a-z0-9]+", "-", " ".join([*nodes, name]).lower())


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


def outputs(records):
    """Return what the pages show, {lesson id: Markdown}: command and output."""
    shown = {}
    for record in reversed(records.values()):
        shown |= record
    return {
        name: "\n".join(["```console", f"$ {x['command']}", *x["output"], "```\n"])
        for name, x in shown.items()
    }


def folded(output):
    """Return a recorded output as it stands in a page: to be unfolded after the prediction."""
    summary = "<summary>What it printed when it was recorded</summary>"
    return f"<details>\n{summary}\n\n{output}\n</details>\n"


def measured(course, page):
    """Return the table of what each lesson showed, with a column for each kind of machine."""
    lines = [line for record in course.records.values() for line in when(record, course.lessons)]
    rows = []
    for name in course.lessons:
        cells = [f"`{x[name]['showed']}`" if name in x else "" for x in course.records.values()]
        rows.append([name, *cells])
    kinds = [name.replace("-", " ").replace("cpu", "CPU") for name in course.records]
    return "\n\n".join([*lines, table(["lesson", *kinds], rows)])


def when(record, lessons):
    """Return a line for each time and machine at which lessons of a record were recorded."""
    groups = {}
    for name, x in record.items():
        groups.setdefault((x["recorded"], x["on"]), []).append(name)
    lines = []
    for (date, where), names in sorted(groups.items(), key=lambda x: -len(x[1])):
        few = 2 * len(names) <= len(lessons)
        command = " ".join([COMMAND, *(names if few else [])])
        lines.append(f"Recorded on {date} with `{command}`: {where}.")
    return lines


def seconds(course, page, columns=3):
    """Return the table of how long each lesson ran, in the record that the pages show."""
    record = course.records[SHOWN]
    cells = [[name, f"{record[name]['seconds']:.0f}"] for name in course.lessons if name in record]
    height = -(-len(cells) // columns)
    cells += [["", ""]] * (columns * height - len(cells))
    rows = [[x for cell in cells[i::height] for x in cell] for i in range(height)]
    return "\n\n".join(
        [*when(record, course.lessons), table(["lesson", "seconds"] * columns, rows)]
    )


def read_faults(folder):
    """Return what the tests of faults wrote into a folder: dicts, in the order of the table."""
    seen = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    return sorted(seen, key=lambda x: (AREAS.index(x["area"]), x["order"], x["fault"]))


def faults(course, page):
    """Return the table of the faults, area by area; what looks alike shares a row.

    Where nothing was recorded now, it is None.
    """
    if course.faults is None:
        return None
    rows = []
    for area in AREAS:
        rows.append([f"**{area}**", "", "", ""])
        alike = {}  # {what one sees and does: {fault: seconds}}
        for x in course.faults:
            if x["area"] == area:
                alike.setdefault((says(x["seen"]), x["do"]), {})[x["fault"]] = x["seconds"]
        for (words, do), names in alike.items():
            longest = max((x for x in names.values() if x is not None), default=None)
            rows.append(["; ".join(names), words, "" if longest is None else f"{longest:.0f}", do])
    return f"{course.faults_recorded}\n" + table(
        ["fault", "what you will see", "seconds", "what to do"], rows
    )


def says(text):
    """Return the first and last line of what was seen, without the folder where the test ran."""
    lines = [re.sub(r"(?<!\S)/\S+/(?=\S)", "", line).strip() for line in text.splitlines()]
    lines = lines if len(lines) < 3 else [lines[0], "", lines[-1]]
    return " ".join(f"`{line}`" if line else "..." for line in lines) or "the prompt"
