"""on_gpu.py, as far as a machine without a GPU goes: what it would run, and how it judges.

Which GPUs there are is said by the stand-in, tests/standin. It computes nothing, so the items that
run here are small programs planted for it, or lessons on the CPU in the place of a GPU.
"""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap

import on_gpu
import pytest
from helpers import LESSONS, ROOT
from docs import recordings
from on_gpu import Item
from torch.utils.tensorboard import SummaryWriter

COMMAND = [sys.executable, str(ROOT / "tests" / "on_gpu.py")]
# A machine whose two "GPUs" are its CPU, so that lessons can run.
CPU = {"torch": "2", "count": 2, "kind": "cpu", "backend": "gloo", "mask": "NONE", "name": "CPU"}
NVIDIA = CPU | {"kind": "cuda", "backend": "nccl", "mask": "CUDA_VISIBLE_DEVICES"}

START = "scripts/multinode_setup_and_run.sh --local"
# One process each, so they are started once.
ALONE = {
    "2": "python day1/2_mnist_training.py",
    "create_mnist_h5": "python day2/create_mnist_h5.py --force",
    "create_ratings": "python day2/create_ratings.py --force",
}
ELASTIC = "--max-restarts 3 day2/12_mnist_ddp_torchrun_elastic.py --crash-at-step 100"


def day_1(ranks):
    files = [x["file"] for x in LESSONS.values() if x["id"] not in ALONE]
    return [f"python {file} {ranks}" for file in files if file.startswith("day1/")]


def day_2(local):
    files = [x["file"] for x in LESSONS.values() if x["id"] not in ALONE]
    files = [ELASTIC if file in ELASTIC else file for file in files if file.startswith("day2/")]
    return [f"{START} {local} {file}" for file in files]


def one():
    commands = day_1(1) + day_2("1x1")
    for place, name in enumerate(LESSONS):
        if name in ALONE:
            commands.insert(place, ALONE[name])
    return commands


def chain(ranks):
    few, all_of_it = f"--lr 0.015 --batch-size {3000 // ranks}", "--lr 0.015 --batch-size 3000"
    return [
        f"python day1/2_mnist_training.py --epochs 1 {all_of_it}",
        f"python day1/3_mnist_distributed.py {ranks} --epochs 1 {all_of_it}",
        f"python day1/4_mnist_manual_ddp.py {ranks} --epochs 1 {few}",
        f"python day1/6_mnist_ddp_pt.py {ranks} --epochs 1 {few}",
        f"{START} 1x{ranks} day2/10_mnist_ddp_pt_multinode.py --images 60000 {few}",
        f"{START} 1x{ranks} day2/11_mnist_ddp_pt_multinode_streaming.py --file chain.h5 "
        f"--no-shuffle --stream-only --warm-up 1000000000 --epochs 1 {few}",
    ]


FAULTS = [
    "python 1_torch_dist_gpu.py 2",
    f"{START} 1x2 9_torch_dist_multi_node.py",
    f"DIST_TIMEOUT=6 {START} 1x2 9_torch_dist_multi_node.py",
    "DIST_TIMEOUT=6 python 1_torch_dist_gpu.py 2",
    f"DIST_TIMEOUT=6 {START} 1x2 9_torch_dist_multi_node.py",
]


