"""The helper of these tests sees what a job leaves behind."""

import sys
from pathlib import Path

import pytest
from catalogue import OWN_MEMORY, Job
from helpers import cannot

UNTIDY = """
import pathlib, socket, subprocess, sys, tempfile
pathlib.Path("/dev/shm/segment").touch()
pathlib.Path("snapshot.123").touch()
pathlib.Path(tempfile.gettempdir(), "something").touch()
pathlib.Path("~/something").expanduser().touch()
server = socket.create_server(("127.0.0.1", 0))
subprocess.Popen(["sleep", "60"], pass_fds=[server.fileno()], start_new_session=True)
print("port", server.getsockname()[1], flush=True)
sys.exit("This is why.")
"""


def test_what_is_left_is_seen(tmp_path):
    if not OWN_MEMORY:
        cannot("needs the right to make a mount namespace")
    job = Job(sys.executable, "-c", UNTIDY, cwd=tmp_path)
    with pytest.raises(AssertionError, match="left behind: ") as error:
        job.check("untidy", "This is why", "", status=1)
    port = "".join(job.lines).split()[1]
    for what in ("half a file", "temporary something", "home/something", f"port {port}", "process"):
        assert what in str(error.value)
    assert "shared memory" in str(error.value)
    assert not Path("/dev/shm/segment").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('something else', flush=True); exit(1)", "do not say"),
        ("print('This is why', flush=True)", "exit status 0"),
    ],
)
def test_another_end_is_seen(code, words, tmp_path):
    job = Job(sys.executable, "-c", code, cwd=tmp_path)
    with pytest.raises(AssertionError, match=words):
        job.check("another", "This is why", "", status=1)
