"""The course as a class: what people hand in, the timetable, and what instructors prepare."""

import json
import re
import subprocess
import sys

import pytest
from helpers import LESSONS, ROOT, copy_tree
from exercises import records
from course.lists import read_days, read_exercises, read_pages
from docs.pages import day_of, parts_of

TEACHING = (ROOT / "slides" / "TEACHING.md").read_text()
EXERCISES = {exercise["id"]: exercise for exercise in read_exercises()}
DAYS = {day["id"]: day for day in read_days()}
DAY_IDS = list(DAYS)


@pytest.fixture
def person(tmp_path, monkeypatch):
    """Return a function that lets another person begin, with runs/ of their own."""

    def begin(name):
        runs = tmp_path / name / "runs"
        runs.parent.mkdir()
        monkeypatch.setattr(records, "RUNS", runs)
        monkeypatch.setattr(records, "RECORD", runs / "exercises.json")
        monkeypatch.setattr(records, "NAME", runs / "handed_in_as")

    begin("ada")
    return begin


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "shared folder"
    folder.mkdir()
    return folder


def checked(*times, passed_at=None):
    """Return what is known of an exercise that was checked at these minutes."""
    known = {}
    for minute in times:
        records.note(known, minute == passed_at, "fingerprint", 60 * minute, 60 * minute)
    return known


def test_minutes_are_from_the_first_check_to_the_first_that_passed():
    assert "minutes" not in checked(100, 110)
    known = checked(100, 104, 112, passed_at=112)
    assert (known["started"], known["minutes"], known["state"]) == (6000, 12, "passed")
    records.note(known, False, "changed", 60 * 200, 60 * 200)  # as after a change for the worse
    records.note(known, True, "again", 60 * 300, 60 * 300)
    assert (known["started"], known["minutes"], known["state"]) == (6000, 12, "passed")
    assert checked(100, 90, passed_at=90)["minutes"] == 0  # the clock was set back


def test_what_had_passed_before_minutes_were_kept_gets_none():
    known = {"state": "passed", "digest": "fingerprint"}
    records.note(known, True, "fingerprint", 6000, 6000)
    assert "minutes" not in known


