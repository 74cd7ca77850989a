"""What `scripts/run_tests.sh --torch VERSION` runs, and the record of what came of it.

update_docs.py --works-with takes the records into tests/works_with.json, from there into
tests/MEASURED.md, and the packages of the newest one into tests/constraints.txt.
"""

import json
import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

# A short test for each lesson, which runs it and looks at its proof line. They have the mark
# "short".
SHORT = {
    "0": "tests/test_lessons.py::test_lesson_0_sums_the_ranks[2]",
    "1": "tests/test_lessons.py::test_lesson_1_measures_bandwidth[2]",
    "2": "tests/test_lessons.py::test_lesson_2_reaches_98_percent_with_its_defaults",
    "3": "tests/test_lessons.py::test_lesson_3_gives_lesson_2s_loss_on_every_rank[2]",
    "4": "tests/test_lessons.py::test_lesson_6_gives_the_losses_of_lessons_2_and_4[2]",
    "5": "tests/test_lessons.py::test_lesson_5_says_where_the_time_goes[2]",
    "6": "tests/test_lessons.py::test_lesson_6_gives_the_losses_of_lessons_2_and_4[2]",
    "test-profile": "tests/test_lessons.py::test_profile_job_hides_communication[2]",
    "7": "tests/test_lessons.py::test_lesson_7_times_weak_and_strong_scaling[2]",
    "8": "tests/test_lessons.py::test_lesson_8_runs_at_every_size[2-linear]",
    "9": "tests/test_lesson_9.py::test_lesson_9_on_imitated_nodes[2x2-how0]",
    "10": "tests/test_lesson_10.py::test_lesson_10_on_imitated_nodes_has_the_losses_of_one_node",
    "create_mnist_h5": "tests/test_lesson_11.py::test_the_file_holds_the_images",
    "11": "tests/test_lesson_11.py::"
    "test_lesson_11_learns_the_same_from_the_file_as_from_memory[options0]",
    "12": "tests/test_lesson_12.py::test_ranks_that_are_killed_change_nothing",
    "13": "tests/test_lesson_13.py::test_mnist_with_a_checkpoint_an_epoch",
    "create_ratings": "tests/test_lesson_14.py::test_any_number_of_ranks_gives_the_same_model[2]",
    "14": "tests/test_lesson_14.py::test_any_number_of_ranks_gives_the_same_model[2]",
    "15": "tests/test_lesson_15.py::test_it_finds_the_line_with_its_defaults[4]",
    "16": "tests/test_lesson_16.py::test_three_ranks",
    "17": "tests/test_lesson_17.py::test_four_ranks_hold_a_quarter_and_learn_the_same",
    "18": "tests/test_lesson_18.py::test_three_ranks_predict_and_measure",
    "an exercise": "tests/test_exercises.py::test_one_exercise_alone",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the short tests."""
    for item in items:
        if item.nodeid in SHORT.values():
            item.add_marker("short")


def pytest_terminal_summary(terminalreporter, exitstatus):
    """Write the record into the folder WORKS_WITH, where run_tests.sh has set it."""
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if "WORKS_WITH" not in os.environ or not ended:
        return
    reports = [
        report
        for kind in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(kind, [])
    ]
    record = make_record(reports)
    folder = Path(os.environ["WORKS_WITH"])
    folder.mkdir(parents=True, exist_ok=True)
    name = f"torch-{record['torch']}-python-{record['Python']}.json"
    (folder / name).write_text(json.dumps(record, indent=1) + "\n")
    terminalreporter.write_line(
        f"Recorded in {folder / name}. Into the README: python scripts/update_docs.py --works-with"
    )


def make_record(reports):
    """Return the record of a run, from pytest's reports of its tests."""
    outcomes, reasons = {}, {}
    for report in reports:
        # A test has several reports where its set-up or its end failed, too.
        if outcomes.get(report.nodeid) != "failed":
            outcomes[report.nodeid] = report.outcome
        if report.outcome == "skipped":
            reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
    counts = [*outcomes.values()]
    return {
        "torch": version("torch").partition("+")[0],
        "torchvision": version("torchvision").partition("+")[0],
        "Python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "packages": packages(),
        **{outcome: counts.count(outcome) for outcome in ("passed", "failed", "skipped")},
        # Each lesson, and why it is not proved: "" if it is.
        "lessons": {
            name: "" if outcomes.get(test) == "passed" else reasons.get(test, "failed")
            for name, test in SHORT.items()
        },
    }


def packages():
    """Return {name: version} of what requirements.txt names, as far as it is installed."""
    text = (Path(__file__).parents[1] / "requirements.txt").read_text()
    found = {}
    for name in re.findall(r"^[\w-]+", text, re.M):
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:  # not for this Python
            continue
    return found


def machine():
    """Return what the tests ran on, in a few words."""
    import torch

    kind = "no GPU"
    if torch.accelerator.is_available():
        kind = f"{torch.accelerator.device_count()} {torch.accelerator.current_accelerator()}"
    return f"{platform.system()}, {platform.machine()}, {kind}"
