"""Commands of the text, held without running them: each is given to the parser of its program.

A lesson reads its arguments, the launcher says what it would start, a script lists what it would
do. What a program refuses, and what no program here is known for, is an AssertionError.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import boxes
from helpers import ALONE, LESSONS, ROOT, load

# Read by a library, or by Python, and not by the course.
READ_BY_OTHERS = {
    "CUDA_VISIBLE_DEVICES": "CUDA",
    "NCCL_DEBUG": "NCCL",
    "OMP_NUM_THREADS": "OpenMP",
    "PIP_CACHE_DIR": "pip",
    "PIP_NO_CACHE_DIR": "pip",
    "PYTHONFAULTHANDLER": "Python",
    "PYTHONUNBUFFERED": "Python",
    "TMPDIR": "pip",
    "TORCH_CPP_LOG_LEVEL": "PyTorch",
    "TORCH_DISTRIBUTED_DEBUG": "PyTorch",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "PyTorch",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "PyTorch",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "PyTorch",
}
SETTING = re.compile(r"([A-Z][A-Z0-9_]*)=")


class ParsedError(Exception):
    """The arguments are read; the program stops here."""


def stock(course):
    """Give a copy of the repository what lessons look for before they start, as small as it can."""
    import h5py
    import numpy as np

    (course / "data").mkdir(exist_ok=True)
    for name in ("mnist.h5", "mnist20.h5"):
        with h5py.File(course / "data" / name, "w") as file:
            for part in ("", "test_"):
                images = np.zeros((600, 28, 28), "uint8")
                file.create_dataset(f"{part}images", data=images, chunks=(100, 28, 28))
                file[f"{part}labels"] = np.zeros(600)
    lesson = load(ROOT / LESSONS["create_ratings"]["file"])
    for name in ("ratings", "ratings1", "ratings200"):
        folder = course / "data" / name
        folder.mkdir(exist_ok=True)
        options = argparse.Namespace(seed=0, files=4)
        lesson.write(folder, [np.ones(40, lesson.COLUMNS)], options)
    notes = course / "runs" / Path(LESSONS["17"]["file"]).stem / "checkpoint" / "notes.json"
    notes.parent.mkdir(parents=True, exist_ok=True)
    usual = boxes.changed(boxes.USUAL.read_text(), "day1/6_mnist_ddp_pt.md")
    (course / "train.py").write_text(usual)
    notes.write_text(json.dumps({"ranks": 4, "batch": 64, "losses": [1.0]}))


def hold(command, course):
    """Assert that the programs named in a command take it, in a copy of the repository."""
    done = run("bash", "-n", "-c", command, cwd=course)
    assert done.returncode == 0, done.stdout
    words, env = shlex.split(command), {}
    while words and SETTING.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        assert is_read(name), f"nobody reads {name}"
        env[name] = value
    assert words, f"{command}: this sets variables only, and starts nothing"
    program, *arguments = words
    if program == "salloc":  # that part as tests/test_lesson_9.py types it
        assert arguments[:2] == ["--nodes", "2"], command
        program, *arguments = arguments[2:]
    if program == "python":
        hold_python(arguments, course)
    elif program == "torchrun":
        parser = importlib.import_module("torch.distributed.run").get_args_parser()
        hold_started(parser, arguments, course)
    elif [program, *arguments[:1]] == ["accelerate", "launch"]:
        parser = importlib.import_module("accelerate.commands.launch").launch_command_parser()
        hold_started(parser, arguments[1:], course)
    elif program == "diff":  # both files are there, and they differ
        done = run(*words, cwd=course)
        assert done.returncode == 1, done.stdout
    elif program == "kill":
        (signal,) = arguments
        assert run("bash", "-c", f"kill -l {signal[1:]}", cwd=course).returncode == 0, command
    elif program.endswith(".sh"):
        hold_script(program, arguments, course)
    else:
        raise AssertionError(f"{command}: who takes this? See tests/commands.py")


def is_read(name):
    """Return whether the course or a library reads a variable of the environment."""
    files = [*ROOT.glob("day*/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("scripts/**/*.sh")]
    word = re.compile(rf"\b{name}\b")
    return name in READ_BY_OTHERS or any(word.search(file.read_text()) for file in files)


def run(*command, cwd, **env):
    """Run a command to its end; return what subprocess.run does, all output in .stdout."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def hold_python(arguments, course):
    """Hold what stands after python."""
    while arguments[0] in ("-u", "-X"):
        assert arguments[0] == "-u" or arguments[1] == "faulthandler", arguments
        arguments = arguments[1 if arguments[0] == "-u" else 2 :]
    hold_file(course / arguments[0], arguments[1:], course)


