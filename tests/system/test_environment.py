"""The environment: whose torch is used, what is installed where, and what one is told.

The packages are small wheels made here, which are called torch and so on; pip, uv, venv, the
scripts and the launcher are the real ones.
"""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import installer
import progress
import pytest
from support.run import ROOT, output_of, run, skip_or_fail_in_ci


def make_wheel(folder, name, version, *requires, files=None):
    """Write a wheel with a package of that name, and perhaps {path: text} besides."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {text}" for text in requires]
    contents = {
        f"{name}/__init__.py": f'__version__ = "{version}"\n',
        f"{name}/distributed.py": "def TCPStore(*where, **how):\n    pass\n",  # for the launcher
        **(files or {}),
        f"{info}/METADATA": "\n".join([*metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in contents.items():
            wheel.writestr(path, text)


def make_index(folder, wheels):
    """Write an index of the wheels in a folder, as pip and uv read it; return its address."""
    for wheel in wheels.glob("*.whl"):
        page = folder / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(f'<a href="{wheel.as_uri()}">{wheel.name}</a>\n')
    return folder.as_uri()


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A folder with all that pip can install."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("2.5.1", "2.6.0", "2.6.0a0+site", "2.15.0"):
        make_wheel(folder, "torch", version)
    make_wheel(folder, "torchvision", "0.21.0", "torch==2.6.0")
    make_wheel(folder, "torchvision", "0.29.2", "torch>=2.14.0")
    make_wheel(folder, "accelerate", "1.0", "torch>=2.0")
    says = 'import sys\nprint("pytest", sys.argv[1:])\n'
    make_wheel(folder, "pytest", "9.0", files={"pytest/__main__.py": says})
    return folder


@pytest.fixture
def course(tmp_path):
    """The scripts and the requirements of the course, with fewer packages."""
    root = tmp_path / "my course"
    shutil.copytree(ROOT / "scripts", root / "scripts")
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
    """A function that makes a site's environment; it returns what has to be exported."""

    def make(name, *packages, kind="venv"):
        folder = tmp_path / "site" / name
        command = [sys.executable, "-m", "venv", "--without-pip", folder]
        subprocess.run(command, check=True, timeout=60)
        [place] = folder.glob("lib/python*/site-packages")
        for package in packages:
            with zipfile.ZipFile(wheels / f"{package}-py3-none-any.whl") as wheel:
                wheel.extractall(place)  # as pip does
        if kind == "PYTHONPATH":
            return {"PYTHONPATH": str(place)}
        return {"PATH": f"{folder / 'bin'}:"}

    return make


