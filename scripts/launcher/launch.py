"""Starts a lesson on all nodes of a Slurm allocation: a process, called rank, for each task that
you asked for (-n, --ntasks-per-node). If none: for each GPU, or without GPUs for each node.

Usage: scripts/multinode_setup_and_run.sh [option]... FILE [argument of FILE]...
  FILE           a path, the name of a lesson's file, or a lesson's number
  --local N[xM]  no Slurm: simulate N nodes with M ranks each (1) on this machine. Files of day1/
                 and day2/ run in copies (forks) of one process that has imported torch
  --torchrun     on each node one torchrun starts the ranks, instead of srun
  --max-restarts N  the same, and when a rank fails, all start again, at most N times; what the
                 ranks print on stderr goes to runs/torchrun/
  --dry-run      print what would be started

Inside an allocation:
  salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 \\
    --constraint gpu --gpus-per-node 4 --account="<acc_name>_g"
  scripts/multinode_setup_and_run.sh 9

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and LOCAL_WORLD_SIZE.
What you set yourself stays: MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS, GLOO_SOCKET_IFNAME,
NCCL_SOCKET_IFNAME, PYTHON. PYTHON may be a script that starts it in a container: day2/SITES.md.
DIST_TIMEOUT is how many seconds a lesson's rank waits for the others, and for its data (60; lesson
13: 300). Other scripts do not read it: theirs is the timeout that they give init_process_group.
Exit status 69, or 1 with --torchrun: this machine or PyTorch cannot run the lesson, which says why.
Exit status 75: told to stop, the script has saved its state; the same command resumes from there.
"""

import argparse
import glob
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages beside this one

from launcher import rank, simulated_nodes, slurm
from launcher.srun_options import in_a_step

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/multinode_setup_and_run.sh"
NOT_IN_A_JOB = """This is not inside a Slurm allocation. Get one:
  salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 \
--constraint gpu --gpus-per-node 4 --account="<acc_name>_g"
or simulate two nodes on this machine:
  scripts/multinode_setup_and_run.sh --local 2x2 """
IN_A_STEP = """srun started this script, but it calls srun itself. Start it without srun, from the \
shell of the allocation: scripts/multinode_setup_and_run.sh """


class Parser(argparse.ArgumentParser):
    """A parser whose help is the text above, and whose errors are one line."""

    def format_help(self) -> str:
        return __doc__

    def error(self, message: str) -> NoReturn:
        sys.exit(message.replace("argument ", ""))


def nodes_and_ranks(text: str) -> tuple[int, int]:
    """Return the numbers of N or NxM."""
    if not re.fullmatch("[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})?", text):
        raise argparse.ArgumentTypeError("must be N or NxM, such as 2x4: nodes, and ranks on each")
    nodes, _, each = text.partition("x")
    if int(nodes) * int(each or 1) > 1000:
        raise argparse.ArgumentTypeError("more than 1000 ranks are too many for one machine")
    return int(nodes), int(each or 1)


def parse_args(words: list[str]) -> argparse.Namespace:
    """Return the options; .command is FILE and its arguments, as they were typed."""
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--local", type=nodes_and_ranks)
    parser.add_argument("--max-restarts", type=int)
    # The last two: what the launcher lets srun start, a task, and what tells it about a node.
    for flag in ("--torchrun", "--dry-run", "--as-task", "--as-probe"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"There is no option {unknown[0]}. See {SCRIPT} --help")
    if not options.command and not options.as_probe:
        parser.error(f"Name a lesson, for example: {SCRIPT} 9. See --help")
    if options.max_restarts and options.max_restarts < 0:
        parser.error("--max-restarts: must be 0 or more")
    options.torchrun = options.torchrun or options.max_restarts is not None
    return options


def find_file(name: str) -> str:
    """Return the path of what the user has named: a file, or a lesson by its name or number."""
    places = [name]
    for pattern in ("{}", "{}.py", "{}_*.py"):
        places += sorted(glob.glob(str(ROOT / "day*" / pattern.format(glob.escape(name)))))
    for place in places:
        if os.path.isfile(place):
            return os.path.realpath(place)
    words = "To see all lessons: scripts/run_course.sh --list"
    sys.exit(f"There is no lesson and no file '{name}'. {words}")


def main() -> int | None:
    options = parse_args(sys.argv[1:])
    if options.as_probe:
        return slurm.print_probe()
    limit = os.environ.get("DIST_TIMEOUT", "60")
    if not limit.isdecimal() or not 0 < int(limit) < 2**31:
        sys.exit(f"DIST_TIMEOUT is {limit}, not a number of seconds")
    wanted = options.command[0]
    options.command[0] = find_file(wanted)
    if options.as_task:
        return rank.run_task(options)
    if options.local:
        return simulated_nodes.simulate(options)
    if "SLURM_JOB_ID" not in os.environ:
        sys.exit(NOT_IN_A_JOB + wanted)
    if in_a_step(os.environ) and not os.isatty(0):  # not for a person in a shell of srun --pty
        sys.exit(IN_A_STEP + wanted)
    return slurm.run_on_nodes(options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was started
        sys.exit(130)
