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
import sysconfig
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import h5py
import numpy as np
import pytest
import works_with
from helpers import LESSONS, ROOT, cannot, copy_tree
from course import environment
from docs import recordings

# Measured where somebody has installed them: README.md says how.
OPTIONAL = {"lmdb", "webdataset"}
REQUIREMENTS = ROOT / "requirements.txt"


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


def test_conda_installs_the_same():
    conda = (ROOT / "scripts" / "environment.yml").read_text()
    head, _, listed = conda.partition("\n  - pip\n  - pip:\n")
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    assert listed == "".join(f"      - {line}\n" for line in lines if line)
    assert "\nname: course\n" in head
    assert re.search(r"\n  - python=3\.1[1-4]$", head)
    for file in ("scripts/sbatch_run.sh", "day1/GUIDE.md"):  # where it is activated
        assert "conda activate course" in (ROOT / file).read_text()


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


def make_wheel(folder, name, version, *requires, files=None, package=True):
    """Write a wheel with a package of that name, if wanted, and perhaps {path: text} besides."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {text}" for text in requires]
    contents = {
        **({f"{module}/__init__.py": f'__version__ = "{version}"\n'} if package else {}),
        **(files or {}),
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


# Says what it was called with, and by which Python.
PYTEST = 'import os, sys\nprint("pytest", sys.argv[1:], os.environ["PYTHON"] == sys.executable)\n'


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A folder with all that pip can install."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("2.5.1", "2.6.0", "2.6.0a0+site", "2.7.0", "2.15.0"):
        make_wheel(folder, "torch", version)
    make_wheel(folder, "torchvision", "0.20.1", "torch==2.5.1")
    make_wheel(folder, "torchvision", "0.21.0", "torch==2.6.0")
    make_wheel(folder, "torchvision", "0.22.0", "torch==2.7.0")
    make_wheel(folder, "torchvision", "0.29.2", "torch>=2.14.0")
    make_wheel(folder, "accelerate", "1.0", "torch>=2.0")
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
        "import accelerate, sys, torch, torchvision as v\n"
        "print('it is', sys.prefix, torch.__version__, v.__version__)\n"
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

    def run(*command, path=None, cwd=course, **variables):
        places = [str(x) for x in (path, bare) if x]
        variables["PATH"] = ":".join([*places, "/usr/local/bin:/usr/bin:/bin"])
        done = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
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


def test_a_module_with_torch_alone_keeps_it_and_gets_the_torchvision_that_fits(
    module, shell, course
):
    active = module("pytorch 2.6", "torch-2.6.0")
    status, output = shell(*LAUNCH, path=active)
    assert status == 1
    assert "No module named 'accelerate'" in output
    status, output = shell(*LIST, path=active)
    assert status == 0, output
    assert output.startswith(
        "Making .venv with what the active Python lacks: torchvision>=0.21, accelerate. "
        "Kept: torch==2.6.0.\n"
    )
    assert not list((course / ".venv").rglob("torch"))
    status, output = shell(*LAUNCH, path=active)
    assert status == 0, output
    assert f"it is {course / '.venv'} 2.6.0 0.21.0\n" in output
    # A second time there is nothing to do.
    status, output = shell(*LIST, path=active)
    assert output.splitlines()[0].split()[0] == "0"
    # Another module is loaded now, and PYTHON names one.
    other = module("pytorch 2.7", "torch-2.7.0", "torchvision-0.22.0", "accelerate-1.0")
    assert f"it is {other.parent} 2.7.0 0.22.0\n" in shell(*LAUNCH, path=other)[1]
    name = str(other / "python3")
    assert f"it is {other.parent} 2.7.0 0.22.0\n" in shell(*LAUNCH, path=active, PYTHON=name)[1]
    # None is loaded: .venv still sees the first. It is not made again with another torch.
    assert f"it is {course / '.venv'} 2.6.0 0.21.0\n" in shell(*LAUNCH)[1]
    status, output = shell(*LIST)
    assert status == 1
    assert output.startswith(f"{course / '.venv'} was made for the torch 2.6.0 of an environment ")


def test_a_module_that_has_all_is_used_as_it_is(module, shell, course):
    """Also if its torch is a site's own build, which no index has. For pip it is before 2.6."""
    active = module("pytorch", "torch-2.6.0a0+site", "torchvision-0.21.0", "accelerate-1.0")
    status, output = shell(*LIST, path=active)
    assert status == 0, output
    assert "Making" not in output
    assert not (course / ".venv").exists()
    assert f"it is {active.parent} 2.6.0a0+site 0.21.0\n" in shell(*LAUNCH, path=active)[1]
    # Only the tests need more.
    status, output = shell(*TESTS, path=active, TORCH_INDEX="an-index")
    assert status == 0, output
    making = "Making .venv with what the active Python lacks: pytest. Kept: torch==2.6.0a0+site and"
    assert making in output
    assert f"TORCH_INDEX is not used: {active.parent} has torch already. " in output
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
        assert f"it is {course / '.venv'} 2.15.0 0.29.2\n" in shell(*LAUNCH, path=path)[1]


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