def call(*arguments, **variables):
    """Call on_gpu.py where the stand-in says which GPUs there are; return the finished process."""
    masks = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    env = {name: x for name, x in os.environ.items() if name not in masks}
    env |= {"PYTHONPATH": str(ROOT / "tests" / "standin"), **variables}
    return subprocess.run(
        [*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=250
    )


def test_without_a_gpu_there_is_one_sentence_and_nothing_starts(tmp_path):
    record = tmp_path / "record.json"
    done = call("--output", str(record), STANDIN_GPUS="0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(
        r"There is nothing to try: torch \S+ sees no GPU that it can use here\.\n", done.stderr
    )
    assert not record.exists()


def test_without_torch_there_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--list"])
    assert on_gpu.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "This Python cannot ask torch which GPUs there are: ImportError: No module named torch\n"
    )


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_these_commands_are_run(gpus, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "look", lambda: {**NVIDIA, "count": gpus})
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--dry-run"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert on_gpu.main() == 0
    if gpus == 1:
        expected = one() + day_1(4) + day_2("1x4") + chain(4) + FAULTS
    else:
        shared = [f"CUDA_VISIBLE_DEVICES=0 {command}" for command in day_1(4) + day_2("1x4")]
        several = day_1(gpus) + day_2(f"1x{gpus}") + day_2(f"2x{gpus // 2}")
        nccl = [f"python day1/1_torch_dist_gpu.py {gpus}"] * 5
        nccl += [f"TORCH_DIST_USE_NCCL2=0 python day1/test-profile.py {gpus}"]
        expected = one() + several + shared + chain(gpus) + nccl + FAULTS
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(
    ("variables", "mask", "last"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, "CUDA_VISIBLE_DEVICES=3", "faults:does-not-come-day2"),
        ({"STANDIN_KIND": "hip"}, "HIP_VISIBLE_DEVICES=0", "faults:does-not-come-day2"),
        ({"STANDIN_KIND": "xpu"}, "ZE_AFFINITY_MASK=0", "faults:does-not-come-day2"),
    ],
)
def test_the_list_fits_the_kind_of_gpu(variables, mask, last):
    done = call("--list", STANDIN_GPUS="4", **variables)
    assert done.returncode == 0, done.stderr
    rows = [line.split(None, 1) for line in done.stdout.splitlines()]
    assert rows[0] == ["one:0", "python day1/0_torch_dist.py 1"]
    assert ["shared:4", f"{mask} python day1/4_mnist_manual_ddp.py 4"] in rows
    assert rows[-1][0] == last
    # A mask of the user's own has two of the four GPUs.
    ranks = 2 if "CUDA_VISIBLE_DEVICES" in variables else 4
    assert ["all:4", f"python day1/4_mnist_manual_ddp.py {ranks}"] in rows


def items_of(**machine):
    return {x.name: x for x in on_gpu.all_items(NVIDIA | machine)}


def test_device_and_backend_are_expected():
    items = items_of(count=4)
    assert items["all:4"].expects[0] == "^ranks: 4, device: cuda, backend: nccl$"
    assert items["nodes:10"].expects[0] == "^ranks: 4, device: cuda, backend: nccl$"
    assert items["shared:4"].expects[0] == "^ranks: 4, device: cuda, backend: gloo$"
    assert items["all:15"].expects[0] == "^ranks: 4, device: cuda$"
    assert items["shared:15"].expects[0] == "^ranks: 4, device: cpu$"
    assert items["chain:6"].expects == ["^ranks: 4, device: cuda, backend: nccl$"]
    assert items_of(count=1)["chain:6"].expects == ["^ranks: 4, device: cuda, backend: gloo$"]
    shared = items_of(kind="xpu", backend="xccl", mask="ZE_AFFINITY_MASK", count=4)["shared:4"]
    assert shared.expects[0] == "^ranks: 4, device: cpu, backend: gloo$"
    # Steps of equal size: 3000 images are divided by 15 ranks, not by 16.
    assert items_of(count=16)["chain:6"].expects == ["^ranks: 15, device: cuda, backend: nccl$"]


def test_a_row_of_time_shares_is_expected_of_each_rank():
    head = "rank           data        compute  communication        overlap           idle\n"
    row = "   {}           8.1%          64.0%          {}           0.0%           9.9%\n"
    both = head + row.format(0, "18.0%") + row.format(1, "11.3%")
    silent = head + row.format(0, "18.0%") + row.format(1, " 0.0%")  # no kernel of NCCL is known
    pattern = items_of(count=2)["all:5"].expects[2]
    assert re.search(pattern, both, re.M)
    assert not re.search(pattern, silent, re.M)
    assert not re.search(pattern, head + row.format(0, "18.0%"), re.M)


def test_what_an_item_needs_comes_with_it():
    items = list(items_of(count=1).values())
    names = [x.name for x in on_gpu.choose(items, ["shared:11", "chain:6", "shared:0"])]
    assert names == ["one:create_mnist_h5", "shared:0", "shared:11", "chain:2", "chain:6"]
    assert on_gpu.choose(items, []) == items


# Programs that are planted.


def planted(name, program, *expects, **options):
    """Return an item that runs a program."""

    def prepare(folder):
        (folder / "planted.py").write_text(textwrap.dedent(program))

    return Item(name, ["python", "planted.py"], [*expects], prepare=prepare, **options)


def run_main(monkeypatch, items, *arguments):
    """Run main() with these items on a machine that is made up; return its exit status."""
    monkeypatch.setattr(on_gpu, "look", lambda: dict(CPU))
    monkeypatch.setattr(on_gpu, "TOOLS", [[sys.executable, "-c", "print('a driver')"]])
    if items:
        monkeypatch.setattr(on_gpu, "all_items", lambda machine: items)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *map(str, arguments)])
    return on_gpu.main()


