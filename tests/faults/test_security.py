"""What could be turned against the person who runs the course."""

import ast
import hashlib
import os
import re
from pathlib import Path

from catalogue import local
from helpers import ROOT

CODE = [*ROOT.glob("day*/**/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("slides/**/*.py")]
CODE = [file for file in CODE if "node_modules" not in file.parts]


def calls(file):
    """Yield (name as written, call) of the calls in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keywords(call):
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def test_nothing_that_is_loaded_can_run_code():
    """A snapshot, a table or a trace may come from somebody else."""
    for file in CODE:
        for name, call in calls(file):
            if name == "torch.load":
                assert keywords(call).get("weights_only") == "True", file
            assert name not in ("pickle.load", "joblib.load"), file
            if name == "pickle.loads":  # only what was made in the same breath
                assert ast.unparse(call.args[0]).startswith("pickle.dumps("), file
            if name in ("np.load", "numpy.load"):
                assert "allow_pickle" not in keywords(call), file


def test_no_text_becomes_a_command():
    for file in CODE:
        for name, call in calls(file):
            assert keywords(call).get("shell", "False") == "False", file
            assert name not in ("os.system", "os.popen", "eval"), f"{file}: {name}"
            # Exercises are run as they are written, by the person who writes them.
            assert name != "exec" or file.name == "check.py", file
    for file in ROOT.glob("scripts/*.sh"):
        assert not re.search(r"(?<![\w.$-])eval\b(?!\()", file.read_text()), file


def test_the_archives_are_those_of_the_data_set():
    """The lessons compare with torchvision's list, scripts/doctor.py with its own."""
    from torchvision.datasets import MNIST

    listed = dict(re.findall(r'"(\S+-ubyte\.gz)": "(\w{32})"', read("scripts/doctor.py")))
    assert listed == dict(MNIST.resources)
    for name, md5 in listed.items():
        content = (ROOT / "data" / "MNIST" / "raw" / name).read_bytes()
        assert hashlib.md5(content, usedforsecurity=False).hexdigest() == md5
    # Whoever unpacks has compared, line by line before it.
    for file in ROOT.glob("day*/*.py"):
        text = file.read_text()
        assert text.count("utils.extract_archive(") == text.count("if not utils.check_integrity(")


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
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
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


def test_pages_are_served_to_this_machine_only():
    for file in [*ROOT.glob("scripts/*.py"), *ROOT.glob("slides/**/*.py")]:
        for name, call in calls(file):
            if name.endswith(("HTTPServer", "TCPServer", "create_server")):
                where = ast.unparse(call.args[0])
                # scripts/doctor.py meets where the ranks will, with a word that only they know.
                assert "127.0.0.1" in where or file.name == "doctor.py", f"{file}: {where}"
