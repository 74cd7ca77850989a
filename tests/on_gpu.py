"""Try on a machine with GPUs what has only been run on CPUs, and write down what was seen.

Usage: python tests/on_gpu.py                        everything, one thing after the other
       python tests/on_gpu.py --list                 the items and their commands; runs nothing
       python tests/on_gpu.py --dry-run              only the commands; runs nothing
       python tests/on_gpu.py --only chain shared:4  these groups and items
       python tests/on_gpu.py --output FILE          write the record there

Groups:  one        each lesson with one rank; Day 2 through scripts/multinode_setup_and_run.sh
         all        each lesson with a rank on every GPU, where there are several
         nodes      Day 2 on two imitated nodes that divide the GPUs, where there are several
         shared     each lesson with 4 ranks on one GPU, which talk through gloo
         chain      lessons 2, 3, 4, 6, 10, 11: same global batch, seed and order, so same losses
         nccl       lesson 1 five times, test-profile with the backend before torch 2.15
         faults     rank 1 is killed, stopped, or does not come

Each item says what is expected, what was seen, and whether that is the same or DIFFERENT. It has a
time limit, and no process of it goes on. After each item the record is written: a file in
tests/records/ that names neither the machine nor its folders. scripts/update_docs.py makes the
tables in tests/MEASURED.md of these files and of those that its --record writes.

The exit status is 0 if all is as expected, 1 if something differed, 2 without a GPU or for a wrong
argument, 130 after Ctrl-C.
"""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
processes = importlib.import_module("launcher.processes")
course = importlib.import_module("course.lists")
of_machine = importlib.import_module("course.machine")
recordings = importlib.import_module("docs.recordings")
clean, write = recordings.clean, recordings.write_record

LESSONS = {x["id"]: x for x in course.read_course()}
ONE_PROCESS = ("2", "create_mnist_h5", "create_ratings")
NEEDS = {"11": "one:create_mnist_h5", "14": "one:create_ratings"}
KEEP = ("1", "5", "7", "9", "14", "16", "17", "18", "test-profile")  # a GPU decides
SHARE = 4  # ranks on one GPU
WITHIN = 30  # seconds from a fault to the end of the job
IMAGES, GLOBAL_BATCH = 60_000, 3000  # 20 steps an epoch: then a point of lesson 10 is one step
ROUNDING = 1e-5  # so much may a loss differ, as in the tests on CPUs; printed, it has 4 digits
FAULT = "the fault comes now"
PROVED = "^=> .*: ok$"
TOOLS = (
    ["git", "describe", "--always", "--dirty"],
    [sys.executable, "-m", "torch.utils.collect_env"],  # also the driver, the CPU, the system
    ["nvidia-smi", "topo", "-m"],
    ["rocm-smi", "--showdriverversion"],
)


