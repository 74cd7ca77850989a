"""The records: what each lesson printed on a kind of machine, when, and with which code.

A record is a file of data/records, {id of a run: note}; a run is a lesson, or a variant of one such
as 6.wrong. A note's "code" is a digest of what the run depended on, so a note of other code is
stale. Lessons whose curves are drawn keep them, thinned: {name: [[images seen], [mean loss]]}.
"""

import ast
import hashlib
import io
import json
import math
import os
import re
import socket
import subprocess
import time
import tokenize
import tomllib

from catalog import ROOT, source_of

RECORDS = ROOT / "data" / "records"
SHOWN = "2-cpu-cores"  # the record whose output the pages show
POINTS = 60  # of a curve, at most
LONGEST = 40  # characters of a value
# What depends on a run's code, and neither on the clock nor, up to rounding, on the kind of CPU.
OUTCOME = re.compile(r"\b(?:loss|accuracy|RMSE):? (-?\d[\d.]*(?:e[+-]\d+)?)")
ROUNDING = 2e-3


def read_records():
    """Return all records, {kind of machine: record}."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))}


def write_note(kind, name, note):
    """Put the note of a run into the record of a kind of machine. Return the record's path."""
    path = RECORDS / f"{kind}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    text = json.dumps(known | {name: note}, indent=1)
    # The numbers of a curve in one line
    text = re.sub(r"\[\n[\s\d.,]+\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(text + "\n")
    return path


def make_note(command, result, machine, folder, code):
    """Return the note of a run in a folder; machine is a line on this machine, code its digest."""
    return {
        "recorded": time.strftime("%Y-%m-%d"),
        "on": machine,
        "code": code,
        "command": command,
        "seconds": round(result["seconds"], 1),
        "showed": result["showed"],
        "output": clean(result["output"].rstrip(), folder).splitlines(),
    }


def curves(folder):
    """Return the thinned curves that a lesson wrote into its folder of runs/, by their folders.

    A lesson with a single curve writes it into the folder itself; its name is "".
    """
    from loss_curves import losses, thinned  # here, because it needs numpy

    found = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        name = str(file.parent.relative_to(folder)).strip(".")
        seen, means = thinned(losses(file), POINTS)
        found[name] = [seen, [round(mean, 4) for mean in means]]
    return found


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


# Which code a note is about.


def bare(source):
    """Return Python code without docstrings, comments and empty lines.

    No ast.dump, which differs from one Python to the next.
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        may_have = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if may_have and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest(run, runs):
    """Return a short text that changes with a run's code, its arguments, or the code of its data.

    runs: as of catalog.read_runs
    """
    parts = [bare(source_of(run)), *run.get("launcher", []), *run["arguments"]]
    if "reads" in run:
        parts.append(bare(source_of(runs[run["reads"]])))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def stale(record, runs):
    """Return the runs that a record has of other code than today's, and those that it lacks."""
    return [name for name, x in runs.items() if record.get(name, {}).get("code") != digest(x, runs)]


def difference(old, new):
    """Return what differs between two outputs, lists of lines, besides times and rounding, or "".

    Compared are the kinds of lines and, one by one, losses, accuracies and errors.
    """
    old, new = "\n".join(old), "\n".join(new)
    for line in sorted(kinds_of_lines(old) ^ kinds_of_lines(new)):
        return f"a line like this is only in one of them: {line}"
    both = OUTCOME.findall(old), OUTCOME.findall(new)
    for one, other in zip(*both):
        close = {"rel_tol": ROUNDING, "abs_tol": ROUNDING}
        if not math.isclose(float(one), float(other), **close):
            return f"{one} before, {other} now"
    return "" if len(both[0]) == len(both[1]) else "not as many losses"


def kinds_of_lines(output):
    """Return the kinds of lines before the proof, whose words may depend on its numbers.

    Numbers, devices and choices are masked. What torchrun logs when it restarts a job is left out.
    """
    text = re.sub(r"\d[\d.,+]*(e[+-]\d+,?)?%?", "#", output.rpartition("=> ")[0])
    text = re.sub(r"\b(cpu|cuda|xpu)(:#)?", "DEVICE", text)
    text = re.sub(r"\b(gloo|nccl|xccl)\b", "BACKEND", text)
    text = re.sub(r"\b(linear|sqrt)\b", "RULE", text)
    text = re.sub(r"\b(DistributedDataParallel|Net)\b", "MODEL", text)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    return {line for line in lines if not re.match(r"[WE]#", line)}


# The values that sentences and reports name.


def read_values():
    """Return data/records/values.toml: {lesson id, or all: {name: pattern or formula}}."""
    return tomllib.loads((RECORDS / "values.toml").read_text())


def value(values, name, lines):
    """Return a value of what a lesson printed as text, such as "21,914" for 4.images_per_s.

    Raises KeyError if values has no such name, and ValueError if no line holds the value.
    """
    run, _, name = name.rpartition(".")
    how = (values["all"] | values.get(run.partition(".")[0], {}))[name]
    if not isinstance(how, str):
        words = re.findall(r"[a-z]\w*", how["formula"])
        texts = {word: value(values, f"{run}.{word}", lines) for word in words}
        numbers = {word: float(text.replace(",", "")) for word, text in texts.items()}
        return format(eval(how["formula"], numbers), how["format"])  # noqa: S307, our own
    found = next(filter(None, (re.search(how, line) for line in lines)), None)
    if not found or len(found[1]) > LONGEST:
        raise ValueError(f"no recorded line has a short value for {how!r}")
    return found[1]