@pytest.fixture
def indexes(wheels, tmp_path):
    """Two indexes of packages, as folders, and their address: (pypi, cpu, http://...)."""
    pypi, cpu = tmp_path / "indexes" / "pypi", tmp_path / "indexes" / "cpu"
    for wheel in wheels.iterdir():
        folder = pypi / wheel.name.partition("-")[0]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, folder)
    for name, version in (("torch", "2.15.0+cpu"), ("torchvision", "0.29.2+cpu")):
        (cpu / name).mkdir(parents=True)
        make_wheel(cpu / name, name, version)

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=cpu.parent)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield pypi, cpu, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_torch_comes_from_the_index_that_is_named(indexes, shell, course):
    pypi, cpu, address = indexes
    env = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "NO_PROXY": "127.0.0.1"}
    env["PIP_INDEX_URL"] = f"{address}/pypi"
    status, output = shell(*LIST, TORCH_INDEX=f"{address}/cpu", **env)
    assert status == 0, output
    assert output.startswith(f"Making .venv with torch from {address}/cpu, and installing ")
    assert f"it is {course / '.venv'} 2.15.0+cpu 0.29.2+cpu\n" in shell(*LAUNCH)[1]
    # Later, too, it comes from there: while there is none, PyPI's is not taken.
    requirements = course / "requirements.txt"
    requirements.write_text(requirements.read_text().replace("torch>=2.6", "torch>=2.16"))
    make_wheel(pypi / "torch", "torch", "2.16.0")
    status, output = shell(*LIST, **env)
    assert status == 1
    failed = f"torch and torchvision could not be installed from {address}/cpu: "
    assert output.splitlines()[-1].startswith(failed)
    make_wheel(cpu / "torch", "torch", "2.16.0+cpu")
    status, output = shell(*LIST, TORCH_INDEX="another", **env)
    assert status == 0, output
    note, installing, *_ = output.splitlines()
    assert note.startswith(f"TORCH_INDEX is not used: {course / '.venv'} has torch already. ")
    assert installing == "Installing what .venv lacks: torch>=2.16."
    assert f"it is {course / '.venv'} 2.16.0+cpu 0.29.2+cpu\n" in shell(*LAUNCH)[1]


# A site's environment with the real torch, and lessons that run in it.

OF_A_SITE = {"torch", "torchvision", "numpy", "jinja2", "markupsafe"}


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """Three folders: links to all that is installed but what a site lacks; links to this; wheels.

    The wheels only make the second folder visible: nothing large is copied.
    """
    site, rest, wheels = (tmp_path_factory.mktemp(name) for name in ("site", "rest", "wheels"))
    lacks = set(environment.read_requirements(REQUIREMENTS)) - OF_A_SITE
    for found in distributions():
        name = found.metadata["Name"]
        if name == "pip":
            continue
        folder = rest if name.lower().replace("_", "-") in lacks else site
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link, target = folder / top, Path(found.locate_file(top))
            if target.suffix != ".pth" and target.exists() and not link.is_symlink():
                link.symlink_to(target.resolve())
        if folder == rest:
            path = {"rest.pth": f"{rest}\n"} if name == "accelerate" else {}
            make_wheel(wheels, name, found.version, files=path, package=False)
    return site, wheels


def make_prefix(folder):
    """Make a Python with its own prefix, as conda does. Return its folder of packages."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    library = folder / "lib" / stdlib.name
    library.mkdir(parents=True)
    for path in stdlib.iterdir():
        if path.name not in ("site-packages", "dist-packages"):
            (library / path.name).symlink_to(path)
    for path in stdlib.parent.glob("libpython*"):
        (library.parent / path.name).symlink_to(path)
    (folder / "bin").mkdir()
    for name in ("python", "python3"):
        shutil.copy(Path(sys._base_executable).resolve(), folder / "bin" / name)
    ask = "import sys, sysconfig as s; print(sys.prefix, s.get_path('purelib'), sep='\\n')"
    command = [folder / "bin" / "python3", "-I", "-c", ask]
    prefix, packages = subprocess.check_output(command, text=True, timeout=60).splitlines()
    assert Path(prefix) == folder
    return Path(packages)


@pytest.fixture
def site(packages, module, tmp_path):
    """Return a function that makes a site's environment: (what one types there, its packages)."""

    def make(kind):
        folder = tmp_path / "site" / "pytorch"
        if kind == "module":  # one that puts its packages into PYTHONPATH
            (folder / "packages").mkdir(parents=True)
            there = folder / "packages"
            text = f'module() {{ export PYTHONPATH="{there}"; }}; module load pytorch/2.6.0'
        elif kind == "conda":
            there = make_prefix(folder)
            there.mkdir(parents=True, exist_ok=True)
            text = f'conda() {{ export CONDA_PREFIX="{folder}" PATH="{folder}/bin:$PATH"; }}; '
            text += "conda activate pytorch"
        else:
            module("pytorch")
            (there,) = folder.glob("lib/python*/site-packages")
            text = f'source "{folder}/bin/activate"'
        for link in packages[0].iterdir():
            (there / link.name).symlink_to(link.readlink())
        return text, there

    return make


