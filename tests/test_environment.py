"""The environment: what is declared, what is installed where, and which Python the launcher takes.

The packages are small wheels made here, which are called torch and so on; pip, venv, the scripts
and the launcher are the real ones.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions

import pytest
import works_with
from helpers import LESSONS, ROOT, cannot, copy_tree
from lib import environment, recordings

# Measured where somebody has installed them: README.md says how.
OPTIONAL = {"lmdb", "webdataset"}


# What is declared.


def imports(folder):
    """Return {package: files that import it} of a folder; without its own, and Python's."""
    files = [x for x in (ROOT / folder).rglob("*.py") if "node_modules" not in x.parts]
    own = {path.stem for path in [*files, *(ROOT / "scripts").rglob("*.py")]}
    own |= {path.parent.name for path in (ROOT / "scripts").rglob("__init__.py")}
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                package = name.partition(".")[0]
                if package not in own and package not in sys.stdlib_module_names:
                    found.setdefault(package, []).append(str(file))
    return found


def names_in(*files):
    """Return the distributions of requirements files, as one name for - and _, great and small."""
    names = environment.read_requirements(*(ROOT / file for file in files))
    return {name.lower().replace("_", "-") for name in names}


@pytest.mark.parametrize("folder", ["day1", "day2", "scripts", "slides", "tests"])
def test_every_import_is_declared(folder):
    files = ["requirements.txt", *(["tests/requirements.txt"] if folder == "tests" else [])]
    declared, distributions = names_in(*files), packages_distributions()
    found = imports(folder)
    assert "torch" in found
    for package, where in found.items():
        names = {name.lower().replace("_", "-") for name in distributions.get(package, [package])}
        assert names & (declared | OPTIONAL), f"{package}, imported by {where}, is not declared"


def test_what_only_the_tests_need_is_declared_there_only():
    ours, theirs = names_in("requirements.txt"), names_in("tests/requirements.txt")
    assert not ours & theirs
    elsewhere = {x for folder in ("day1", "day2", "scripts", "slides") for x in imports(folder)}
    distributions = packages_distributions()
    for package in elsewhere:
        assert not theirs & {name.lower() for name in distributions.get(package, [])}, package


@pytest.mark.parametrize("file", ["requirements.txt", "tests/requirements.txt"])
def test_pip_and_environment_read_the_same(file):
    from packaging.requirements import Requirement

    lines = [x.partition("#")[0].strip() for x in (ROOT / file).read_text().splitlines()]
    theirs = [Requirement(line) for line in lines if line]
    theirs = [x for x in theirs if x.marker is None or x.marker.evaluate()]
    ours = environment.read_requirements(ROOT / file)
    assert [*ours.items()] == [(x.name, str(x.specifier).removeprefix(">=")) for x in theirs]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('a; python_version < "3.11"\nb', ["b"]),
        ('a; python_version >= "3.11"\n# b\nc  # d\n', ["a", "c"]),
        ('a>=1.2; python_version < "99.0"', ["a"]),
    ],
)
def test_a_marker_decides_whether_a_package_is_needed(text, names, tmp_path):
    (tmp_path / "file").write_text(text)
    assert [*environment.read_requirements(tmp_path / "file")] == names


def test_a_line_that_is_not_understood_is_named(tmp_path):
    (tmp_path / "file").write_text("a\nb!=3\n")
    with pytest.raises(ValueError, match=r"file, line 2: 'b!=3' is not understood\.$"):
        environment.read_requirements(tmp_path / "file")


# What is installed.


