"""Starts the ranks of simulated nodes, waits for them, and tells the launcher which failed first.

Files of the course are run by forks of this process, which imports torch once for all. Any other
command is started by itself: it may count on torch not being imported yet.

It needs only the standard library, and torch only if the ranks do.
"""

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages beside this one

from launcher.failures import NO_FAILURE, as_a_shell, ending, write_stderr

COURSE = [Path(__file__).resolve().parents[2] / day for day in ("day1", "day2")]
LAST_WORDS = 1.5  # seconds in which the others usually end by themselves, and may say why
PR_SET_PDEATHSIG = 1  # Linux's number, see prctl(2)


def imports(file: str) -> Iterator[str]:
    """Yield the modules of torch and torchvision that a file imports at its top, or will later."""
    text = Path(file).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            yield from (found.name for found in node.names if found.name.startswith("torch"))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            yield node.module
    if "torch.optim" in text:
        yield "torch._dynamo"  # the first optimizer does, and it takes as long as torch itself


def end_with_parent(number: int) -> None:
    """Have Linux send this process a signal when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def be_rank(file: str, arguments: list[str], variables: dict[str, str]) -> None:
    """Run a file as `python -u` would, in this process, and end it."""
    os.environ.update(variables)
    Path("/proc/self/comm").write_text(f"rank {variables['RANK']}")  # its name in ps and top
    del sys.path[:2]  # this file's folder, and scripts/
    status = run_file(file, arguments)
    # As Python ends, but it would also take apart all that was imported, in every rank. That lasts
    # nearly as long as the import.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def run_file(file: str, arguments: list[str]) -> int:
    """Run a file as the main module; return its status. A traceback begins in this file."""
    sys.argv[:] = [file, *arguments]
    sys.path.insert(0, os.path.dirname(file))
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != file:  # what led to the file
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            return as_a_shell(-signal.SIGINT)
    else:
        return 0
    return 1


def keep_store(listener: int) -> None:
    """Keep the store in which the ranks meet, at a listening socket, until this process is killed.

    A rank would open it on all addresses of the machine, where everybody on its network could join.
    """
    with contextlib.suppress(ImportError):  # the ranks need none, or say that torch is missing
        from torch.distributed import TCPStore

        at = {"use_libuv": False, "master_listen_fd": listener}
        _store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, **at)
        signal.pause()


def start(command: list[str], variables: dict[str, str], forked: bool) -> int:
    """Start a rank; return its process id. The rank never returns."""
    with warnings.catch_warnings(action="ignore"):  # of threads: an import leaves none busy
        pid = os.fork()
    if pid == 0:
        end_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not forked:
            os.execve(command[0], command, os.environ | variables)
        be_rank(command[2], command[3:], variables)
    return pid


def wait_for_all(running: dict[int, str]) -> int:
    """Wait until all ranks have ended or one has failed, and tell. Return its status, or 0."""
    status = 0
    while running and not status:
        pid, raw = os.wait()
        if pid in running:  # it is no rank: the store
            name, status = running.pop(pid), os.waitstatus_to_exitcode(raw)
    if not status:
        return 0
    write_stderr(f"launcher: {time.time():.6f} {name} ended with {ending(status)}\n")
    time.sleep(LAST_WORDS)
    with contextlib.suppress(ChildProcessError):  # there is none any more
        pid = -1
        while pid:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            running.pop(pid, None)
    for name in running.values() if status not in NO_FAILURE else []:  # it hangs, or is busy
        write_stderr(f"Still running: {name}.\n")
    return as_a_shell(status)


def main() -> int:
    """Start the ranks of stdin, {name: [command, variables]}. Return the first failure's status.

    The argument is an open socket for the store, if there is to be one.
    """
    end_with_parent(signal.SIGKILL)
    ranks = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    file = next(iter(ranks.values()))[0][2]
    forked = Path(file).parent in COURSE  # not torchrun's file
    if forked:
        with contextlib.suppress(ImportError, SyntaxError):  # the ranks say it
            for name in imports(file):
                importlib.import_module(name)
        gc.freeze()  # no rank looks through all that was imported again
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when all ranks have ended
    store = None
    for listener in map(int, sys.argv[1:]):
        store = os.fork()
        if store == 0:
            end_with_parent(signal.SIGKILL)
            return keep_store(listener)
        os.close(listener)
    status = wait_for_all({start(*ranks[name], forked): name for name in ranks})
    if store:
        with contextlib.suppress(ProcessLookupError):  # torch is missing
            os.kill(store, signal.SIGKILL)
    return status


if __name__ == "__main__":
    os._exit(main())  # as in be_rank
