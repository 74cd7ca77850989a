"""What could be turned against the person who runs the course."""

import ast
import hashlib
import os
import re
from pathlib import Path

import pytest
from catalogue import local
from helpers import ROOT, sockets
from mentions import keywords, mentions

CODE = [*ROOT.glob("day*/**/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("slides/**/*.py")]
CODE = [file for file in CODE if "node_modules" not in file.parts]
PICKLES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
# What reads a pickle although it does not look so, and where: a comment there must warn of it.
UNPICKLES = {"17_transformer_fsdp.py": "torch.distributed.checkpoint.load"}
WARNING = "# Load only what you trust: "


def runs_code(text):
    """Yield what in a Python text may run code that is in a file."""
    for name, call in mentions(text):
        module, _, function = name.rpartition(".")
        if is_pickle(module, function, call) or name.endswith(".*") or name == "?.load":
            wrong = True
        elif name in ("importlib.import_module", "__import__"):
            words = [x.value for x in call.args if isinstance(x, ast.Constant)] if call else []
            wrong = bool(set(words) & set(PICKLES))
        elif module.partition(".")[0] == "torch" and function == "load":
            wrong = keywords(call).get("weights_only") != "True"
        elif module == "numpy" and function == "load":
            wrong = not reads_numbers_only(call)
        else:
            wrong = function in ("read_pickle", "read_array") or name == "yaml.load"
        if wrong:
            yield name


def is_pickle(module, function, call):
    """Return whether a pickle is read that was not made in the same breath."""
    made = call and call.args and ast.unparse(call.args[0]).startswith("pickle.dumps(")
    reads = function.startswith(("load", "open")) or function == "Unpickler"
    return module.partition(".")[0] in PICKLES and reads and not (made and function == "loads")


def reads_numbers_only(call):
    """Return whether this is numpy's load, called with nothing that would let it read pickles."""
    given = keywords(call)
    plain = call and ast.unparse(call.func) in ("np.load", "numpy.load")
    options = {"allow_pickle", None} & given.keys()  # None: **options
    return bool(plain) and len(call.args) < 3 and not options  # the third would be allow_pickle


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch.load(x)", "torch.load"),
        ("import torch\ntorch.load(x, weights_only=False)", "torch.load"),
        ("import torch as t\nt.load(x, weights_only=weights)", "torch.load"),
        ("from torch import load\nload(x)", "torch.load"),
        ("from torch import load as read\nread(x)", "torch.load"),
        ("import torch\nread = torch.load\nread(x)", "torch.load"),
        ("import torch\nt = torch\nt.load(x)", "torch.load"),
        ("import torch\nattempt(torch.load, x)", "torch.load"),
        ("import torch\nmap(torch.load, files)", "torch.load"),
        ("import torch\nread = functools.partial(torch.load)", "torch.load"),
        ("import torch\ndef read(x, by=torch.load): by(x)", "torch.load"),
        ("import torch\ngetattr(torch, 'load')(x)", "torch.load"),
        ("import torch\ntorch.serialization.load(x)", "torch.serialization.load"),
        (
            "import torch.distributed.checkpoint as d\nd.load(x)",
            "torch.distributed.checkpoint.load",
        ),
        ("import torch\ntorch.load(x, **options)", "torch.load"),
        ("import pickle\npickle.load(x)", "pickle.load"),
        ("from pickle import loads\nloads(x)", "pickle.loads"),
        ("import pickle as p\nclass Reader(p.Unpickler): pass", "pickle.Unpickler"),
        ("import pickle\nread = pickle.loads", "pickle.loads"),
        ("from pickle import *", "pickle.*"),
        ("import importlib\nimportlib.import_module('pickle')", "importlib.import_module"),
        ("import joblib\njoblib.load(x)", "joblib.load"),
        ("import numpy as np\nnp.load(x, allow_pickle=True)", "numpy.load"),
        ("import numpy as np\nnp.load(x, None, True)", "numpy.load"),
        ("from numpy import load\nload(x, **options)", "numpy.load"),
        ("import numpy as np\nattempt(np.load, x)", "numpy.load"),
        ("import pandas\npandas.read_pickle(x)", "pandas.read_pickle"),
    ],
)
def test_what_can_run_code_is_seen_under_any_name(text, name):
    assert name in runs_code(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(x, weights_only=True)",
        "from torch import load\nload(x, weights_only=True)",
        "import torch\nattempt(torch.load, x, weights_only=True)",
        "import numpy as np\nnp.load(x, mmap_mode='r')",
        "import pickle\npickle.loads(pickle.dumps(x))",
        "import json\njson.load(x)",
        "import pickle\nexcept_for = pickle.UnpicklingError",
        "def load(x): pass\nload(x)",
        "model.load_state_dict(x)",
    ],
)
def test_what_runs_no_code_is_let_pass(text):
    assert list(runs_code(text)) == []


