"""The environment: whose torch is used, what is installed where, and what one is told.

The packages are small wheels made here, which are called torch and so on; pip, venv, the scripts
and the launcher are the real ones.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT, cannot, copy_tree, works

PYTEST = 'import sys\nprint("pytest", sys.argv[1:])\n'


def make_wheel(folder, name, version, *requires, files=None):
    """Write a wheel with a package of that name, and perhaps {path: text} besides."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {text}" for text in requires]
    contents = {
        f"{name}/__init__.py": f'__version__ = "{version}"\n',
        **(files or {}),
        f"{info}/METADATA": "\n".join([*metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in contents.items():
            wheel.writestr(path, text)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A folder with all that pip can install."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("2.5.1", "2.6.0", "2.6.0a0+site", "2.7.0", "2.15.0"):
        make_wheel(folder, "torch", version)
    make_wheel(folder, "torchvision", "0.20.1", "torch==2.5.1")
    make_wheel(folder, "torchvision", "0.21.0", "torch==2.6.0")
    make_wheel(folder, "torchvision", "0.29.2", "torch>=2.14.0")
    make_wheel(folder, "accelerate", "1.0", "torch>=2.0")
    make_wheel(folder, "pytest", "9.0", files={"pytest/__main__.py": PYTEST})
    return folder


@pytest.fixture
def course(tmp_path):
    """The scripts and the requirements of the course, with fewer packages."""
    root = tmp_path / "my course"
    copy_tree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "requirements.txt").write_text("torch>=2.6\ntorchvision>=0.21\naccelerate\n")
    (root / "tests").mkdir()
    (root / "tests" / "requirements.txt").write_text("pytest\n")
    (root / "where.py").write_text(
        "import accelerate, sys, torch, torchvision as v\n"
        "print('it is', sys.prefix, torch.__version__, v.__version__)\n"
    )
    return root


@pytest.fixture
def site(wheels, tmp_path):
    """Return a function that makes a site's environment; it returns what has to be exported."""

    def make(name, *packages, kind="venv"):
        folder = tmp_path / "site" / name
        if kind == "venv":
            command = [sys.executable, "-m", "venv", "--without-pip", folder]
            subprocess.run(command, check=True, timeout=60)
        places = [*folder.glob("lib/python*/site-packages"), folder / "packages"]
        for package in packages:
            with zipfile.ZipFile(wheels / f"{package}-py3-none-any.whl") as wheel:
                wheel.extractall(places[0])  # as pip does
        if kind == "PYTHONPATH":
            return {"PYTHONPATH": str(places[0])}
        return {"PATH": f"{folder / 'bin'}:"}

    return make


@pytest.fixture
def shell(course, wheels, site):
    """Return a function that types a command, where some variables are exported.

    It returns (exit status, output). pip is offered the wheels, and nothing else. The Python that
    is there without a site's environment has no torch.
    """
    if importlib.util.find_spec("ensurepip") is None:
        cannot("needs pip in new environments: apt-get install python3-venv")
    begins = ("PIP_", "PYTHON", "SLURM_", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(begins)}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    env["PATH"] = site("nothing")["PATH"] + "/usr/local/bin:/usr/bin:/bin"

    def run(*command, **variables):
        if "PATH" in variables:
            variables["PATH"] += env["PATH"]
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


def torch_of(shell, **variables):
    """Return what the launcher's ranks run with: prefix, torch and torchvision."""
    status, output = shell(*LAUNCH, **variables)
    assert status == 0, output
    return output.partition("it is ")[2].rstrip("\n")


@pytest.mark.parametrize("kind", ["PYTHONPATH", "venv"])
def test_the_torch_of_a_site_is_kept_and_gets_the_torchvision_that_fits(
    kind, site, shell, course, tmp_path
):
    active = site("pytorch 2.6", "torch-2.6.0", kind=kind)
    before = sorted((tmp_path / "site" / "pytorch 2.6").rglob("*"))
    status, output = shell(*LIST, **active)
    assert status == 0, output
    assert output.startswith(
        "Making .venv with what the active Python lacks: torchvision, accelerate. "
        "Kept: torch==2.6.0.\n"
    )
    venv = course / ".venv"
    assert torch_of(shell, **active) == f"{venv} 2.6.0 0.21.0"
    assert not list(venv.rglob("torch"))
    after = sorted((tmp_path / "site" / "pytorch 2.6").rglob("*"))
    assert [path for path in after if "__pycache__" not in path.parts] == before
    # A second time all is there. So it is where both are active.
    both = {**active, "PATH": f"{venv / 'bin'}:{active.get('PATH', '')}"}
    for again in (active, both):
        assert shell(*LIST, **again)[1].split()[0] == "0"
    # In a new terminal the site's is not active. .venv does not get another torch.
    status, output = shell(*LIST)
    assert status == 1
    assert output.startswith(f"{venv} was made for an environment that is not active now: ")
    assert "torch==2.6.0. Activate that one first, " in output
    status, output = shell(*LIST, PATH=f"{venv / 'bin'}:")  # it still sees a venv's packages
    assert (status == 0) == (kind == "venv"), output


def test_an_environment_that_has_all_is_used_as_it_is(site, shell, course):
    """Also if its torch is a site's own build, which no index has. For pip it is before 2.6."""
    active = site("pytorch", "torch-2.6.0a0+site", "torchvision-0.21.0", "accelerate-1.0")
    assert shell(*LIST, **active)[1].split()[0] == "0"
    assert not (course / ".venv").exists()
    # Only the tests need more.
    status, output = shell(*TESTS, **active, TORCH_INDEX="an-index")
    assert status == 0, output
    kept = "Kept: torch==2.6.0a0+site and torchvision==0.21.0."
    making = f"Making .venv with what the active Python lacks: pytest. {kept}\n"
    assert output.startswith(making)
    assert output.endswith("pytest ['-k', 'x']\n")
    assert torch_of(shell, **active).endswith(" 2.6.0a0+site 0.21.0")


def test_what_failed_is_taken_up_again_and_later_only_what_lacks_is_installed(shell, course):
    requirements = course / "requirements.txt"
    requirements.write_text("torch>=2.6\ntorchvision>=0.21\n")
    (course / ".venv").mkdir()
    (course / ".venv" / "pyvenv.cfg").touch()  # half made
    status, output = shell(*LIST, PIP_FIND_LINKS="")  # as without a network
    assert status == 1
    assert output.startswith("Making .venv with torch from PyPI and all else that is needed: ")
    sentence = "What is needed could not be installed into .venv: the lines above say why."
    assert output.splitlines()[-1] == sentence
    status, output = shell(*LIST)
    assert output.startswith("Installing what .venv lacks: torch, torchvision.\n")
    assert status == 0, output
    output = shell("scripts/run_tests.sh", "--full", PATH=f"{course / '.venv' / 'bin'}:")[1]
    assert output == "Installing what .venv lacks: pytest.\npytest ['-m', '']\n"
    requirements.write_text(requirements.read_text() + "accelerate\n")
    assert shell(*LIST)[1].startswith("Installing what .venv lacks: accelerate.\n")
    assert shell(*LIST)[1].split()[0] == "0"
    assert torch_of(shell) == f"{course / '.venv'} 2.15.0 0.29.2"


@pytest.mark.parametrize(
    ("packages", "sentence"),
    [
        ("torch-2.5.1 torchvision-0.20.1", "torch 2.6 or newer is needed; this environment has"),
        ("torch-2.7.0 torchvision-0.21.0", "torchvision 0.21.0 is made for torch==2.6.0; this"),
        ("torch-2.7.0 torchvision-0.29.2", "torchvision 0.29.2 is made for torch>=2.14.0; this"),
    ],
)
def test_versions_that_do_not_fit_get_a_sentence(packages, sentence, site, shell, course):
    status, output = shell(*LIST, **site("pytorch", *packages.split()))
    assert status == 1
    assert output.startswith(sentence)
    assert len(output.splitlines()) == 1
    assert not (course / ".venv").exists()


OLD = """#!/bin/sh
exec {python} -c '
import runpy, sys
sys.version_info, sys.version = (3, 10, 1), "3.10.1 (main)"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


def test_a_python_that_is_too_old_or_missing_gets_a_sentence(shell, course):
    old = course / "python3.10"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    said = (
        "Python 3.11 or newer is needed; this one is 3.10.1. Name a newer one: PYTHON=python3.12\n"
    )
    assert shell(*LIST, PYTHON=str(old)) == (1, said)
    for command in (LIST, TESTS):
        status, output = shell(*command, PYTHON="python9")
        assert status == 1
        assert output.startswith("There is no python9 here. Install Python 3.11 or newer, ")


def test_a_folder_that_cannot_be_written_to_gets_a_sentence(shell, course):
    command = LIST
    if os.geteuid():
        course.chmod(0o555)
    elif works("unshare", "--mount", "true"):  # root may write anywhere, but for such a mount
        script = 'mount --bind . . && mount -o remount,ro,bind . && cd "$PWD" && exec "$@"'
        command = ("unshare", "--mount", "sh", "-c", script, "sh", *LIST)
    else:
        cannot("needs the right to make a mount namespace")
    status, output = shell(*command)
    course.chmod(0o755)
    assert status == 1
    assert f"missing, and {course / '.venv'} cannot be made, as the line above says." in output


def test_torch_comes_from_the_index_that_is_named(wheels, shell, course, tmp_path):
    cpu, pypi = tmp_path / "cpu", tmp_path / "pypi"
    for project in ("torch", "torchvision"):
        (cpu / project).mkdir(parents=True)
    make_wheel(cpu / "torch", "torch", "2.15.0+cpu")
    make_wheel(cpu / "torchvision", "torchvision", "0.29.2+cpu")
    for wheel in wheels.iterdir():
        project = pypi / wheel.name.partition("-")[0]
        project.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, project)
    for project in (*cpu.iterdir(), *pypi.iterdir()):
        links = [f'<a href="{path.name}">{path.name}</a>' for path in project.glob("*.whl")]
        (project / "index.html").write_text("\n".join(links))
    env = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": pypi.as_uri()}
    nowhere = (tmp_path / "nowhere").as_uri()
    status, output = shell(*LIST, TORCH_INDEX=nowhere, **env)
    assert status == 1
    assert f"torch and torchvision could not be installed from {nowhere}: the" in output
    status, output = shell(*LIST, TORCH_INDEX=cpu.as_uri(), **env)
    assert status == 0, output
    assert torch_of(shell) == f"{course / '.venv'} 2.15.0+cpu 0.29.2+cpu"
    assert shell(*LIST, **env)[1].split()[0] == "0"  # later it need not be named


@pytest.mark.full
def test_another_torch_gets_an_environment_of_its_own(shell, course):
    """And the torchvision that fits."""
    command = ("scripts/run_tests.sh", "--torch", "2.6.0", "-k", "lesson_4")
    status, output = shell(*command)
    assert status == 0, output
    assert output.startswith("Making .venv-torch-2.6.0 with torch ")
    assert not (course / ".venv").exists()
    python = course / ".venv-torch-2.6.0" / "bin" / "python"
    show = "import torch, torchvision as v, accelerate; print(torch.__version__, v.__version__)"
    assert shell(python, "-c", show) == (0, "2.6.0 0.21.0\n")
    assert shell(*command) == (0, "pytest ['-k', 'lesson_4']\n")


def test_conda_installs_the_same():
    conda = (ROOT / "scripts" / "environment.yml").read_text()
    listed = conda.partition("\n  - pip\n  - pip:\n")[2]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert listed == "".join(f"      - {line}\n" for line in lines if line and line[0] != "#")


# No git, Slurm, browser, npm, poppler, ip, ps, vmstat or unshare.
EVERYWHERE = ["bash", "sh", "sed", "grep", "find", "xargs", "tar", "gzip", "hostname", "basename"]
EVERYWHERE += ["cat", "chmod", "cksum", "cp", "cut", "date", "df", "dirname", "du", "env", "head"]
EVERYWHERE += ["id", "kill", "ln", "ls", "mkdir", "mktemp", "mv", "nice", "nproc", "paste", "pwd"]
EVERYWHERE += ["readlink", "realpath", "rm", "rmdir", "seq", "sleep", "sort", "tail", "tee"]
EVERYWHERE += ["timeout", "touch", "tr", "uname", "wc"]


@pytest.mark.full
def test_a_bare_machine_skips_and_nothing_fails(tmp_path):
    """What needs a cluster, a browser or git says that it is not there."""
    for name in EVERYWHERE:
        (tmp_path / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tmp_path), "LC_ALL": "C", "TMPDIR": str(tmp_path), "PYTHON": sys.executable}
    command = [ROOT / "scripts" / "run_tests.sh", "-n", "2", "-q", "-p", "no:cacheprovider"]
    part = "all_is_well or browser or written_to"
    done = subprocess.run(
        [*command, "-m", "", "-k", part],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert " passed" in last
    assert " skipped" in last
