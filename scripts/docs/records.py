"""Records of what the lessons printed and of what the tests of faults saw, tables and values.

A record is a file of data/records for a kind of machine: {lesson id: what is known of its run}.
Lessons whose curves the slides show keep them, thinned: {name: [[images seen], [mean loss]]}.
Values are the numbers of recorded runs that sentences name; data/records/values.toml lists them.
"""

import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path

from catalog import ROOT
from docs.pages import table
from loss_curves import losses, thinned

RECORDS = ROOT / "data" / "records"
SHOWN = "2-cpu-cores"  # the record whose output the pages show
CURVES = ["2", "6", "8", "10"]  # the lessons whose curves the slides show
POINTS = 60  # of a curve, at most
LONGEST = 40  # characters of a value
AREAS = ["processes", "data", "use"]


def read_records():
    """Return all records, {kind of machine: record}."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))}


def note(command, result, machine, folder):
    """Return the record of a lesson that ran in a folder; machine is a line on this machine."""
    return {
        "recorded": time.strftime("%Y-%m-%d"),
        "on": machine,
        "command": command,
        "seconds": round(result["seconds"], 1),
        "showed": result["showed"],
        "output": clean(result["output"].rstrip(), folder).splitlines(),
    }


def curves(folder):
    """Return the thinned curves that a lesson wrote into its folder of runs/, by their folders.

    A lesson with a single curve writes it into the folder itself; its name is "".
    """
    found = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        name = str(file.parent.relative_to(folder)).strip(".")
        seen, means = thinned(losses(file), POINTS)
        found[name] = [seen, [round(mean, 4) for mean in means]]
    return found


def write_record(kind, notes):
    """Put notes, {lesson id: note}, into the record of a kind of machine. Return its path."""
    path = RECORDS / f"{kind}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    text = json.dumps(known | notes, indent=1)
    # The numbers of a curve in one line
    text = re.sub(r"\[\n[\s\d.,]+\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(text + "\n")
    return path


def clean(text, folder):
    """Return a text without the names of this machine, of its nodes and of its folders."""
    text = text.replace(str(folder), ".").replace(f"{ROOT}/.venv/bin/", "").replace(f"{ROOT}/", "")
    text = re.sub(r"(?<![\w./:~-])/([\w.+-]+/)+", "", text)  # of every other path only the file
    for number, name in enumerate(nodes_of_allocation(), 1):
        text = re.sub(rf"\b{re.escape(name)}\b(\.[\w-]+)*", f"node{number}", text)  # and domain
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "this-machine", text)


def nodes_of_allocation():
    """Return the names of the current Slurm allocation's nodes, [] outside of one."""
    if "SLURM_JOB_ID" not in os.environ:
        return []
    return subprocess.check_output(["scontrol", "show", "hostnames"], text=True).split()


def value(course, name):
    """Return a value as text, such as "21,914" for 4.images_per_s.

    Of each lesson, recorded is the date of its record, and on its machine. Raises KeyError if there
    is no such value, and ValueError if the record does not hold it.
    """
    lesson, _, name = name.rpartition(".")
    record = course.records[SHOWN][lesson]
    if name in ("recorded", "on"):
        return record[name]
    how = (course.values["all"] | course.values.get(lesson.partition(".")[0], {}))[name]
    if not isinstance(how, str):
        words = re.findall(r"[a-z]\w*", how["formula"])
        texts = {word: value(course, f"{lesson}.{word}") for word in words}
        numbers = {word: float(text.replace(",", "")) for word, text in texts.items()}
        return format(eval(how["formula"], numbers), how["format"])  # noqa: S307, our own
    matches = (re.search(how, line) for line in record["output"])
    found = next(filter(None, matches), None)
    if not found or len(found[1]) > LONGEST:
        raise ValueError(f"no recorded line has a short value for {how!r}")
    return found[1]


def measured(course, page):
    notes = [x[name] for x in course.records.values() for name in course.lessons if name in x]
    recorded = {(x["recorded"], x["on"]) for x in notes}
    command = "`python scripts/update_docs.py --record`"
    lines = [f"Recorded on {date} with {command}: {on}." for date, on in sorted(recorded)]
    rows = [[name] for name in course.lessons]
    for record in course.records.values():
        for row in rows:
            x = record.get(row[0])
            row.append(f"`{x['showed']}` {x['seconds']:.0f} s" if x else "")
    kinds = [name.replace("-", " ").replace("cpu", "CPU") for name in course.records]
    return "\n\n".join([" ".join(lines), table(["lesson", *kinds], rows)])


def faults(course, page):
    """Return the table of the faults, or None if the tests of faults have not just run."""
    return course.faults


def table_of_faults(folder):
    """Return what the tests of faults wrote into a folder, as a table, area by area.

    Faults with the same symptom and the same advice share a row.
    """
    seen = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    rows = []
    for area in AREAS:
        rows.append([f"**{area}**", "", "", ""])
        same = {}
        for x in sorted(seen, key=lambda x: (x["order"], x["fault"])):
            if x["area"] == area:
                same.setdefault((symptom(x["seen"]), x["do"]), []).append(x)
        for (words, advice), several in same.items():
            names = "; ".join(x["fault"] for x in several)
            seconds = [x["seconds"] for x in several if x["seconds"] is not None]
            longest = f"{max(seconds):.0f}" if seconds else ""
            rows.append([names, words, longest, advice])
    return table(["fault", "what you will see", "seconds", "what to do"], rows)


def symptom(text):
    """Return the first and last line of what was seen, without the folder where the test ran."""
    lines = [re.sub(r"(?<!\S)/\S+/(?=\S)", "", line).strip() for line in text.splitlines()]
    lines = lines if len(lines) < 3 else [lines[0], "", lines[-1]]
    return " ".join(f"`{line}`" if line else "..." for line in lines) or "the prompt"