@dataclass
class Item:
    """A command that runs in a folder of its own, and what is expected of it."""

    name: str  # group:what
    command: list[str]  # paths from the root of the repository
    expects: list[str]  # regular expressions: each must be found in the output
    variables: dict[str, str] = field(default_factory=dict)
    limit: float = 300  # seconds
    needs: str = ""  # the item that comes before it
    fault: bool = False  # it must fail, and soon
    keep: bool = False  # the record has its output, whatever the verdict
    prepare: Callable | None = None  # called with the folder, before
    compare: Callable | None = None  # (folder, output) to (expected, seen, whether it is the same)

    def shown(self):
        """Return the command as a user would type it."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.command)])


# What to run


def command_of(name, ranks, local, *arguments, file=None):
    """Return the command that starts a lesson: local is for --local, where Day 2 needs it."""
    lesson, file = LESSONS[name], file or LESSONS[name]["file"]
    if lesson.get("nodes"):
        launcher = [course.LAUNCHER, "--local", local, *lesson.get("launcher", [])]
        return [*launcher, file, *arguments]
    return ["python", file, *([] if name in ONE_PROCESS else [str(ranks)]), *arguments]


def first_line(name, ranks, machine, backend):
    """Return what a lesson says of its device, as a list of regular expressions; [] if nothing."""
    if name in ("0", *ONE_PROCESS):
        return []
    shared, device = backend != machine["backend"], machine["kind"]
    if shared and (name == "15" or device == "xpu"):  # neither puts two ranks on one GPU
        device = "cpu"
    rest = "" if name == "15" else f", backend: {backend}"
    return [f"^ranks: {ranks}, device: {device}{rest}$"]


def lesson_item(group, name, ranks, local, machine, backend, variables):
    """Return the item that runs a lesson in one of the ways."""
    lesson = LESSONS[name]
    arguments = lesson["arguments"]
    if arguments and arguments[0].isdigit():  # a number of ranks
        arguments = arguments[1:]
    expects = [*first_line(name, ranks, machine, backend), PROVED]
    if name in ("5", "test-profile") and ranks > 1:  # a row a rank: it computes, it communicates
        expects.append(rf"(?:^ +\d+ +[\d.]+%(?: +(?!0\.0%)[\d.]+%){{2}} .*\n){{{ranks}}}")
    return Item(
        f"{group}:{name}",
        command_of(name, ranks, local, *arguments),
        expects,
        variables,
        limit=5 * lesson["seconds"],
        needs=NEEDS.get(name, ""),
        keep=name in KEEP,
    )


def lesson_items(machine):
    """Return the items that run the lessons in every way that this machine allows."""
    count, backend = machine["count"], machine["backend"]
    ways = [("one", 1, "1x1", backend, {})]  # group, ranks, nodes and ranks on each, ...
    only_one = {}  # hides all GPUs but the first one
    if count > 1:
        ways.append(("all", count, f"1x{count}", backend, {}))
        ways.append(("nodes", count // 2 * 2, f"2x{count // 2}", backend, {}))
        only_one = {machine["mask"]: (os.environ.get(machine["mask"]) or "0").split(",")[0]}
    ways.append(("shared", SHARE, f"1x{SHARE}", "gloo", only_one))
    return [
        lesson_item(group, name, ranks, local, machine, its_backend, variables)
        for group, ranks, local, its_backend, variables in ways
        for name, lesson in LESSONS.items()
        if group == "one" or name not in ONE_PROCESS
        if group != "nodes" or lesson.get("nodes")
    ]


def chain_items(machine):
    """Return the items of the equivalence chain: each link has the losses of lesson 2."""
    several, reference = machine["count"] > 1, []
    backend = machine["backend"] if several else "gloo"
    most = machine["count"] if several else SHARE
    ranks = max(n for n in range(1, most + 1) if GLOBAL_BATCH % n == 0)
    every = ["--lr", "0.015", "--batch-size"]
    together, epoch = [*every, str(GLOBAL_BATCH // ranks)], ["--epochs", "1"]
    whole = ["--images", "60000"]
    # A warm-up without end keeps the rate of lesson 11 where the others have it.
    in_order = ["--file", "chain.h5", "--no-shuffle", "--stream-only", "--warm-up", "1000000000"]
    links = [  # lesson, arguments, which of its curves
        ("2", [*epoch, *every, str(GLOBAL_BATCH)], ""),
        ("3", [*epoch, *every, str(GLOBAL_BATCH)], ""),
        ("4", [*epoch, *together], ""),
        ("6", [*epoch, *together], ""),
        ("10", [*whole, *together], "unscaled"),
        ("11", [*in_order, *epoch, *together], ""),
    ]
    return [
        Item(
            f"chain:{name}",
            command_of(name, ranks, f"1x{ranks}", *arguments),
            first_line(name, ranks, machine, backend),
            needs="" if name == "2" else "chain:2",
            prepare=partial(write_in_order, ranks) if name == "11" else None,
            compare=partial(same_losses, reference, Path(Path(LESSONS[name]["file"]).stem, curve)),
        )
        for name, arguments, curve in links
    ]


def write_in_order(ranks, folder):
    """Write chain.h5: MNIST so that lesson 11, which reads on and on, has lesson 2's batches."""
    import h5py
    import torch

    creator, plain = ROOT / LESSONS["create_mnist_h5"]["file"], folder / "plain.h5"
    processes.run([sys.executable, creator, "--file", plain], 150, cwd=folder)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0))
    # A rank reads its own part of the file from end to end: its share of each batch stands there.
    order = order.view(-1, ranks, GLOBAL_BATCH // ranks).transpose(0, 1).flatten().numpy()
    with h5py.File(plain) as old, h5py.File(folder / "chain.h5", "w") as new:
        new.create_dataset("images", data=old["images"][:][order], chunks=(250, 28, 28))
        new["labels"] = old["labels"][:][order]
        new["test_images"], new["test_labels"] = old["test_images"][:], old["test_labels"][:]


def losses(folder):
    """Return what a lesson wrote for TensorBoard, [(images seen, loss), ...]; [] if nothing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not list(folder.glob("events.*")):
        return []
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss/train")]


def same_losses(reference, curve, folder, output):
    """Compare a lesson's losses with the reference, or become it. As Item.compare."""
    steps, found = IMAGES // GLOBAL_BATCH, losses(folder / "runs" / curve)
    if not reference:
        reference += found
        fall = found[0][1] - found[-1][1] if found else 0
        seen = f"{len(found)} losses, the last {fall:.4f} below the first"
        return f"{steps} losses, the last below the first", seen, len(found) == steps and fall > 0.1
    if found:
        expected = f"{steps} losses, each within {ROUNDING:.0e} of lesson 2's"
        if [images for images, _ in found] != [images for images, _ in reference]:
            return expected, f"{len(found)} losses, after other numbers of images", False
        gap = max(abs(a - b) for (_, a), (_, b) in zip(found, reference))
        return expected, f"{len(found)} losses, within {gap:.0e}", gap <= ROUNDING
    mean = sum(loss for _, loss in reference) / len(reference)  # a lesson that prints it only
    printed = re.findall(r"(?:^epoch 0:|mean) loss ([\d.]+)", output, re.M)
    same = printed and all(abs(float(x) - mean) <= 1e-4 for x in printed)
    return f"every mean loss is lesson 2's, {mean:.4f}", ", ".join(printed) or "none", same


def fault_items(machine):
    """Return the items in which rank 1 of 2 does something while rank 0 waits for the end."""
    backend = machine["backend"] if machine["count"] > 1 else "gloo"
    short, kill = {"DIST_TIMEOUT": "6"}, "kill(getpid(), SIG{})"
    rows = [  # name, lesson, what rank 1 does, variables, what is said then
        ("killed", "1", kill.format("KILL"), {}, "process 1 terminated with signal SIGKILL"),
        (
            "killed-day2",
            "9",
            kill.format("KILL"),
            {},
            r"^The first to fail: rank 1 .* signal KILL\.",
        ),
        ("stopped", "9", kill.format("STOP"), short, "^Still running: rank 1 on imitated node 0"),
        ("does-not-come", "1", "sleep(3600)", short, "(?i)timed? ?out"),
        ("does-not-come-day2", "9", "sleep(3600)", short, "(?i)timed? ?out"),
    ]
    return [
        Item(
            f"faults:{what}",
            command_of(name, 2, "1x2", file=Path(LESSONS[name]["file"]).name),
            [*first_line(name, 2, machine, backend), says],
            variables,
            fault=True,
            keep=True,
            prepare=partial(plant, ROOT / LESSONS[name]["file"], action),
        )
        for what, name, action, variables, says in rows
    ]


def plant(file, action, folder):
    """Write a lesson into the folder in which rank 1 does something after main, before the end."""
    imports = "from os import getpid, kill; from signal import SIGKILL, SIGSTOP; "
    imports += "from time import sleep"  # names that start does not use
    fault = f"{imports}; print({FAULT!r}, flush=True); {action}"
    lines = rf"\g<0>\n    if dist.get_rank() == 1:\n        {fault}"
    text, count = re.subn(r"(?m)^    (status = )?main\(.*\)$", lines, file.read_text())
    if count != 1:
        raise ValueError(f"{file.name} calls main {count} times: where to put the fault?")
    (folder / file.name).write_text(text)


def nccl_items(machine):
    """Return what no stand-in can show: how NCCL connects, and what it hides."""
    if machine["count"] == 1 or machine["kind"] != "cuda":
        return []
    ranks = machine["count"]
    # Before torch 2.7.1 it hung at random while it connected (pytorch#153960).
    items = [
        Item(f"nccl:start-{number}", command_of("1", ranks, ""), [PROVED]) for number in range(1, 6)
    ]
    # torch 2.15's backend may hide nothing: all:test-profile beside this one decides.
    legacy, command = {"TORCH_DIST_USE_NCCL2": "0"}, command_of("test-profile", ranks, "")
    return [*items, Item("nccl:test-profile", command, [PROVED], legacy, keep=True)]


def all_items(machine):
    """Return all items for a machine, in their order."""
    items = lesson_items(machine) + chain_items(machine)
    return items + nccl_items(machine) + fault_items(machine)


def choose(items, wanted):
    """Return the items that were asked for by name or group, and those that they need.

    Raises ValueError with a sentence for the user if a name is not known.
    """
    for name in wanted:
        if not any(name in (x.name, x.name.partition(":")[0]) for x in items):
            raise ValueError(f"There is nothing called {name!r} on this machine. --list shows all.")
    chosen = [x for x in items if not wanted or {x.name, x.name.partition(":")[0]} & {*wanted}]
    needed = {x.needs for x in chosen}
    return [x for x in items if x in chosen or x.name in needed]


# The machine


def look():
    """Return what torch sees here, as a dict.

    Raises ValueError with a sentence for the user if there is no GPU, or if torch cannot be asked.
    """
    machine = of_machine.look()
    if not machine["count"]:
        raise ValueError(
            f"There is nothing to try: torch {machine['torch']} sees no GPU that it can use here."
        )
    return machine


def ask():
    """Return what the tools of this machine say of it, {command: lines}."""
    said = {}
    for command in TOOLS:
        if shutil.which(command[0]):
            job = processes.run(command, 120, cwd=ROOT, stderr=subprocess.DEVNULL)
            lines = re.sub(r"\x1b\[\d*m", "", clean(job.output, ROOT)).strip().splitlines()
            lines = [x for x in lines if not x.startswith(("Flags:", "Vulnerability "))]  # of CPUs
            lines += [job.trouble] if job.trouble else []
            said[shlex.join(["python" if x == sys.executable else x for x in command])] = lines
            print(*lines, sep="\n")
    return said


# Running


def start(item, folder):
    """Run an item's command. Return the Job, and the seconds from a fault to its end or None."""
    words = [str(ROOT / x) if re.match(r"(day\d|scripts)/", x) else x for x in item.command]
    words[:1] = [sys.executable, "-u"] if words[0] == "python" else words[:1]
    # Not those of an allocation in which this may run: what is started here is no step of it.
    env = {name: x for name, x in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", **item.variables}
    begin, struck = time.monotonic(), None
    options = {"cwd": folder, "env": env, "stderr": subprocess.STDOUT}
    with processes.Job(words, item.limit, **options) as job:
        for line in job.lines():
            if FAULT in line:
                struck = time.monotonic() - begin
    return job, None if struck is None else max(0, job.seconds - struck)


def check(item, job, after, folder):
    """Yield (what was expected, what was seen, whether that is the same)."""
    seen = job.trouble or "exit status 0"
    last = (job.output.strip().splitlines() or ["nothing"])[-1]
    if item.fault:
        came = after is not None
        seen += f", {after:.0f} s after the fault" if came else ", and the fault did not come"
        well = job.status and came and after <= WITHIN and not job.stopped and not job.left
        yield f"it fails within {WITHIN} s of the fault, and leaves no process", seen, well
    else:
        yield "exit status 0, and no process is left", seen, not job.trouble
    for pattern in item.expects:
        found = re.search(pattern, job.output, re.M)
        yield pattern, found[0].strip("\n") if found else f"not that; last: {last}", found
    if item.compare:
        yield item.compare(folder, job.output)


def run(item):
    """Run an item in a new folder, print what was expected and seen; return it for the record."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if item.prepare:
            item.prepare(Path(folder))
        job, after = start(item, Path(folder))
        rows = [
            {"expected": expected, "seen": clean(seen, folder), "same": bool(same)}
            for expected, seen, same in check(item, job, after, Path(folder))
        ]
        output = clean(job.output, folder).splitlines()
    verdict = "same" if all(x["same"] for x in rows) else "DIFFERENT"
    if job.status == os.EX_UNAVAILABLE and not (job.stopped or job.left):
        verdict = "skipped"  # the lesson's own word: it cannot run here
    kept = output[-60:] if item.keep or verdict != "same" else []
    for line in kept:
        print(f"   | {line}")
    for x in rows:
        print(f"   expected: {x['expected']}\n   seen:     {x['seen']}")
    print(f"   {verdict}, {job.seconds:.0f} s", flush=True)
    return {
        "item": item.name,
        "command": item.shown(),
        "verdict": verdict,
        "seconds": round(job.seconds, 1),
        "showed": next((x for x in reversed(output) if x.startswith("=>")), ""),
        "checks": rows,
        "warnings": [line for line in output if "Warning" in line],
        "output": kept,
    }


def main():
    """Run the items that were asked for, and write the record; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups or items")
    parser.add_argument("--list", action="store_true", help="show the items and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, run nothing")
    parser.add_argument("--output", type=Path, help="the record (a new file in tests/records/)")
    args = parser.parse_args()
    try:
        machine = look()
        items = choose(all_items(machine), args.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list or args.dry_run:
        for x in items:
            print(x.shown() if args.dry_run else f"{x.name:<24} {x.shown()}")
        return 0
    path = args.output or ROOT / "tests" / "records" / time.strftime("%Y-%m-%d_%H-%M-%S.json")
    record = {"recorded": time.strftime("%Y-%m-%d"), "planned": len(items), "machine": machine}
    record["command"] = shlex.join(["python", "tests/on_gpu.py", *sys.argv[1:]])
    record["on"] = of_machine.described(f"{machine['count']} x {machine['name']}")
    write(path, record)  # now, because it may not be possible
    record |= {"said": ask(), "items": []}
    for number, item in enumerate(items, 1):
        print(f"\n[{number}/{len(items)}] {item.name}\n   $ {item.shown()}", flush=True)
        record["items"].append(run(item))
        write(path, record)
    different = [x for x in record["items"] if x["verdict"] == "DIFFERENT"]
    for x in different:
        print(f"\nDIFFERENT: {x['item']}: {x['command']}")
        for row in x["checks"]:
            if not row["same"]:
                print(f"   expected: {row['expected']}\n   seen:     {row['seen']}")
    same = sum(x["verdict"] == "same" for x in record["items"])
    print(f"\n=> {same} of {len(items)} as expected, {len(different)} DIFFERENT; record: {path}")
    return 1 if different else 0


if __name__ == "__main__":
    processes.end_on_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
