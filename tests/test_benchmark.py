"""The benchmarks: every case runs, and what is reported is made from what was measured.

How fast anything is, is not tested: these runs are so small that their numbers mean nothing.
"""

import json
import re
import statistics
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmark import cases, commands, results
from helpers import ROOT, load, once
from launcher import processes
from course.colors import shown
from markupsafe import escape

# The command: by its path, because the folder of its cases has the same name.
benchmark = load(ROOT / "scripts" / "benchmark.py")

pytestmark = pytest.mark.timeout(600)  # the first test runs all cases
CASES = {case.name: case for case in cases.CASES}
# In two processes at a time, which take about as long as each other.
HALVES = [["ddp", "scaling", "time-to-98", "all_reduce"], []]
HALVES[1] = [name for name in CASES if name not in HALVES[0]]


def run_benchmark(*arguments, cwd):
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *arguments]
    return processes.run(command, 560, cwd=cwd, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """All cases, measured: .results is {name: JSON}, .output what was printed."""

    def measure():
        folder = tmp_path_factory.mktemp("tiny")
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(run_benchmark, "--tiny", "--only", *half, cwd=folder) for half in HALVES
            ]
        output = ""
        for done in (run.result() for run in runs):
            assert done.trouble == "", f"{done.trouble}\n{done.output}{done.errors}"
            output += done.output
        return str(folder), output

    folder, output = once(tmp_path_factory, "tiny", measure)
    files = (Path(folder) / "runs" / "benchmark").glob("*.json")
    results = {path.stem: json.loads(path.read_text()) for path in files}
    assert results
    return types.SimpleNamespace(folder=Path(folder), output=output, results=results)


def test_every_case_is_measured(tiny):
    assert set(tiny.results) == set(CASES)
    for name, result in tiny.results.items():
        assert f"] {name}: {CASES[name].title}" in tiny.output
        values = [value for x in result["figures"].values() for value in x["values"]]
        assert values
        assert min(values) > 0
        assert result["ratios"]
        assert {"when", "CPU", "Python", "torch", "h5py"} <= result["machine"].keys()
        assert result["machine"]["command"].startswith("python scripts/benchmark.py --tiny --only")


def test_ratios_are_made_from_the_raw_numbers(tiny):
    for result in tiny.results.values():
        for x in result["ratios"]:
            raw = result["figures"][x["over"]]["values"]
            if x["under"]:
                under = result["figures"][x["under"]]["values"]
                raw = [a / b for a, b in zip(raw, under, strict=True)]
            assert x["values"] == raw
            assert x["median"] == statistics.median(raw)


def meets(ratio, median):
    """Return what a median means for a target: "holds", "missed", or "" where there is none."""
    if ratio.at_least is not None:
        return "holds" if median >= ratio.at_least else "missed"
    if ratio.at_most is not None:
        return "holds" if median <= ratio.at_most else "missed"
    return ""


def test_the_table_shows_the_ratios_with_their_targets(tiny):
    for name, result in tiny.results.items():
        rows = re.findall(rf"^\| `{name}` \| (.*) \|$", tiny.output, re.M)
        targets = {ratio.what: results.target(ratio) for ratio in CASES[name].ratios}
        assert [row.split(" | ")[0] for row in rows] == [x["what"] for x in result["ratios"]]
        for row, x in zip(rows, result["ratios"]):
            what, median, _, rounds, aim, verdict = row.split(" | ")
            assert (median, rounds) == (shown(x["median"]), "1")
            assert (aim, verdict) == (targets[what], x["verdict"])
            (ratio,) = (ratio for ratio in CASES[name].ratios if ratio.what == what)
            assert verdict == meets(ratio, x["median"])
            assert (verdict == "") == (aim == "")


def test_the_plots_show_every_figure(tiny):
    for name, result in tiny.results.items():
        plot = (tiny.folder / "runs" / "benchmark" / f"{name}.svg").read_text()
        text = " ".join(re.findall(r">([^<>]+)</", plot))
        shown = [word for figure in result["figures"] for word in re.split(r":? ", figure)]
        assert [word for word in shown if escape(word) not in text] == []
        assert result["unit"] in text


