"""Starts the ranks of simulated nodes, and tells the launcher when each of them has ended.

Files of the course are run by forks of this process, which imports torch once for all. Any other
command is started by itself: it may count on torch not being imported yet.

It needs only the standard library, and torch only if the ranks do.
"""

import ast
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

COURSE = [Path(__file__).resolve().parents[2] / day for day in ("day1", "day2")]
PR_SET_PDEATHSIG = 1  # Linux's number, see prctl(2)


def imports(file: str) -> Iterator[str]:
    """Yield the modules of torch and torchvision that a file imports at its top."""
    for node in ast.parse(Path(file).read_bytes()).body:
        if isinstance(node, ast.Import):
            yield from (found.name for found in node.names if found.name.startswith("torch"))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            yield node.module


def fork() -> int:
    """Fork. The child is killed when its parent ends, however that ends."""
    with warnings.catch_warnings(action="ignore"):  # of threads, which no import leaves busy
        pid = os.fork()
    if pid == 0 and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return pid


def be_rank(file: str, arguments: list[str], variables: dict[str, str]) -> None:
    """Run a file as `python -u` would, in this process."""

    def say_what_happened(kind, error, trace):  # without the frames that have led to the file
        while trace and trace.tb_frame.f_code.co_filename != file:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    sys.excepthook = say_what_happened
    os.environ.update(variables)
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(f"rank {variables['RANK']}")  # its name in ps and top
    sys.argv[:] = [file, *arguments]
    sys.path[0] = os.path.dirname(file)
    runpy.run_path(file, run_name="__main__")


def keep_store(listener: int) -> None:
    """Keep the store in which the ranks meet, at a listening socket, until this process is killed.

    A rank would open it on all addresses of the machine, where everybody on its network could join.
    """
    with contextlib.suppress(ImportError):  # the ranks need none, or say that torch is missing
        from torch.distributed import TCPStore

        at = {"use_libuv": False, "master_listen_fd": listener}
        _store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, **at)
        signal.pause()


def main() -> None:
    """Start ranks, of which stdin has a list of [command, its own variables].

    The arguments are open files: where to write "number status" for each rank that has ended, and
    perhaps the socket for the store.
    """
    ends, *listener = files = [int(word) for word in sys.argv[1:]]
    ranks = json.load(sys.stdin)
    _, _, file, *arguments = ranks[0][0]
    forked = Path(file).parent in COURSE  # not torchrun's file
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    if forked:
        with contextlib.suppress(ImportError, SyntaxError):  # the ranks say it
            for name in imports(file):
                importlib.import_module(name)
    on_term = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends after the ranks
    store = fork() if listener else None
    if store == 0:
        return keep_store(*listener)
    running = {}
    for number, (command, variables) in enumerate(ranks):
        pid = fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, on_term)
            for number in files:
                os.close(number)
            if forked:
                return be_rank(file, arguments, variables)
            os.execve(command[0], command, os.environ | variables)
        running[pid] = number
    while running:
        pid, status = os.wait()
        if pid == store:
            store = None
        else:
            said = f"{running.pop(pid)} {os.waitstatus_to_exitcode(status)}\n"
            os.write(ends, said.encode())
    if store:
        os.kill(store, signal.SIGKILL)


if __name__ == "__main__":
    main()
