"""run_course.sh and its report."""

import functools
import re
import sys

import pytest
from markupsafe import escape
from runner import report, run_course
from support.run import LESSONS, ROOT, STUBBORN, is_alive, output_of, proof_of, recorded_output, run
from torch.utils.tensorboard import SummaryWriter

RUN_COURSE = [sys.executable, ROOT / "scripts" / "runner" / "run_course.py"]

# Lessons that take no time: {id: (the program, the verdict that it should get)}. They may take 4 s.
STAND_INS = {
    "well": ("print('=> a claim: ok')", "ok"),
    "wrong": ("import sys; print('=> a claim: WRONG'); sys.exit(1)", "WRONG"),
    "silent": ("print('ends well, and proves nothing')", "no proof line"),
    "crashes": ("import os; os.kill(os.getpid(), 11)", "exit status -11"),
    "cannot": ("import sys; print('No <wheels>.'); sys.exit(69)", "skipped: No <wheels>."),
    "hangs": (f"{STUBBORN}time.sleep(600)", "stopped after 4 s, processes left: 1"),
    "leaves": (f"{STUBBORN}print('=> a claim: ok')", "processes left: 1"),
}


@pytest.fixture
def run_stand_ins(tmp_path, monkeypatch, capsys):
    """A function that runs some of them in this process; it returns (exit status, output).

    What they leave has a second to end.
    """
    lessons = []
    for name, (program, _) in STAND_INS.items():
        file = tmp_path / f"{name}.py"
        file.write_text(program)
        lesson = {"id": name, "file": str(file), "idea": name}
        lessons.append({**lesson, "nodes": False, "arguments": []})
    monkeypatch.setattr(run_course, "read_lessons", lambda: lessons)
    monkeypatch.chdir(tmp_path)
    impatient = functools.partial(run_course.run_lesson, limit=4, grace=1, settle=1)
    monkeypatch.setattr(run_course, "run_lesson", impatient)

    def run(*names):
        monkeypatch.setattr(sys, "argv", ["run_course.py", *names])
        return run_course.main(), capsys.readouterr().out

    return run


def table_of(output):
    """Return the last table of a run, {lesson: (what it showed, what came of it)}."""
    table = output.rpartition("what it showed")[2]
    rows = re.findall(r"^ *(\S+)  (=>.*?)? +[\d.]+  (.+)$", table, re.M)
    return {name: (showed.strip(), state) for name, showed, state in rows}


def test_a_lesson_is_run_and_its_proof_is_in_the_table_and_in_the_report(tmp_path):
    output = output_of(run([*RUN_COURSE, "0"], 280, tmp_path, None))
    proof = "=> every rank holds 6; the sum 0+1+2+3 is 6: ok"
    assert table_of(output) == {"0": (proof, "ok")}
    page = (tmp_path / "runs" / "report.html").read_text()
    assert str(escape(proof)) in page


def test_every_way_to_end_has_its_verdict_and_nothing_is_left(run_stand_ins, tmp_path):
    status, output = run_stand_ins(*STAND_INS)
    assert status == 1, output
    verdicts = {name: state for name, (_, state) in table_of(output).items()}
    assert verdicts == {name: verdict for name, (_, verdict) in STAND_INS.items()}
    left = re.findall(r"^   left behind, so killed: process (\d+) sleep 600$", output, re.M)
    assert len(left) == 2
    assert not any(is_alive(int(pid)) for pid in left)
    assert "\n1 of 6 lessons ok, 1 skipped, " in output
    page = (tmp_path / "runs" / "report.html").read_text()
    states = re.findall(r'<td><span class="state (\w+)">(.*?)</span>', page)
    assert ("problem", "WRONG") in states
    assert ("problem", "stopped after 4 s, processes left: 1") in states
    assert [state for state, _ in states].count("problem") == 5
    assert ("skipped", "skipped") in states
    assert "No &lt;wheels&gt;." in page


def test_what_is_not_known_is_refused_before_anything_runs(run_stand_ins, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_stand_ins("well", "day7")
    said = capsys.readouterr()
    known = ", ".join(STAND_INS)
    assert said.err.endswith(f"There is no lesson 'day7'. There are day1, day2 and {known}.\n")
    assert said.out == ""


# The report


def result_of(lesson_id):
    """Return what run_course.py knows of a lesson that printed its recorded output."""
    output = recorded_output(lesson_id) + "\n"
    result = {key: LESSONS[lesson_id].get(key) for key in ("id", "idea", "figure")}
    result |= {"output": output, "showed": proof_of(output), "seconds": 1.25}
    return result | {"problem": "", "skipped": "", "files": []}


def events_of(folder, *losses):
    """Write losses as a lesson does, one each 100 images; return the paths of the files."""
    with SummaryWriter(folder) as writer:
        for step, loss in enumerate(losses, 1):
            writer.add_scalar("loss/train", loss, 100 * step)
    return sorted(folder.glob("events.out.tfevents.*"))


def test_the_report_draws_what_ran_well_and_needs_no_network(tmp_path):
    results = {lesson_id: result_of(lesson_id) for lesson_id in LESSONS}
    for name, losses in {"2": (2, 1), "4": (2, 1.5), "6": (2, 1.5 + 2**-10)}.items():
        results[name]["files"] = events_of(tmp_path / name, *losses)
    for name in ("alone", "unscaled", "linear"):
        results["8"]["files"] += events_of(tmp_path / name, 2, 1)
    results["10"] |= {"files": results["6"]["files"], "problem": "exit status 1"}
    report.write(tmp_path / "runs" / "report.html", results.values(), "scripts/run_course.sh")
    page = (tmp_path / "runs" / "report.html").read_text()
    figures = re.findall(r'<figure class="card" id="(.*?)">(.*?)</figure>', page, re.S)
    figures = {name: re.findall(r">([^<\n]+)<", svg) for name, svg in figures}
    for result in results.values():
        assert f"<code>{escape(result['showed'])}</code>" in page
    assert f"{len(LESSONS) - 1} of {len(LESSONS)} lessons ok" in page
    assert "exit status 1</span>" in page
    assert [*figures] == ["chain", "rates"]
    assert {"lesson 2", "lesson 4", "lesson 6"} < {*figures["chain"]}
    assert "lesson 10" not in figures["chain"]  # it failed
    assert {"alone", "linear"} < {*figures["rates"]}
    assert re.findall(r"(?:src|href|action|data|srcset)=\"(?!#)", page) == []
    assert re.findall(r"url\((?!#)|@import|<script|<link", page) == []