def test_lessons_leave_nothing_where_the_user_stands(tiny):
    assert [path.name for path in tiny.folder.iterdir()] == ["runs"]
    assert [path.name for path in (tiny.folder / "runs").iterdir()] == ["benchmark"]


def run_with(patch, folder, capsys, *some, arguments=()):
    """Run main with these cases in a folder; return (exit status, stdout, stderr)."""
    patch.chdir(folder)
    patch.setattr(cases, "CASES", some)
    for module in (benchmark, results):
        patch.setattr(module, "busy_cores", lambda: 1.9)
    patch.setattr(sys, "argv", ["benchmark.py", *arguments])
    status = benchmark.main()
    return status, *capsys.readouterr()


def case_of(name, *measurements, ratios=(), **more):
    """Return a case whose measurements give the values of these rows, one in each round."""
    rows = [(name, iter(values)) for name, values in measurements]

    def prepare(folder, tiny):
        return [lambda name=name, values=values: {name: next(values)} for name, values in rows]

    return cases.Case(name, name, "images/s", prepare, list(ratios), **more)


def test_medians_and_spread_of_all_rounds(monkeypatch, tmp_path, capsys):
    fast, slow = [30, 80, 50, 60, 40, 70, 20], [1, 2, 1, 2, 1, 2, 1]
    ratios = [
        cases.Ratio("fast / slow", "fast", "slow", at_least=36),
        cases.Ratio("slow / fast", "slow", "fast", at_least=36),
        cases.Ratio("at most", "fast", at_most=50),
        cases.Ratio("not here", "fast", "absent", at_least=1),
    ]
    case = case_of("some", ("fast", fast), ("slow", slow), ratios=ratios, say=str)
    status, output, _ = run_with(monkeypatch, tmp_path, capsys, case)
    assert status == 0
    result = json.loads((tmp_path / "runs" / "benchmark" / "some.json").read_text())
    assert result["figures"]["fast"] == {
        "values": fast,
        "median": 50,
        "lowest": 20,
        "highest": 80,
    }
    # In each round one over the other: 30, 40, 50, 30, 40, 35, 20.
    assert result["ratios"][0]["values"] == [30, 40, 50, 30, 40, 35, 20]
    assert [(x["what"], x["verdict"]) for x in result["ratios"]] == [
        ("fast / slow", "missed"),
        ("slow / fast", "missed"),
        ("at most", "holds"),
    ]
    assert result["ratios"][0]["median"] == 35
    assert "| `some` | fast / slow | 35 | 20 to 50 | 7 | at least 36 | missed |" in output
    assert result["says"] == "{'fast': 50, 'slow': 1}"
    assert "This machine is in use: 1.9 of" in output


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        ({"at_least": 2}, 1.999, "missed"),
        ({"at_least": 2}, 2, "holds"),
        ({"at_least": 2}, 2.001, "holds"),
        ({"at_most": 2}, 1.999, "holds"),
        ({"at_most": 2}, 2, "holds"),
        ({"at_most": 2}, 2.001, "missed"),
        ({"at_least": 0}, -0.001, "missed"),
        ({"at_most": 0}, 0.001, "missed"),
        ({}, 2, ""),
    ],
)
def test_the_median_is_compared_with_its_target(target, value, verdict):
    """On both sides of it; the lowest and the highest, and so the mean, are on the other one."""
    ratio = cases.Ratio("a", "a", **target)
    case = cases.Case("some", "some", "s", None, [ratio])
    far = 1000 if (verdict == "missed") == ("at_least" in target) else -1000
    for values in ([value] * 3, [value + far, value, value], [value, value, value + far]):
        (result,) = results.summarise(case, {"a": values})["ratios"]
        assert (result["median"], result["verdict"]) == (value, verdict)
        assert meets(ratio, value) == verdict


