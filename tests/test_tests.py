"""The tests themselves: what they are made of sees what it must see."""

import ast
import os
import shutil
import subprocess
import sys

import pytest
from helpers import LESSONS, ROOT
from mentions import keywords, mentions
from mutants import assert_disproved, run_mutant
from test_lessons import MUTATIONS, SCALED

TESTS = sorted((ROOT / "tests").rglob("*.py"))


# Mutants.


def test_a_mutant_that_crashes_is_no_proof(tmp_path):
    crash = ("    dist.barrier()  # leave together", "    raise ValueError  # leave together")
    with pytest.raises(AssertionError, match="the mutant crashes, which proves nothing"):
        run_mutant("0", [crash], 1, cwd=tmp_path)


def test_a_mutant_that_proves_its_claim_or_says_nothing_of_it_is_seen(tmp_path):
    with pytest.raises(AssertionError, match=r"0_torch_dist\.py has 0 times: no such line"):
        run_mutant("0", [("no such line", "")], 1, cwd=tmp_path)
    output = run_mutant("0", [], 2, cwd=tmp_path)
    with pytest.raises(AssertionError, match=r"=> every rank holds 1; .*: ok"):
        assert_disproved(output, "every rank")
    output = output.replace(": ok", ": WRONG")
    assert_disproved(output, "every rank holds 1")
    with pytest.raises(AssertionError, match="the proof line does not say: DIFFERENT"):
        assert_disproved(output, "DIFFERENT")


def test_every_lesson_has_a_mutant():
    found = {x[0] for x in MUTATIONS} | set(SCALED)
    for file in TESTS:
        for node in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("run_mutant", "write_mutant", "assert_disproved"):
                found |= {x.value for x in node.args[:2] if isinstance(x, ast.Constant)}
    assert set(LESSONS) - found == set(), "no mutant: MUTATIONS in tests/test_lessons.py"


# Random choices.


def chooses(text):
    """Yield what in a Python text makes a random choice that cannot be made again."""
    for name, call in mentions(text):
        module, _, function = name.rpartition(".")
        if module == "torch" and function.startswith(("rand", "bernoulli", "multinomial")):
            seeded = "generator" in keywords(call)
        elif module in ("random", "numpy.random", "secrets"):
            seeded = function in ("Random", "default_rng") and call and call.args
            seeded = seeded or function in ("SystemRandom", "Generator")  # the first: for a seed
        else:
            continue
        if not seeded:
            yield name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import random\nrandom.choice(x)", "random.choice"),
        ("from random import shuffle as mix\nmix(x)", "random.shuffle"),
        ("import random\nr = random.Random()", "random.Random"),
        ("import numpy as np\nnp.random.rand(3)", "numpy.random.rand"),
        ("from numpy.random import default_rng\ndefault_rng()", "numpy.random.default_rng"),
        ("import torch\ntorch.randn(3)", "torch.randn"),
    ],
)
def test_a_choice_without_a_seed_is_seen(text, name):
    assert name in chooses(text)


def test_random_choices_are_made_by_chooser_which_prints_its_seed(capsys, monkeypatch):
    from helpers import chooser

    found = {x.name: set(chooses(x.read_text())) for x in TESTS}
    assert {name: what for name, what in found.items() if what} == {}
    first = chooser().random()
    seed = capsys.readouterr().out.rpartition("TEST_SEED=")[2].strip()
    assert chooser().random() != first
    monkeypatch.setenv("TEST_SEED", seed)
    assert chooser().random() == first


# Flaky tests: .ci/run runs once more what failed.

SUITE = """
import os, pathlib, sys
import pytest

def again(name):
    "Return whether this is called for the second time."
    mark = pathlib.Path(name)
    found = mark.exists()
    mark.touch()
    return found

def test_well(): pass

@pytest.mark.parametrize("number", range({flaky}))
def test_flaky(number): assert again(f"flaky{{number}}")

@pytest.fixture
def untidy():
    yield
    assert again("untidy")
"""
BAD = {
    "fails": "def test_bad(): assert 0",
    "is skipped then": "def test_bad():\n    if again('x'): pytest.skip('no reason')\n    assert 0",
    "is gone then": "if not again('x'):\n    def test_bad(): assert 0",
    "cannot be imported": "import no_such_module",
    "ends the run": "def test_bad():\n    if again('x'): os._exit(3)\n    assert 0",
}


def continuous_integration(folder, *, flaky=0, more=""):
    """Run the end of .ci/run on a small suite in a folder; return (exit status, its last lines)."""
    text = (ROOT / ".ci" / "run").read_text()
    part = text[text.index("run_tests() {\n") :]
    part = part[: part.index("\n}\n") + 3] + "run_tests\n"
    assert '\nrun_tests "$@"\n' in text
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "flaky.py", folder / "tests")
    (folder / ".pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (folder / "tests" / "test_some.py").write_text(SUITE.format(flaky=flaky) + more)
    (folder / "scripts").mkdir()
    script = folder / "scripts" / "run_tests.sh"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest "$@"\n')
    script.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nlint=.\n{part}echo over"],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout.rpartition("\n===")[2].split("\n", 1)[1] + done.stderr


def test_what_passes_is_not_run_again(tmp_path):
    status, said = continuous_integration(tmp_path)
    assert (status, said) == (0, "over\n")
    assert not (tmp_path / "second.xml").exists()


@pytest.mark.parametrize("flaky", [1, 2, 3])
def test_a_flaky_test_does_not_vanish(flaky, tmp_path):
    status, said = continuous_integration(tmp_path, flaky=flaky)
    lines = [
        f"flaky: tests/test_some.py::test_flaky[{n}] failed, and passed when it was run once more"
        for n in range(flaky)
    ]
    end = ["over"] if flaky < 3 else ["3 tests are flaky: too many."]
    assert said.splitlines() == lines + end
    assert (status == 0) == (flaky < 3)


def test_a_test_that_fails_at_its_end_is_flaky_too(tmp_path):
    status, said = continuous_integration(tmp_path, more="def test_untidy(untidy): pass")
    assert status == 0
    assert said.startswith("flaky: tests/test_some.py::test_untidy failed")


@pytest.mark.parametrize("how", BAD)
def test_a_test_that_does_not_pass_then_fails_all(how, tmp_path):
    status, said = continuous_integration(tmp_path, flaky=1, more=BAD[how])
    assert status == 1
    assert "over" not in said
    if how == "ends the run":
        assert "has left no results" in said
    elif how != "cannot be imported":
        assert "failed: tests/test_some.py::test_bad\n" in said
        assert "flaky: tests/test_some.py::test_flaky[0] failed" in said
    else:
        assert "failed: tests.test_some\n" in said