def test_nothing_that_is_loaded_can_run_code():
    """A snapshot, a table or a trace may come from somebody else."""
    found = {file.name: set(runs_code(file.read_text())) for file in CODE}
    assert {name: what for name, what in found.items() if what} == {
        name: {what} for name, what in UNPICKLES.items()
    }
    for file in CODE:
        assert (WARNING in file.read_text()) == (file.name in UNPICKLES), file


def makes_a_command(text):
    """Yield what in a Python text hands a text to a shell or to Python."""
    for name, call in mentions(text):
        if keywords(call).get("shell", "False") != "False":
            yield "shell"
        short = name.removeprefix("builtins.")
        if short in ("eval", "exec") or name.startswith(
            ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.")
        ):
            yield short


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import subprocess\nsubprocess.run(x, shell=True)", "shell"),
        ("from subprocess import run as go\ngo(x, shell=yes)", "shell"),
        ("import os\nos.system(x)", "os.system"),
        ("from os import system\nsystem(x)", "os.system"),
        ("import os\ndo = os.popen\ndo(x)", "os.popen"),
        ("import os\ngetattr(os, 'system')(x)", "os.system"),
        ("import subprocess\nsubprocess.getoutput(x)", "subprocess.getoutput"),
        ("map(eval, x)", "eval"),
        ("import builtins\nbuiltins.exec(x)", "exec"),
    ],
)
def test_a_text_that_becomes_a_command_is_seen_under_any_name(text, name):
    assert name in makes_a_command(text)


def test_no_text_becomes_a_command():
    for file in CODE:
        found = set(makes_a_command(file.read_text()))
        # Exercises are run as they are written, by the person who writes them.
        assert not found - ({"exec"} if file.name == "check.py" else set()), file
    scripts = list(ROOT.glob("scripts/**/*.sh"))
    assert scripts
    for file in scripts:
        assert not re.search(r"(?<![\w.$-])eval\b(?!\()", file.read_text()), file


def test_the_files_are_those_of_the_data_set():
    """The doctor compares them, and data/README.md shows the same list."""
    listed = dict(re.findall(r'"(\S+-ubyte)": "(\w{32})"', read("scripts/facts.py")))
    shown = dict(re.findall(r"^\| (\S+-ubyte) \|.*\| (\w{32}) \|$", read("data/README.md"), re.M))
    assert listed == shown
    files = sorted(ROOT.glob("data/MNIST/raw/*"))
    assert [file.name for file in files] == sorted(listed)
    for file in files:
        content = file.read_bytes()
        assert hashlib.md5(content, usedforsecurity=False).hexdigest() == listed[file.name]


def read(name):
    return (ROOT / name).read_text()


def addresses(job):
    """Return the addresses on which the processes of a job listen."""
    inodes = set()
    for pid in job.processes():
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"^socket:\[(\d+)\]", os.readlink(file)))
            except OSError:
                continue
    found = []
    for fields in sockets():
        if fields[3] == "0A" and fields[9] in inodes:
            found.append(fields[1].partition(":")[0])
    return found


HERE = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}
EVERYWHERE = {"0" * 8, "0" * 32}


def test_ranks_listen_on_the_interface_that_the_launcher_names(tmp_path):
    """All but one port: PyTorch's TCPStore, the meeting point, listens on all addresses."""
    job = local("2", "9", cwd=tmp_path)
    job.until("1 MB:")
    found = addresses(job)
    job.end()
    assert [x for x in found if x in HERE]
    assert len([x for x in found if x in EVERYWHERE]) == 1
    assert set(found) <= HERE | EVERYWHERE


def listens_at(text):
    """Yield (full name, where) of what opens a port in a Python text, as it is written there."""
    for name, call in mentions(text):
        if call and name.endswith(("HTTPServer", "TCPServer", "create_server", ".bind")):
            yield name, ast.unparse(call.args[0]) if call.args else ""


@pytest.mark.parametrize(
    "text",
    [
        "import http.server as h\nh.ThreadingHTTPServer(('', 80), x)",
        "from http.server import HTTPServer as S\nS(('', 80), x)",
        "import socket\nsocket.create_server(('', 80))",
        "import socket\ns = socket.socket()\ns.bind(('', 80))",
        "import http.server as h\nclass S(h.HTTPServer): pass\nS(('', 80), x)",
    ],
)
def test_an_open_port_is_seen_under_any_name(text):
    assert "('', 80)" in [where for _, where in listens_at(text)]


def test_pages_are_served_to_this_machine_only():
    served = set()
    for file in [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("slides/**/*.py")]:
        text = file.read_text()
        for name, where in listens_at(text):
            # scripts/doctor/doctor.py meets where the ranks will, with a word that only they know.
            # scripts/launcher/launch.py looks which port is free, and never listens there.
            looks = file.name == "launch.py" and name.endswith(".bind") and ".listen(" not in text
            known = file.name == "doctor.py" or looks
            assert "127.0.0.1" in where or known, f"{file}: {name} {where}"
            served.add(file.name)
    assert "view_traces.py" in served