LEAVES = "import subprocess; subprocess.Popen(['sleep', '3600'])"
FAILS = f"import sys, time; print('{on_gpu.FAULT}', flush=True); time.sleep({{}}); sys.exit(1)"
PLANTED = {  # name: (item, verdict, a pattern for what its first row has seen)
    "well": (planted("a:well", "print('device: cuda')", "^device: cuda$"), "same", "exit status 0"),
    "other": (
        planted("a:other", "print('device: cpu')", "^device: cuda$"),
        "DIFFERENT",
        "exit status 0",
    ),
    "fails": (planted("a:fails", "raise SystemExit(3)"), "DIFFERENT", "exit status 3"),
    "waits": (
        planted("a:waits", "import time; time.sleep(3600)", limit=2),
        "DIFFERENT",
        "stopped after 2 s",
    ),
    "leaves": (planted("a:leaves", LEAVES), "DIFFERENT", "processes left: 1"),
    "cannot": (
        planted("a:cannot", "import os; print('too old'); raise SystemExit(os.EX_UNAVAILABLE)"),
        "skipped",
        "exit status 69",
    ),
    "soon": (
        planted("b:soon", FAILS.format(0), fault=True),
        "same",
        r"exit status 1, [0-3] s after the fault",
    ),
    "late": (
        planted("b:late", FAILS.format(4), fault=True),
        "DIFFERENT",
        r"exit status 1, [4-9] s after the fault",
    ),
    "goes on": (
        planted("b:goes-on", f"print('{on_gpu.FAULT}')", fault=True),
        "DIFFERENT",
        r"exit status 0, [0-3] s after the fault",
    ),
    "none": (
        planted("b:none", "raise SystemExit(1)", fault=True),
        "DIFFERENT",
        "exit status 1, and the fault did not come",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_seen_is_judged(name, monkeypatch):
    item, verdict, seen = PLANTED[name]
    monkeypatch.setattr(on_gpu, "WITHIN", 3)  # seconds
    result = on_gpu.run(item)
    assert re.fullmatch(seen, result["checks"][0]["seen"])
    assert result["verdict"] == verdict


def test_the_record_names_neither_machine_nor_folders(monkeypatch, tmp_path, capsys):
    program = """
        import os, socket, sys
        print("on", socket.gethostname(), os.getcwd(), sys.executable)
        print(f'File "{os.__file__}", 9 images/s, /opt/site/lib/libx.so, /dev/shm, day1/x.py')
        print("UserWarning: mind this")
    """
    items = [planted("a:one", program, "^on .*", keep=True), PLANTED["other"][0]]
    path = tmp_path / "new" / "record.json"
    assert run_main(monkeypatch, items, "--output", path) == 1
    said = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["planned"] == 2
    assert record["machine"] == CPU
    assert list(record["said"].values()) == [["a driver"]]
    one, other = record["items"]
    assert one["verdict"] == "same"
    assert one["output"][0] == "on this-machine . python"
    assert one["output"][1].endswith('os.py", 9 images/s, libx.so, shm, day1/x.py')
    assert not re.search(r"[ \"']/", one["output"][1])
    assert one["checks"][1]["seen"] == "on this-machine . python"
    assert one["warnings"] == ["UserWarning: mind this"]
    assert other["verdict"] == "DIFFERENT"
    assert other["output"] == ["device: cpu"]
    for private in (socket.gethostname(), str(ROOT), str(tmp_path), sys.prefix):
        assert private not in json.dumps(record["items"])
    end = said[said.index("\nDIFFERENT: ") :]
    assert end == (
        "\nDIFFERENT: a:other: python planted.py\n"
        "   expected: ^device: cuda$\n   seen:     not that; last: device: cpu\n"
        f"\n=> 1 of 2 as expected, 1 DIFFERENT; record: {path}\n"
    )


def test_if_all_is_as_expected_the_exit_status_is_0(monkeypatch, tmp_path):
    items = [PLANTED["well"][0]]
    assert run_main(monkeypatch, items, "--output", tmp_path / "record.json") == 0


def test_a_record_that_cannot_be_written_is_noticed_before_anything_starts(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    started = []
    monkeypatch.setattr(on_gpu, "run", started.append)
    with pytest.raises(SystemExit, match=r"^The record cannot be written: "):
        run_main(monkeypatch, [PLANTED["well"][0]], "--output", tmp_path / "file" / "record.json")
    assert started == []


def test_an_unknown_name_gets_a_sentence(monkeypatch, capsys):
    assert run_main(monkeypatch, [PLANTED["well"][0]], "--only", "a:worse") == 2
    sentence = "There is nothing called 'a:worse' on this machine. --list shows all.\n"
    assert capsys.readouterr().err == sentence


# The equivalence chain.


def write_losses(folder, losses):
    with SummaryWriter(folder) as writer:
        for step, loss in enumerate(losses, 1):
            writer.add_scalar("loss/train", loss, step * on_gpu.GLOBAL_BATCH)


def test_losses_are_compared(tmp_path):
    curve = [2.3 - 0.05 * step for step in range(20)]
    mean = sum(curve) / 20
    write_losses(tmp_path / "runs" / "first", curve)
    write_losses(tmp_path / "runs" / "alike", [loss + 5e-6 for loss in curve])
    write_losses(tmp_path / "runs" / "other", [*curve[:7], curve[7] + 5e-5, *curve[8:]])
    write_losses(tmp_path / "runs" / "short", curve[:19])
    write_losses(tmp_path / "runs" / "flat", [2.3] * 20)
    reference = []

    def compare(name, output="", reference=reference):
        return on_gpu.same_losses(reference, name, tmp_path, output)[1:]

    assert not compare("flat", reference=[])[1]
    assert not compare("nothing", reference=[])[1]
    assert compare("first") == ("20 losses, the last 0.9500 below the first", True)
    assert compare("alike")[1]
    seen, same = compare("other")
    assert seen == "20 losses, within 5e-05"
    assert not same
    assert not compare("short")[1]
    # A lesson that writes no losses prints their mean.
    assert compare("nothing", f"rank 0: 98% right, mean loss {mean:.4f}\n")[1]
    assert compare("nothing", f"epoch 0: loss {mean:.4f}, 9 images/s\n")[1]
    assert not compare("nothing", f"mean loss {mean:.4f}\nrank 1: mean loss {mean + 0.001:.4f}\n")[
        1
    ]
    assert not compare("nothing", "=> done")[1]


@pytest.mark.timeout(900)
def test_lessons_10_and_11_have_the_losses_of_lesson_2(monkeypatch, tmp_path):
    """The equivalence chain to its end, on the CPU: also over the launcher, also streamed."""
    path = tmp_path / "record.json"
    run_main(monkeypatch, None, "--only", "chain:10", "chain:11", "--output", path)
    items = json.loads(path.read_text())["items"]
    assert [x["item"] for x in items] == ["chain:2", "chain:10", "chain:11"]
    for x in items:
        assert all(row["same"] for row in x["checks"][1:]), x
        assert x["checks"][-1]["seen"].startswith("20 losses, ")


# Faults.


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_a_fault_is_planted_and_seen(name, monkeypatch, tmp_path):
    monkeypatch.setattr(on_gpu, "WITHIN", 120)  # a busy machine, where Python's own helpers
    monkeypatch.setattr(on_gpu.processes, "SETTLE", 60)  # end late, too
    path = tmp_path / "record.json"
    assert run_main(monkeypatch, None, "--only", f"faults:{name}", "--output", path) == 0
    (result,) = json.loads(path.read_text())["items"]
    # Two processes may write into one line.
    assert any(on_gpu.FAULT in line for line in result["output"])
    proof = on_gpu.PROVED
    assert any(re.match(proof, line) for line in result["output"])  # it came after all else


def test_a_lesson_with_no_place_for_a_fault_is_named(tmp_path):
    (tmp_path / "lesson.py").write_text("def start():\n    work()\n")
    with pytest.raises(ValueError, match=r"^lesson\.py calls main 0 times"):
        on_gpu.plant(tmp_path / "lesson.py", "pass", tmp_path)


# The text.


def test_the_text_says_what_was_not_run_as_long_as_that_is_true():
    records = [json.loads(path.read_text()) for path in recordings.RECORDS.glob("*.json")]
    counts = [record["machine"]["count"] for record in records]
    text = {name: (ROOT / name).read_text() for name in ("README.md", "day1/RENTED.md")}
    text["slides/TEACHING.md"] = (ROOT / "slides" / "TEACHING.md").read_text()
    on_one, on_several = (
        f"We have not run this on {gpus} yet" for gpus in ("a GPU", "several GPUs")
    )
    places = [
        ("README.md", r"^\*\*One GPU\.\*\* .*", on_one, 1),
        ("README.md", r"^\*\*A node with several GPUs\.\*\* .*", on_several, 2),
        ("day1/RENTED.md", r"^For those who have no GPU .*", on_one, 1),
        ("slides/TEACHING.md", r"^\| One GPU for several ranks .*", on_one, 1),
    ]
    for name, place, sentence, least in places:
        says = sentence in re.search(place, text[name], re.M)[0]
        assert says != any(count >= least for count in counts), (name, sentence)