def make_wheel(folder, name, version, *requires, files=None):
    """Write a wheel with a package of that name, and perhaps {path: text} besides."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {text}" for text in requires]
    contents = {
        f"{package}/__init__.py": f'__version__ = "{version}"\n',
        **(files or {}),
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


# Says what it was called with, and by which Python.
PYTEST = 'import os, sys\nprint("pytest", sys.argv[1:], os.environ["PYTHON"] == sys.executable)\n'


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A folder with all that pip can install."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("2.5.1", "2.6.0", "2.7.0", "2.15.0"):
        make_wheel(folder, "torch", version)
    make_wheel(folder, "torchvision", "0.20.1", "torch==2.5.1")
    make_wheel(folder, "torchvision", "0.21.0", "torch==2.6.0")
    make_wheel(folder, "torchvision", "0.22.0", "torch==2.7.0")
    make_wheel(folder, "torchvision", "0.29.2", "torch>=2.14.0")
    make_wheel(folder, "accelerate", "1.0")
    make_wheel(folder, "pytest", "9.0", files={"pytest/__main__.py": PYTEST})
    return folder


@pytest.fixture
def course(tmp_path):
    """The scripts and the requirements of the course, with fewer packages."""
    root = tmp_path / "my course"
    ignored = shutil.ignore_patterns("__pycache__")
    copy_tree(ROOT / "scripts", root / "scripts", ignore=ignored)
    (root / "requirements.txt").write_text("torch>=2.6\ntorchvision>=0.21\naccelerate\n")
    (root / "tests").mkdir()
    (root / "tests" / "requirements.txt").write_text("pytest\n")
    (root / "where.py").write_text(
        "import accelerate, sys, torch\nprint('it is', sys.prefix, torch.__version__)\n"
    )
    return root


@pytest.fixture
def module(wheels, tmp_path):
    """Return a function that makes what a site's module puts first in PATH, with packages."""

    def make(name, *packages):
        folder = tmp_path / "site" / name
        command = [sys.executable, "-m", "venv", "--without-pip", folder]
        subprocess.run(command, check=True, timeout=60)
        (packages_of,) = folder.glob("lib/python*/site-packages")
        for package in packages:
            with zipfile.ZipFile(wheels / f"{package}-py3-none-any.whl") as wheel:
                wheel.extractall(packages_of)  # as pip does
        return folder / "bin"

    return make