def test_every_second_round_goes_the_other_way(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "busy_cores", lambda: None)
    order = []
    prepare = lambda folder, tiny: [  # noqa: E731
        lambda name=name: order.append(name) or {name: 1.0} for name in "abc"
    ]
    case = cases.Case("order", "order", "s", prepare, [])
    results.measure(case, tmp_path, seconds=60, tiny=False)
    assert "".join(order) == "abccba" * 3 + "abc"
    assert results.measure(case, tmp_path, 1e-9, False)["figures"]["a"]["values"] == [1.0]


def test_a_case_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    def fail(folder, tiny):
        command = ("python", "-c", "import sys; sys.exit('no data here')")
        return [lambda: commands.run(*command, cwd=folder)]

    def leave_out(folder, tiny):
        raise commands.LeftOutError("There is no such machine.")

    some = [
        cases.Case("bad", "bad", "s", fail, []),
        cases.Case("absent", "absent", "s", leave_out, []),
        case_of("good", ("a", [1] * 7), ratios=[cases.Ratio("a", "a")]),
    ]
    status, output, errors = run_with(monkeypatch, tmp_path, capsys, *some)
    assert status == 1
    assert re.fullmatch(r"bad: \S+ -c failed: no data here\n", errors)
    assert "   left out: There is no such machine.\n" in output
    assert "| `good` | a | 1 |" in output
    assert "`bad`" not in output


def test_a_command_that_hangs_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "LIMIT", 1)
    job = commands.start("python", "-c", "import time; time.sleep(60)", cwd=tmp_path)
    with pytest.raises(commands.CannotMeasureError, match="was stopped after 1 s"):
        commands.finish(job)
    assert job.status is not None


def test_a_command_that_leaves_a_process_is_no_measurement(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "SETTLE", 0)
    leaves = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    says = r"not all of its processes: \d+ sleep 60$"
    with pytest.raises(commands.CannotMeasureError, match=says):
        commands.run("python", "-c", leaves, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "There is no case 'nothing'. There are data, time-to-98, "),
        (["--seconds", "0"], "seconds must be greater than 0, not 0"),
        (["--seconds", "long"], "invalid float value: 'long'"),
        (["--only"], "expected at least one argument"),
    ],
)
def test_bad_input_gets_one_sentence(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_that_cannot_be_written_gets_one_sentence(monkeypatch, tmp_path, capsys):
    (tmp_path / "runs").write_text("a file, not a folder")
    with pytest.raises(SystemExit, match=r"^runs/benchmark: Not a directory$"):
        run_with(monkeypatch, tmp_path, capsys, case_of("some", ("a", [1] * 7)))


def test_the_list_names_all_and_measures_nothing(monkeypatch, capsys, tmp_path):
    status, output, _ = run_with(monkeypatch, tmp_path, capsys, *cases.CASES, arguments=["--list"])
    assert status == 0
    for case in cases.CASES:
        assert f"{case.name}  {case.title}\n" in output
        for ratio in case.ratios:
            assert f"{ratio.what}: {results.target(ratio) or 'no target'}\n" in output
    assert not (tmp_path / "runs").exists()


def test_what_was_measured_is_shown_again(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tiny.folder)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--show"])
    assert benchmark.main() == 0
    rows = re.findall(r"^\| `.*$", capsys.readouterr().out, re.M)
    assert rows
    assert sorted(rows) == sorted(re.findall(r"^\| `.*$", tiny.output, re.M))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^There is nothing in runs/benchmark yet\.$"):
        benchmark.main()


def test_the_readme_shows_what_is_measured():
    page = (ROOT / "tests" / "MEASURED.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.M)
    rows = [(name, row.split(" | ")) for name, row in rows if name in CASES]
    assert rows
    for name, (what, median, _, _, aim, verdict) in rows:
        (ratio,) = (x for x in CASES[name].ratios if x.what == what)
        assert aim == results.target(ratio)
        assert float(median.replace(",", "")) > 0
        # What is shown is rounded, to three digits.
        bound = ratio.at_least if ratio.at_most is None else ratio.at_most
        if bound is None or shown(bound) != median:
            assert verdict == meets(ratio, float(median.replace(",", "")))
        else:
            assert verdict in ("holds", "missed")