def test_a_record_is_read_as_it_was_written(person):
    record = {"0.1": checked(1, 5, passed_at=5)}
    assert records.read_record() == {}
    records.write_record(record)
    assert records.read_record() == record
    assert [path.name for path in records.RUNS.iterdir()] == ["exercises.json"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"0.1": {"state": "pas',
        b"[]",
        b'{"0.1": "passed"}',
        b'{"0.1": {"started": "9:00"}}',
        b'{"0.1": {"minutes": NaN}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_damaged_record_is_kept(text, person):
    records.RUNS.mkdir()
    records.RECORD.write_bytes(text)
    with pytest.raises(records.RecordError, match=r"is damaged\. It is kept as") as said:
        records.read_record()
    (kept,) = records.RUNS.iterdir()
    assert kept.name in str(said.value)
    assert kept.read_bytes() == text
    assert records.read_record() == {}


def test_what_is_handed_in_names_nobody(person, shared):
    record = {
        "0.1": checked(100, 107, passed_at=107),
        "0.2": checked(110),
        "4.3": {"hints": 2},  # never checked
    }
    file = records.hand_in(record, shared)
    assert json.loads(file.read_text()) == {
        "0.1": {"passed": True, "minutes": 7},
        "0.2": {"passed": False, "minutes": None},
    }
    assert re.fullmatch(r"[0-9a-f]{16}\.json", file.name)
    assert file.stat().st_mode & 0o777 == 0o644
    assert [*shared.iterdir()] == [file]


def test_a_person_counts_once_and_another_one_besides(person, shared):
    first = records.hand_in({"0.1": checked(1)}, shared)
    again = records.hand_in({"0.1": checked(1, 4, passed_at=4)}, shared)
    assert again == first
    person("bob")
    other = records.hand_in({"0.1": checked(1, 11, passed_at=11), "4.3": checked(20)}, shared)
    assert other != first
    person("cleo")
    records.RUNS.mkdir()
    records.NAME.write_text("../../somewhere else\n")  # no name of ours: it gets one
    third = records.hand_in({"0.1": checked(1)}, shared)
    assert sorted(shared.iterdir()) == sorted([first, other, third])
    assert records.hand_in({"0.1": checked(1)}, shared) == third
    handed_in, damaged = records.read_class(shared)
    assert damaged == []
    lines = records.class_table(EXERCISES, handed_in)
    assert lines[0] == "records: 3"
    rows = [line.split(maxsplit=4) for line in lines[2:-1]]
    assert rows == [
        ["0.1", "3", "2", "6.5", EXERCISES["0.1"]["about"]],
        ["4.3", "1", "0", "-", EXERCISES["4.3"]["about"]],
    ]


def test_a_folder_that_cannot_be_written_gets_one_sentence(person, shared, monkeypatch):
    record = {"0.1": checked(1)}
    for nothing in ({}, {"0.1": {"hints": 1}}):
        with pytest.raises(records.RecordError, match="There is nothing to hand in yet"):
            records.hand_in(nothing, shared)
    with pytest.raises(records.RecordError, match=r"There is no folder .*none"):
        records.hand_in(record, shared / "none")
    records.write_record(record)

    def full(path, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "replace", full)
        with pytest.raises(records.RecordError, match=r"No space left on device.*as it was"):
            records.hand_in(record, shared)
    assert [*shared.iterdir()] == []  # not half a file either
    assert records.read_record() == record


def check(course, *arguments):
    """Run check.py; return (exit status, stdout, stderr)."""
    command = [sys.executable, course / "scripts" / "check.py", *arguments]
    done = subprocess.run(command, cwd=course, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def course(tmp_path):
    """A copy of what check.py needs; nothing is run in it."""
    folder = tmp_path / "my course"
    for part in ("scripts/checks", "scripts/lib"):
        copy_tree(ROOT / part, folder / part)
    for name in ("check.py", "exercises.toml"):
        (folder / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    return folder


def test_a_class_from_the_command_line(course, shared):
    """The file is missing: the check is quick, and counts as a check that has not passed."""
    assert check(course, "--class", shared)[0] == 1
    status, _, said = check(course, "--hand-in", shared)
    assert (status, said) == (1, "There is nothing to hand in yet. Check an exercise first.\n")
    assert check(course, "0.1")[0] == 1
    status, said, _ = check(course, "--hand-in", shared)
    (file,) = shared.iterdir()
    assert (status, said) == (0, f"handed in: {file}\n")
    good = {"0.1": {"passed": True, "minutes": 3}}
    (shared / "other.json").write_text(json.dumps(good))
    status, table, said = check(course, "--class", shared)
    assert (status, said) == (0, "")
    assert table.startswith("records: 2\n")
    assert re.search(r"^ +0\.1 +2 +1 +3\.0 ", table, re.M)
    for bad in (["--class", shared, "4.1"], ["--hand-in", shared, "--hint"]):
        assert check(course, *bad)[0] == 2
    status, _, said = check(course, "--class", shared / "none")
    assert (status, said) == (1, f"There is no folder {shared / 'none'}.\n")


def test_damaged_records_of_others_are_left_out_by_name(course, shared):
    bad = {
        "cut.json": b'{"0.1": {"passed": tr',
        "list.json": b"[1, 2]",
        "kinds.json": b'{"0.1": {"passed": "yes", "minutes": 1}}',
        "nan.json": b'{"0.1": {"passed": true, "minutes": NaN}}',
        "less.json": b'{"0.1": {"passed": true, "minutes": -5}}',
        "bytes.json": b"\xff\xfe\x00",
    }
    for name, text in bad.items():
        (shared / name).write_bytes(text)
    (shared / "folder.json").mkdir()
    (shared / "notes.txt").write_text("no record, and no .json")
    good = {"0.1": {"passed": True, "minutes": 3}, "99.1": {"passed": False, "minutes": None}}
    (shared / "good.json").write_text(json.dumps(good))
    status, table, said = check(course, "--class", shared)
    assert status == 1
    assert table.startswith("records: 1\n")
    assert "99.1" not in table
    names = ", ".join(map(repr, sorted([*bad, "folder.json"])))
    assert said == f"Left out, because they are no records: {names}\n"
    assert {name: (shared / name).read_bytes() for name in bad} == bad  # nothing is lost


def test_a_damaged_record_of_ones_own_is_said_and_the_list_goes_on(course):
    kept = course / "runs" / "exercises.json"
    kept.parent.mkdir()
    kept.write_text('{"0.1": ')
    status, table, said = check(course)
    assert status == 0
    assert said.count("\n") == 1
    assert "is damaged. It is kept as exercises.json.damaged-" in said
    assert " -  " in table


# The timetable


def test_the_timetable_has_each_lesson_once():
    taught = [page["id"] for day in DAYS.values() for page in pages_of(day) if "id" in page]
    assert sorted(taught) == sorted(LESSONS)
    for name, day in DAYS.items():
        assert [day_of(page) for page in pages_of(day)] == [name] * len(pages_of(day))


def pages_of(day):
    return [page for *_, page, _ in parts_of(day, read_pages()) if page]


@pytest.mark.parametrize("name", DAY_IDS)
def test_an_exercise_comes_after_its_lesson(name):
    lessons, ids = [], []
    for _, minutes, title, page, exercises in parts_of(DAYS[name], read_pages()):
        lessons += [page["id"]] if page and "id" in page else []
        for exercise_id in exercises:
            assert EXERCISES[exercise_id]["lesson"] in lessons, title
            # In class one works in pairs, and a capstone is finished at home.
            assert EXERCISES[exercise_id]["minutes"] <= minutes + 5 or "apstone" in title
        assert bool(exercises) == title.startswith(("Exercise", "Capstone"))
        ids += exercises
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["day1", "day2"])
def test_a_day_has_breaks_and_a_capstone(name):
    parts = parts_of(DAYS[name], read_pages())
    titles = [title for _, _, title, *_ in parts]
    assert titles.count("Lunch") == 1
    assert titles.count("Break") == 2
    kinds = [EXERCISES[x]["kind"] for *_, exercises in parts for x in exercises]
    assert "capstone" in kinds
    clocks = [clock for clock, minutes, *_ in parts]
    assert all(a + b == c for a, b, c in zip(clocks, [x[1] for x in parts], clocks[1:]))


def halves(day):
    """Return the minutes of a day's morning and afternoon."""
    parts = parts_of(day, read_pages())
    lunch = next(i for i, x in enumerate(parts) if x[2] == "Lunch")
    return [sum(minutes for _, minutes, *_ in half) for half in (parts[:lunch], parts[lunch + 1 :])]


# What instructors prepare


def test_the_nodes_last_as_long_as_the_block():
    found = re.findall(r"^\| Day (\d),.* \| `salloc .*--time (\d\d):(\d\d):00 ", TEACHING, re.M)
    assert [day for day, *_ in found] == ["1", "1", "1", "2"]
    for day, hours, minutes in found:
        assert 60 * int(hours) + int(minutes) >= max(halves(DAYS[f"day{day}"]))
    hours = int(re.search(r"scontrol create reservation .*Duration=(\d\d):00:00", TEACHING)[1])
    for name in ("day1", "day2"):
        whole = sum(minutes for _, minutes, *_ in parts_of(DAYS[name], read_pages()))
        assert whole <= 60 * hours


def test_the_table_of_nodes_adds_up():
    part = TEACHING.partition("\n## Nodes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+)" + r" \| (\d+)" * 5 + r" \|$", part, re.M)
    assert len(rows) >= 3
    for row in rows:
        people, four, one, shared, two, pairs = map(int, row)
        assert four == people
        assert one == -(-people // 4)  # four GPUs in a node
        assert shared == -(-people // 16)  # 128 CPUs in a node, 8 for each person
        assert two == 2 * people
        assert pairs == 2 * -(-people // 2)


def test_each_lesson_has_its_question():
    part = TEACHING.partition("\n## What usually goes wrong\n")[2].partition("\n## ")[0]
    rows = [line[2:-2].split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == list(LESSONS)
    for _, wrong, question in rows:
        assert wrong.endswith((".", "`"))
        assert question.endswith("?")


def test_the_mail_has_the_commands_of_the_page():
    (mail,) = re.findall(r"^```text\n(.*?)^```$", TEACHING, re.M | re.S)
    commands = re.findall(r"^    (.*)$", mail, re.M)
    fences = "".join(re.findall(r"^```bash\n(.*?)^```$", TEACHING, re.M | re.S)).splitlines()
    assert len(commands) >= 4
    assert set(commands) <= set(fences)


def test_the_folder_of_the_class_is_the_same_everywhere():
    text = TEACHING + (ROOT / "day1" / "GUIDE.md").read_text()
    assert len(re.findall(r"check\.py --(?:hand-in|class) <shared folder>$", text, re.M)) == 3