def hold_started(parser, arguments, course):
    """Hold what stands after torchrun, or another that starts a Python file on several ranks."""
    with accepted(arguments):
        known = parser.parse_args(arguments)
    hold_file(course / known.training_script, known.training_script_args, course)


@contextlib.contextmanager
def accepted(arguments):
    """Turn the end of a program, and what it says, into an AssertionError."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            yield
    except SystemExit as end:
        raise AssertionError(f"{arguments}: {end.code} {said.getvalue()}") from None


def hold_file(file, arguments, course, ranks=4):
    """Have a Python file of the course read its arguments."""
    assert file.is_file(), f"there is no {file.relative_to(course)}"
    if file.name == "benchmark.py":  # it looks at the names of its cases after it has parsed
        arguments = [*arguments, "--list"]
    variables = ALONE | {"WORLD_SIZE": str(ranks)}
    with (
        contextlib.chdir(course),
        mock.patch.object(sys, "path", [str(file.parent), *sys.path]),
        mock.patch.object(sys, "argv", [str(file), *arguments]),
        mock.patch.dict(os.environ, variables),
        accepted(arguments),
    ):
        module = load(file)
        if file.name == "check.py":
            manifest = tomllib.loads((course / "scripts" / "exercises.toml").read_text())
            module.parse_args({exercise["id"]: exercise for exercise in manifest["exercise"]})
        elif hasattr(module, "parse_args") and not inspect.signature(module.parse_args).parameters:
            module.parse_args()
        elif "--list" in arguments:
            assert module.main() == 0
        elif "argparse" in vars(module):
            with stop_when_parsed():
                module.main()
        else:
            assert "sys.argv" not in file.read_text(), f"who reads the arguments of {file.name}?"
            assert not arguments, f"{file.name} takes no arguments"


@contextlib.contextmanager
def stop_when_parsed():
    """End what stands below as soon as argparse has read the arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *arguments):
        parse(parser, *arguments)
        raise ParsedError

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        try:
            yield
        except ParsedError:
            return
    raise AssertionError("it has not read its arguments")


def hold_script(program, arguments, course):
    """Hold a shell script of the course."""
    name = Path(program).name
    script = course / ("scripts" if program == name else "") / program
    assert os.access(script, os.X_OK), f"there is no {program}"
    if not arguments and name != "run_course.sh":  # as in a sentence: does it say what it is?
        done = run(script, "--help", cwd=course)
        assert (done.returncode, "Usage: " in done.stdout) == (0, True), done.stdout
    elif name == "multinode_setup_and_run.sh":
        where = () if "--local" in arguments else ("--local", "2")
        done = run(script, "--dry-run", *where, *arguments, cwd=course)
        assert done.returncode == 0, done.stdout
        ranks = int(re.search(r", in all: (\d+)$", done.stdout, re.M)[1])
        python, _, file, *rest = shlex.split(done.stdout.splitlines()[-1])
        assert python == sys.executable
        hold_file(Path(file), rest, course, ranks)
    elif name == "run_course.sh":
        done = run(script, *arguments, "--list", cwd=course)
        assert done.returncode == 0, done.stdout
    elif name == "run_tests.sh":  # where there is no such Python it stops after its options
        options = list(arguments)
        if "--python" in options:
            options[options.index("--python") + 1] = "no-such-python"
        else:
            options = ["--python", "no-such-python", *options]
        done = run(script, *options, cwd=course)
        assert done.stdout.startswith("There is no no-such-python here."), done.stdout
        said = run(script, "--help", cwd=course).stdout
        for word in arguments:
            assert not word.startswith("-") or re.search(rf"(?<!\S){word}(?!\S)", said), word
    elif name == "sweep.sh":  # it passes them on
        hold_file(course / LESSONS["8"]["file"], arguments, course)
    elif name == "doctor.sh":  # with a Python that runs no checks
        stub = course / "no checks" / "sitecustomize.py"
        stub.parent.mkdir(exist_ok=True)
        stub.write_text("import os, sys\nif '-u' in sys.orig_argv:\n    os._exit(0)\n")
        done = run(script, *arguments, cwd=course, PYTHONPATH=stub.parent)
        assert done.returncode == 0, done.stdout
        assert "nodes: " in done.stdout
    elif name == "build.sh":  # where there is no npm it stops after it has read its options
        tools = course / "only dirname"
        tools.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (tools / "dirname").symlink_to("/usr/bin/dirname")
        done = run("/bin/bash", script, *arguments, cwd=course, PATH=tools)
        assert done.stdout.startswith("There is no npm here."), done.stdout
    else:
        raise AssertionError(f"{program} {arguments}: who takes this? See tests/commands.py")
