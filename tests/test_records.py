"""Records of other machines: what update_docs.py --record writes, and the tables of all records.

The machines are made up, and the lessons do not run. All of it is in a folder of its own.
"""

import json

import pytest
import update_docs
from helpers import LESSONS
from docs import recordings

# As tests/on_gpu.py writes it.
RECORD = {
    "recorded": "2030-01-02",
    "command": "python tests/on_gpu.py",
    "on": "Linux, 8 CPU cores, 2 x Some GPU",
    "planned": 4,
    "machine": {"count": 2, "name": "Some GPU", "torch": "2.15.0", "NCCL": "2.28.3"},
    "items": [
        {"item": "one:0", "verdict": "same", "showed": "=> one"},
        {"item": "all:0", "verdict": "same", "showed": "=> all"},
        {"item": "one:1", "verdict": "DIFFERENT", "showed": ""},
        {"item": "one:3", "verdict": "DIFFERENT"},
        {"item": "shared:17", "verdict": "skipped"},
    ],
}


def test_every_lesson_is_recorded_for_its_page():
    assert set(recordings.outputs()) == set(LESSONS), "python scripts/update_docs.py --record ID"


@pytest.fixture
def records(monkeypatch, tmp_path):
    """An empty folder of records, in the place of tests/records."""
    monkeypatch.setattr(recordings, "ROOT", tmp_path)
    monkeypatch.setattr(recordings, "RECORDS", tmp_path / "tests" / "records")
    recordings.RECORDS.mkdir(parents=True)
    return recordings.RECORDS


def test_a_record_becomes_a_row(records):
    assert recordings.gpu_table() == "Nothing has been recorded on a GPU yet.\n"
    (records / "a.json").write_text(json.dumps(RECORD))
    assert recordings.gpu_table().splitlines()[2:] == [
        "| [2030-01-02](tests/records/a.json) | 2 x Some GPU | 2.15.0, NCCL 2.28.3 | 2 of 4 "
        "| `one:1`, `one:3` | `shared:17` |"
    ]


def test_a_record_becomes_a_column(records):
    (records / "a.json").write_text(json.dumps(RECORD))
    when, _, head, _, *rows = recordings.measured().splitlines()
    assert when == (
        "Recorded on 2030-01-02 with `python tests/on_gpu.py`: Linux, 8 CPU cores, 2 x Some GPU."
    )
    assert head == "| lesson | no GPU | one GPU | several GPUs | several nodes |"
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in LESSONS]
    assert rows[0] == "| 0 |  |  | `=> all` |  |"  # a rank on every GPU, as run_course.sh would
    assert rows[1] == "| 1 |  |  | DIFFERENT |  |"
    assert rows[2] == "| 2 |  |  |  |  |"


def record_here(monkeypatch, lessons, date, machine, results=None):
    """Record some lessons as update_docs.py --record does, on a machine that is made up."""

    def run(lesson, cwd):
        showed = f"=> lesson {lesson['id']} on {date}"
        output = f"in {cwd} on node-a17.site.edu\n{showed}\n"
        usual = {"output": output, "showed": showed, "seconds": 1.23, "problem": "", "skipped": ""}
        return {**usual, **(results or {}).get(lesson["id"], {})}

    monkeypatch.setattr(recordings, "run", run)
    monkeypatch.setattr(recordings, "names_of_nodes", lambda: ["node-a17"])
    monkeypatch.setattr(recordings.time, "strftime", lambda form: date)
    monkeypatch.setattr(recordings.machine, "look", lambda: dict(machine))
    monkeypatch.setattr(recordings.machine, "cores", lambda: machine.get("cores", 2))
    monkeypatch.setattr(recordings.machine, "nodes", lambda: machine.get("nodes", 1))
    monkeypatch.setattr(recordings.machine, "described", lambda gpus, *more: gpus or "no GPU")
    return recordings.record([LESSONS[name] for name in lessons])


CPUS, GPUS = {"torch": "2", "count": 0}, {"torch": "2", "count": 4, "name": "Some GPU"}


def test_each_kind_of_machine_has_a_record_and_a_column(monkeypatch, records):
    for kind, name in (
        (CPUS, "2-cpu-cores"),
        (CPUS | {"cores": 8}, "8-cpu-cores"),
        (GPUS, "4-some-gpu"),
        (GPUS | {"count": 1}, "1-some-gpu"),
        (GPUS | {"nodes": 2}, "2-nodes-4-some-gpu"),
    ):
        date = f"2030-01-0{1 + len(list(records.glob('*')))}"
        path, failed = record_here(monkeypatch, ["0", "9"], date, kind)
        assert (path, failed) == (records / f"{name}.json", {})
    rows = recordings.measured().splitlines()
    assert rows[-len(LESSONS)] == (
        "| 0 | `=> lesson 0 on 2030-01-01` | `=> lesson 0 on 2030-01-04` "
        "| `=> lesson 0 on 2030-01-03` | `=> lesson 0 on 2030-01-05` |"
    )
    # The pages show two cores. Neither folder nor node is named.
    assert recordings.outputs()["0"] == (
        "```console\n$ python day1/0_torch_dist.py\nin . on node1\n=> lesson 0 on 2030-01-01\n```\n"
    )
    assert recordings.gpu_table() == "Nothing has been recorded on a GPU yet.\n"


def test_a_lesson_recorded_alone_has_its_own_date_and_the_others_keep_theirs(monkeypatch, records):
    record_here(monkeypatch, LESSONS, "2030-01-01", CPUS)
    results = {"0": {"problem": "exit status 3"}, "2": {"skipped": "It cannot run here."}}
    path, failed = record_here(monkeypatch, ["0", "1", "2"], "2030-01-02", CPUS, results)
    assert failed == {"0": "exit status 3"}
    command = "with `python scripts/update_docs.py --record"
    assert recordings.measured().splitlines()[:4] == [
        f"Recorded on 2030-01-01 {command}`: no GPU.",
        "",
        f"Recorded on 2030-01-02 {command} 1`: no GPU.",
        "",
    ]
    # Another machine without a GPU fills in what the pages still lack.
    record = json.loads(path.read_text())
    record["items"] = record["items"][:3]
    path.write_text(json.dumps(record))
    record_here(monkeypatch, ["2", "9"], "2030-01-03", CPUS | {"cores": 8})
    shown = {name: text.split("=> ")[1][:-5] for name, text in recordings.outputs().items()}
    assert shown == {
        "0": "lesson 0 on 2030-01-01",
        "1": "lesson 1 on 2030-01-02",
        "2": "lesson 2 on 2030-01-01",
        "9": "lesson 9 on 2030-01-03",
    }


def test_an_unknown_lesson_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(update_docs, "record", None)
    monkeypatch.setattr(update_docs.sys, "argv", ["update_docs.py", "--record", "4", "99"])
    with pytest.raises(SystemExit, match=r"^2$"):
        update_docs.main()
    assert capsys.readouterr().err.endswith("error: There is no lesson 99.\n")