@pytest.fixture
def whole_course(tmp_path):
    """A copy of the repository without its tests, with links to MNIST and a small file for 11."""
    root = tmp_path / "whole course"
    for name in ("day1", "day2", "scripts"):
        copy_tree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REQUIREMENTS, root)
    (root / "data").mkdir()
    (root / "data" / "MNIST").symlink_to(ROOT / "data" / "MNIST")
    with h5py.File(root / "data" / "mnist.h5", "w") as file:
        for part in ("", "test_"):
            images = np.zeros((600, 28, 28), "uint8")
            file.create_dataset(f"{part}images", data=images, chunks=(100, 28, 28))
            file[f"{part}labels"] = np.zeros(600, "uint8")
    return root


SHORT = (
    "python day1/6_mnist_ddp_pt.py {} --epochs 1 --max-steps 5",
    "scripts/multinode_setup_and_run.sh --local {} 11 --max-steps 2",
    "scripts/multinode_setup_and_run.sh --local {} 15",
)
# Without an import, which takes seconds.
WHERE = (
    "import importlib.util as u; "
    "print(*(u.find_spec(name).origin for name in ('torch', 'torchvision')))"
)


def times_in(folder):
    """Return when each entry of a folder was changed, but for what Python has compiled."""
    paths = (path for path in folder.iterdir() if path.name != "__pycache__")
    return {path: path.lstat().st_mtime_ns for path in paths}


@pytest.mark.parametrize("kind", ["module", "conda", "venv"])
def test_lessons_run_with_the_torch_of_a_site(kind, site, packages, shell, whole_course):
    activate, there = site(kind)
    before = times_in(there)
    env = {"cwd": whole_course, "PIP_FIND_LINKS": str(packages[1])}
    # As the README says, and then in a new terminal.
    what = "0" if kind == "module" else "--list"
    status, output = shell("bash", "-c", f"{activate}; ./scripts/run_course.sh {what}", **env)
    assert status == 0, output
    making = output.splitlines()[0]
    assert re.match(
        r"Making \.venv with what the active Python lacks: tensorboard, .*h5py, accelerate, .*\. "
        r"Kept: torch==\d\S* and torchvision==\d\S*\.$",
        making,
    )
    if kind == "module":
        assert "\n1 of 1 lessons ok, " in output
    ranks = 2 if kind == "module" else 1  # to save time
    lines = ["set -e", activate, "source .venv/bin/activate", f'python -c "{WHERE}"']
    lines += [command.format(ranks) for command in SHORT]
    status, output = shell("bash", "-c", "\n".join(lines), **env)
    assert status == 0, output
    assert output.startswith(f"{there}/torch/__init__.py {there}/torchvision/__init__.py\n")
    assert len(re.findall(r"^=> .*\blosses within \d", output, re.M)) == len(SHORT), output
    assert times_in(there) == before
    assert not [*(whole_course / ".venv").glob("lib/python*/site-packages/torch*/__init__.py")]
    if kind == "module":  # and not loaded
        status, output = shell("bash", "-c", "source .venv/bin/activate; " + " ".join(LIST), **env)
        assert status == 1
        assert output.startswith(f"{whole_course / '.venv'} was made for the torch ")


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
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", "-m", "short"]
    command += ["-p", "no:cacheprovider", *works_with.SHORT.values()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    marked = {line for line in done.stdout.splitlines() if "::" in line}
    assert marked == {*works_with.SHORT.values()}


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
    pins = (course / "tests" / "constraints.txt").read_text()
    assert "with Python 3.11.8." in pins
    assert f"\nnumpy=={np.__version__}\n" in pins
    assert {"torch", "h5py", "accelerate"} < {x.partition("==")[0] for x in pins.splitlines()}
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