@pytest.fixture
def shell(course, wheels, site):
    """A function that types a command, where some variables are exported, without internet.

    It returns (exit status, output). pip is offered the wheels, and nothing else. The Python that
    is there without a site's environment has no torch.
    """
    if importlib.util.find_spec("ensurepip") is None:
        skip_or_fail_in_ci("needs pip in new environments: apt-get install python3-venv")
    begins = ("PIP_", "PYTHON", "SLURM_", "UV_", "VIRTUAL_ENV")
    env = {name: "" for name in os.environ if name.startswith(begins)}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    env |= {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    env |= {"PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(wheels / "uv")}
    env["PATH"] = site("nothing")["PATH"] + "/usr/local/bin:/usr/bin:/bin"
    uv = shutil.which("uv", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    if not uv:
        skip_or_fail_in_ci("needs uv: pip install uv")
    (course.parent / "site" / "nothing" / "bin" / "uv").symlink_to(uv)

    def type_command(*command, **variables):
        if "PATH" in variables:
            variables["PATH"] += env["PATH"]
        status, output = run(command, 280, course, {**env, **variables})
        return status, re.sub(r"^\.\.\. \d+ s, and it goes on\n", "", output, flags=re.M)

    return type_command


LIST = ("scripts/run_course.sh", "--list")


def torch_of(shell, **variables):
    """Return what the launcher's ranks run with: prefix, torch and torchvision."""
    command = ("scripts/multinode_setup_and_run.sh", "--local", "1", "where.py")
    output = output_of(shell(*command, **variables))
    return output.partition("it is ")[2].rstrip("\n")


def test_the_torch_of_a_site_is_kept_and_gets_the_torchvision_that_fits(
    site, shell, course, tmp_path
):
    """Also with uv in PATH, which would replace it: it does not see what is outside of .venv."""
    active = site("pytorch 2.6", "torch-2.6.0", kind="PYTHONPATH")
    before = sorted((tmp_path / "site" / "pytorch 2.6").rglob("*"))
    output = output_of(shell(*LIST, **active))
    assert output.startswith(
        "Making .venv. It keeps the active torch==2.6.0.\n"
        "Installing what .venv lacks: torchvision, accelerate.\n"
    )
    venv = course / ".venv"
    assert torch_of(shell, **active) == f"{venv} 2.6.0 0.21.0"
    assert not list(venv.rglob("torch"))
    after = sorted((tmp_path / "site" / "pytorch 2.6").rglob("*"))
    assert [path for path in after if "__pycache__" not in path.parts] == before
    assert shell(*LIST, **active)[1].split()[0] == "0"  # a second time all is there
    # In a new terminal the site's is not active. .venv does not get another torch.
    output = output_of(shell(*LIST), 1)
    assert output.startswith(f"{venv} was made for an environment that is not active now: ")
    assert "site-packages. Activate that environment first, " in output


def test_an_environment_that_has_all_is_used_as_it_is(site, shell, course):
    """Also if its torch is a site's own build, which no index has. For pip it is before 2.6."""
    active = site("pytorch", "torch-2.6.0a0+site", "torchvision-0.21.0", "accelerate-1.0")
    assert shell(*LIST, **active)[1].split()[0] == "0"
    assert not (course / ".venv").exists()
    # Only the tests need more.
    output = output_of(shell("scripts/run_tests.sh", "-k", "x", **active, TORCH_INDEX="an-index"))
    assert "\nInstalling what .venv lacks: pytest.\n" in output
    assert output.endswith("pytest ['-k', 'x']\n")
    assert torch_of(shell, **active).endswith(" 2.6.0a0+site 0.21.0")


def installer_of(course, name):
    """Return which program installed a package into .venv."""
    [file] = course.glob(f".venv/lib/python*/site-packages/{name}-*.dist-info/INSTALLER")
    return file.read_text().strip()


def test_what_failed_or_was_interrupted_is_taken_up_and_uv_installs_what_lacks(shell, course):
    requirements = course / "requirements.txt"
    requirements.write_text("torch>=2.6\ntorchvision>=0.21\n")
    (course / ".venv").mkdir()
    (course / ".venv" / "pyvenv.cfg").touch()  # half made
    output = output_of(shell(*LIST, PIP_FIND_LINKS=""), 1)  # as without a network
    sentence = "The packages could not be installed into .venv: the lines above say why, "
    assert output.splitlines()[-1].startswith(sentence)
    output = output_of(shell(*LIST))
    assert output.startswith("Installing what .venv lacks: torch, torchvision.\n")
    assert installer_of(course, "torch") == "uv"
    [packages] = (course / ".venv").glob("lib/python*/site-packages")
    [info] = packages.glob("torch-*.dist-info")
    (info / "INSTALLER").unlink()  # as when it is killed
    (packages / "torch" / "__init__.py").unlink()
    (course / ".venv" / "unfinished.txt").touch()
    requirements.write_text(requirements.read_text() + "accelerate\n")
    assert shell(*LIST)[1].startswith("Installing what .venv lacks: torch, accelerate.\n")
    assert shell(*LIST)[1].split()[0] == "0"
    assert torch_of(shell) == f"{course / '.venv'} 2.15.0 0.29.2"


@pytest.mark.full
def test_pip_s_settings_reach_uv_and_pip_leaves_a_dead_index(shell, course, wheels, tmp_path):
    dead = "http://me:secret@127.0.0.1:9/simple"
    index = make_index(tmp_path / "index", wheels)
    conf = tmp_path / "pip.conf"
    for extra, program in (("", "uv"), (f"extra-index-url = {dead}\n", "pip")):
        conf.write_text(f"[global]\nindex-url = {index}\n{extra}")
        shutil.rmtree(course / ".venv", ignore_errors=True)
        pips = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": str(conf)}
        output = output_of(shell(*LIST, **pips))
        assert installer_of(course, "torchvision") == program
        assert ("uv failed: the lines above say why." in output) == (program == "pip")
        assert "secret" not in output


def test_an_installation_says_that_it_goes_on_and_what_stopped_it(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 1)
    program = "import time; print('one'); time.sleep(2.5); print('no room'); exit(1)"
    assert not installer.follow([sys.executable, "-uc", program], os.environ)
    said = r"(\.\.\. \d+ s, and it goes on\n)+one\nno room\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_a_torch_that_is_too_old_gets_a_sentence(site, shell, course):
    output = output_of(shell(*LIST, **site("pytorch", "torch-2.5.1")), 1)
    assert output.startswith("torch 2.6 or newer is needed; this environment has 2.5.1. Load")
    assert len(output.splitlines()) == 1
    assert not (course / ".venv").exists()


def test_a_python_that_is_too_old_gets_a_sentence(monkeypatch):
    said = r"Python 3\.11 or newer is needed; .* Name a newer one: PYTHON=python3\.12"
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(ROOT / "scripts" / "catalog.py"))


@pytest.mark.full
def test_torch_comes_from_the_index_that_is_named(shell, course, wheels, tmp_path):
    builds = tmp_path / "builds"
    builds.mkdir()
    make_wheel(builds, "torch", "2.15.0+cpu")
    make_wheel(builds, "torchvision", "0.29.2+cpu")
    index = make_index(tmp_path / "cpu", builds)
    pypi = {"PIP_NO_INDEX": "", "PIP_INDEX_URL": make_index(tmp_path / "pypi", wheels)}
    output_of(shell(*LIST, TORCH_INDEX=index, **pypi))
    assert torch_of(shell) == f"{course / '.venv'} 2.15.0+cpu 0.29.2+cpu"


@pytest.mark.parametrize(
    ("has_gpu", "srun", "answers", "first"),
    [
        (False, None, True, "PyTorch's build for CPUs"),
        (True, None, True, "PyTorch's build for this GPU's driver"),
        (False, "srun", True, "PyPI's build of PyTorch"),  # there may be GPUs on other nodes
        (True, None, False, "PyPI's build, because PyTorch's own index does not answer"),
    ],
)
def test_the_build_of_torch_is_for_this_machine(has_gpu, srun, answers, first, monkeypatch):
    monkeypatch.setattr(installer, "answers", lambda *_: answers)
    monkeypatch.setattr(installer, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(shutil, "which", lambda _: srun)
    (words, variables), *_ = installer.builds({}).items()
    assert words.startswith(first)
    assert variables == ({} if srun or not answers else {"UV_TORCH_BACKEND": "auto"})


NOT_THERE = {"chromium", "fc-list", "git", "ip", "npm", "ps", "script", "srun", "unshare", "vmstat"}


@pytest.mark.full
def test_a_bare_machine_skips_and_nothing_fails(tmp_path):
    """What needs a cluster, a browser or git says that it is not there."""
    for program in Path("/usr/bin").iterdir():
        if program.name not in NOT_THERE:
            (tmp_path / program.name).symlink_to(program)
    env = {"PATH": str(tmp_path), "LC_ALL": "C", "TMPDIR": str(tmp_path), "PYTHON": sys.executable}
    command = [ROOT / "scripts" / "run_tests.sh", "-n", "2", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "", "-k", "all_is_well or salloc_line"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]
    assert " skipped" in done.stdout.splitlines()[-1]