@pytest.fixture
def shell(course, wheels, module):
    """Return a function that types a command, with a folder of programs first in PATH or without.

    It returns (exit status, output). pip is offered the wheels, and nothing else.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "PYTHON", "SLURM_", "VIRTUAL_ENV"))
    }
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    if importlib.util.find_spec("ensurepip") is None:
        cannot("needs pip in new environments: apt-get install python3-venv")
    bare = module("nothing")  # the Python that is there without a module has no torch

    def run(*command, path=None, **variables):
        places = [str(x) for x in (path, bare) if x]
        variables["PATH"] = ":".join([*places, "/usr/local/bin:/usr/bin:/bin"])
        done = subprocess.run(
            [*map(str, command)],
            cwd=course,
            env={**env, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        return done.returncode, done.stdout

    return run


LIST = ("scripts/run_course.sh", "--list")
TESTS = ("scripts/run_tests.sh", "-k", "x")
LAUNCH = ("scripts/multinode_setup_and_run.sh", "--local", "1", "where.py")
TORCH = ("torch-2.6.0", "torchvision-0.21.0")


def test_a_module_without_accelerate_keeps_its_torch_and_lesson_15_finds_both(
    module, shell, course
):
    active = module("pytorch 2.6", *TORCH)
    status, output = shell(*LAUNCH, path=active)
    assert status == 1
    assert "No module named 'accelerate'" in output
    status, output = shell(*LIST, path=active)
    assert status == 0, output
    assert output.startswith(
        "Making .venv with what the active Python lacks: accelerate. "
        "Its torch==2.6.0 and torchvision==0.21.0 are kept.\n"
    )
    assert not list((course / ".venv").rglob("torch"))
    status, output = shell(*LAUNCH, path=active)
    assert status == 0, output
    assert f"it is {course / '.venv'} 2.6.0\n" in output
    # A second time there is nothing to do.
    status, output = shell(*LIST, path=active)
    assert output.splitlines()[0].split()[0] == "0"
    # Another module is loaded now, and PYTHON names one.
    other = module("pytorch 2.7", "torch-2.7.0", "torchvision-0.22.0", "accelerate-1.0")
    assert f"it is {other.parent} 2.7.0\n" in shell(*LAUNCH, path=other)[1]
    name = str(other / "python3")
    assert f"it is {other.parent} 2.7.0\n" in shell(*LAUNCH, path=active, PYTHON=name)[1]
    # None is loaded: .venv still sees the first.
    assert f"it is {course / '.venv'} 2.6.0\n" in shell(*LAUNCH)[1]


def test_a_module_that_has_all_is_used_as_it_is(module, shell, course):
    active = module("pytorch", *TORCH, "accelerate-1.0")
    status, output = shell(*LIST, path=active)
    assert status == 0, output
    assert "Making" not in output
    assert not (course / ".venv").exists()
    assert f"it is {active.parent} 2.6.0\n" in shell(*LAUNCH, path=active)[1]
    # Only the tests need more.
    status, output = shell(*TESTS, path=active)
    assert status == 0, output
    assert "Making .venv with what the active Python lacks: pytest. Its torch==2.6.0 and" in output
    assert output.endswith("pytest ['-k', 'x'] True\n")


def test_an_environment_gets_only_what_it_lacks(shell, course):
    """Also while it is active, and after the requirements have grown; but not half made."""
    requirements = course / "requirements.txt"
    requirements.write_text("torch>=2.6\ntorchvision>=0.21\nthere-is-none\n")
    status, output = shell(*LIST)
    assert status == 1
    sentence = "What is needed could not be installed into .venv: the lines above say why."
    assert output.splitlines()[-1] == sentence
    requirements.write_text("torch>=2.6\ntorchvision>=0.21\n")
    status, output = shell(*LIST)
    assert status == 0, output
    assert output.startswith("Making .venv and installing requirements.txt: ")
    (course / ".venv" / "mark").touch()
    status, output = shell(*TESTS, path=course / ".venv" / "bin")
    assert status == 0, output
    assert output.startswith("Installing what .venv lacks: pytest.\n")
    assert output.endswith("pytest ['-k', 'x'] True\n")
    requirements.write_text(requirements.read_text() + "accelerate\n")
    status, output = shell(*LIST)
    assert status == 0, output
    assert output.startswith("Installing what .venv lacks: accelerate.\n")
    assert (course / ".venv" / "mark").exists()  # it was never made again
    for path in (course / ".venv" / "bin", None):
        assert f"it is {course / '.venv'} 2.15.0\n" in shell(*LAUNCH, path=path)[1]


@pytest.mark.parametrize(
    ("packages", "sentence"),
    [
        (
            ["torch-2.5.1", "torchvision-0.20.1"],
            "torch 2.6 or newer is needed; this environment has 2.5.1. ",
        ),
        (
            ["torch-2.7.0", "torchvision-0.21.0"],
            "torchvision 0.21.0 is made for torch 2.6.0; this environment has 2.7.0. ",
        ),
        (
            ["torch-2.7.0", "torchvision-0.29.2"],
            "torchvision 0.29.2 is made for torch 2.14.0 or newer; this environment has 2.7.0. ",
        ),
    ],
)
def test_versions_that_do_not_fit_get_a_sentence(packages, sentence, module, shell, course):
    status, output = shell(*LIST, path=module("pytorch", *packages))
    assert status == 1
    assert output.startswith(sentence)
    assert len(output.splitlines()) == 1
    assert not (course / ".venv").exists()


# run_tests.sh --torch


def test_another_torch_gets_an_environment_of_its_own(shell, course):
    """And the torchvision that fits."""
    status, output = shell("scripts/run_tests.sh", "--torch", "2.6.0", "--python", "python3")
    assert status == 0, output
    assert output.startswith("Making .venv-torch-2.6.0 with torch 2.6.0 and what else the tests ")
    assert output.endswith("pytest ['-m', 'short'] True\n")
    assert not (course / ".venv").exists()
    python = course / ".venv-torch-2.6.0" / "bin" / "python"
    show = "import torch, torchvision as v, accelerate; print(torch.__version__, v.__version__)"
    assert shell(python, "-c", show) == (0, "2.6.0 0.21.0\n")
    # It is there now. Other tests may be chosen.
    status, output = shell("scripts/run_tests.sh", "--torch", "2.6.0", "-k", "lesson_4")
    assert output == "pytest ['-k', 'lesson_4'] True\n"
    # One that is active and has that torch is used as it is.
    status, output = shell("scripts/run_tests.sh", "--torch", "2.6.0", path=python.parent)
    assert output == "pytest ['-m', 'short'] True\n"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--torch"], 2, "--torch wants a version, such as 2.6.0."),
        (["--torch", "new"], 2, "--torch wants a version, such as 2.6.0."),
        (["--torch", "2.5.1"], 2, "The course needs torch 2.6 or newer, not 2.5.1."),
        (["--python"], 2, "--python wants the name of a Python, such as python3.12."),
        (["--python", "python9"], 1, "There is no python9 here. Install Python 3.11 or newer, "),
    ],
)
def test_a_wrong_option_gets_one_sentence(arguments, status, sentence, shell):
    found, output = shell("scripts/run_tests.sh", *arguments)
    assert found == status
    assert output.splitlines()[-1].startswith(sentence)


def test_every_lesson_has_a_short_test_that_looks_at_its_proof():
    assert [*works_with.SHORT] == [*LESSONS, "an exercise"], "SHORT in tests/works_with.py"
    for name, test in works_with.SHORT.items():
        file, _, function = test.partition("::")
        text = (ROOT / file).read_text()
        source = re.search(rf"^def {function.partition('[')[0]}\(.*?(?=^\S)", text, re.M | re.S)
        assert source, f"there is no {test}"
        proof = "proves(" in source[0] or '"=> ' in source[0]
        assert proof or name in ("create_mnist_h5", "create_ratings", "an exercise")


def report(test, outcome, reason=None):
    """Return a report as pytest makes it."""
    longrepr = ("file", 1, f"Skipped: {reason}") if reason else None
    return pytest.TestReport(test, ("file", 1, test), {}, outcome, longrepr, "call")


def test_a_run_is_recorded_and_comes_into_the_table(course, monkeypatch):
    monkeypatch.setattr(recordings, "ROOT", course)
    monkeypatch.setattr(recordings, "WORKS_WITH", course / "tests" / "works_with.json")
    with pytest.raises(FileNotFoundError, match=r"First: \./scripts/run_tests.sh --torch VERSION"):
        recordings.take_records()
    reports = {test: report(test, "passed") for test in works_with.SHORT.values()}
    for name, outcome, reason in (("15", "failed", None), ("17", "skipped", "it is too old")):
        reports[works_with.SHORT[name]] = report(works_with.SHORT[name], outcome, reason)
    # A test that passed and could not clean up has failed.
    reports["again"] = report(works_with.SHORT["12"], "failed")
    record = works_with.make_record([*reports.values()])
    count = len(set(works_with.SHORT.values()))
    assert [record[x] for x in ("passed", "failed", "skipped")] == [count - 3, 2, 1]
    folder = course / "runs" / "works_with"
    folder.mkdir(parents=True)
    for torch, python in (("2.6.0", "3.11.7"), ("2.15.0", "3.11.8"), ("2.15.0", "3.9.1")):
        record |= {"torch": torch, "Python": python}
        (folder / f"{torch}-{python}.json").write_text(json.dumps(record))
    recordings.take_records()
    recordings.take_records()  # nothing is there twice
    head, line, *rows = recordings.works_with().splitlines()
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| 2.15.0", record["torchvision"], "3.11.8"],
        ["| 2.15.0", record["torchvision"], "3.9.1"],
        ["| 2.6.0", record["torchvision"], "3.11.7"],
    ]
    assert head.count("|") == line.count("|") == rows[0].count("|")
    assert rows[0].endswith(
        f" | {count - 3} passed, 2 failed, 1 skipped | "
        "all but 12 (failed), 15 (failed), 17 (it is too old) |"
    )
