"""Commands of the text: each is given to the parser of its program, and none is carried out."""

import argparse
import contextlib
import functools
import io
import itertools
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

from launcher import launch
from support.run import ALONE, ROOT
from torch.distributed.run import get_args_parser

# What a reader has written, or a copy of a lesson.
OWN = {"train.py", "hang.py", "runs/silent.py", "runs/all_threads.py", "job.sh", "sweep.sh"}
OWN |= {"runs/libraries.py", "runs/memory.py", "library.py"}
FENCE = re.compile(r"^ *```(\w*)[^\n`]*\n(.*?)^ *```$", re.M | re.S)
OURS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python |torchrun |\S*\.sh\b)")


class ParsedError(BaseException):
    """The arguments are read; the program stops here."""


def commands_in(text):
    """Return the commands of a page: those of its fences, and of our programs in its sentences."""
    found = []
    for kind, body in FENCE.findall(text):
        lines = re.sub(r"\\\n *", "", body).splitlines()
        lines = [re.sub(r"\s{2,}#.*", "", line.strip()) for line in lines]
        if kind == "bash":
            found += filter(None, lines)
        elif kind == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
    return found + list(filter(OURS.match, re.findall(r"`([^`\n]+)`", FENCE.sub("", text))))


def check(command):
    """Assert that the programs named in a command are there and take what it gives them."""
    command = re.sub(r"<[^<>]*>", "1", command)  # a word of the reader's own
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    for is_operator, words in itertools.groupby(lexer, lambda word: set(word) <= set("|&;")):
        if not is_operator:
            words = itertools.takewhile(lambda word: set(word) - set("<>"), words)
            check_program([*itertools.dropwhile(re.compile(r"\w+=").match, words)])


def check_program(words):
    program, *arguments = words or ["cd"]
    if program in OWN or arguments == ["--help"]:
        return
    if program.endswith(".sh"):
        check_script(program, arguments)
    elif program == "python":
        arguments = arguments[arguments[:1] == ["-u"] :]
        if arguments and not arguments[0].startswith("-"):
            parse(arguments[0], tuple(arguments[1:]))
    elif program == "torchrun":
        with refusals_are_failures():
            known = get_args_parser().parse_args(arguments)
        parse(known.training_script, tuple(known.training_script_args))
    else:  # a program of others: its options are not checked, but files of the course that it gets
        ours = [i for i, word in enumerate(arguments) if word.endswith(".sh")]
        if ours:
            check_program(arguments[ours[0] :])
        for word in arguments:
            if re.match(r"(day\d|scripts|slides|tests)/", word):
                assert (ROOT / word).exists(), f"there is no {word}"


def check_script(program, arguments):
    script = ROOT / ("" if "/" in program else "scripts") / program
    assert os.access(script, os.X_OK), f"there is no {program}"
    if script.name not in ("multinode_setup_and_run.sh", "sbatch_run.sh"):
        for word in arguments:
            known = not word.startswith("--") or re.search(rf"(?<![\w-]){word}\b", help_of(script))
            assert known, f"{script.name} knows no {word}"
        return
    # --doctor is sbatch_run.sh's own. A sentence may name a script alone, without a lesson.
    arguments = [word for word in arguments if word != "--doctor"] or ["9"]
    with refusals_are_failures():
        name, *rest = launch.parse_args(arguments).command
        file = name if name in OWN else launch.find_file(name)
    parse(file, tuple(rest))


@functools.cache
def help_of(script):
    return subprocess.check_output([script, "--help"], cwd=ROOT, text=True, timeout=200)


@contextlib.contextmanager
def refusals_are_failures():
    """Turn the end of a program, and what it says, into an AssertionError."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            yield
        except SystemExit as end:
            raise AssertionError(f"{end.code}: {said.getvalue()}") from None


@functools.cache
def parse(name, arguments):
    """Have a Python file read its arguments, and no more; data need not be there."""
    if name in OWN:
        return
    file = ROOT / name
    assert file.is_file(), f"there is no {name}"
    if "argparse" not in file.read_text():
        assert not arguments, f"{name} takes no arguments"
        return
    original = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *given):
        original(parser, *given)
        raise ParsedError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(sys, "argv", [str(file), *arguments]),
        mock.patch.object(sys, "path", [str(file.parent), *sys.path]),
        mock.patch.object(signal, "signal"),
        mock.patch.dict(os.environ, ALONE | {"WORLD_SIZE": "4"}),
        refusals_are_failures(),
        contextlib.suppress(ParsedError),
    ):
        runpy.run_path(str(file), run_name="__main__")
        raise AssertionError(f"{Path(name).name} has not read its arguments")
