"""The text: each command can be typed, each symptom is really seen, each link leads somewhere."""

import ast
import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boxes
import pytest
import torch
from clusters import need_slurm
from commands import hold, is_read, stock
from helpers import (
    LESSONS,
    ROOT,
    agenda,
    cannot,
    copy_tree,
    need,
    processes_of,
    proves,
    wait_for,
    works,
)
from course.lists import read_days, read_pages
from docs.pages import parts_of
from ranks import run_ranks

GLOBS = ("*.md", "*/*.md", "*/exercises/*.md", "*/faults/*.md")
PAGES = [page for glob in GLOBS for page in sorted(ROOT.glob(glob))]
PAGES = [page for page in PAGES if not page.with_suffix(".pdf").exists()]
CHEAT_SHEET = ROOT / "day1" / "CHEATSHEET.md"
RENTED = ROOT / "day1" / "RENTED.md"
# A slide says after the kind which lines it highlights: ```console {2}
FENCE = re.compile(r"^ *```(\w*)[^\n`]*\n(.*?)^ *```$", re.M | re.S)
# Code within a sentence that is a command.
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S* )?(?:\S*\.sh\b|nvidia-smi$|(?:apt-get|cd|df|diff|du|export|find|git|ip|kill|"
    r"killall|module|pgrep|pip|pre-commit|py-spy|python|salloc|sbatch|scancel|scontrol|scp|sinfo|"
    r"source|squeue|srun|ssh|tensorboard|tmux|torchfrtrace|torchrun|unset) (?!'torch' has))"
)
# As after source .venv/bin/activate, and with no trace of the tests.
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_"))}
ENV |= {"PATH": f"{Path(sys.executable).parent}:{ENV['PATH']}", "USER": ENV.get("USER", "root")}


# Each command of the text, and how it is held.

# Typed here, in this order, in a copy of the repository: {command: what it must say}.
QUICK = {
    "./scripts/run_course.sh --list": "day1/0_torch_dist.py",
    "python scripts/check.py": "day1/exercises/4.1_more_ranks_worse.py",
    "python scripts/update_docs.py": "",
    "scripts/multinode_setup_and_run.sh --local 2x2 --dry-run 9": "day2/9_torch_dist_multi_node.py",
    "diff day1/exercises/4.1_more_ranks_worse.py day1/exercises/solutions/": "<",
    "diff day2/exercises/10.1_another_accuracy.py day2/exercises/solutions/": "<",
    "git status": "modified:   day1/0_torch_dist.py",
    "git diff": "+# changed",
    "git checkout day1/4_mnist_manual_ddp.py": "",
    "git checkout day1/6_mnist_ddp_pt.py": "",
    "git checkout day1/test-profile.py": "",
    "git checkout day1/exercises/4.1_more_ranks_worse.py": "",
    "git checkout day2/exercises/10.1_another_accuracy.py": "",
    "git checkout data/MNIST": "",
    "git clone <address of this repository> course": "",
    "cd course": "",
    "source .venv/bin/activate": "",
    "source <folder of the instructor>/course/.venv/bin/activate": "",
    "mkdir -m 1777 <shared folder>": "",
    "du -sh .venv": ".venv",
    "find .venv -type f": ".venv/bin/activate",
    "df -h .": "Avail",
    "df -h . /tmp": "Avail",
    "df -h /dev/shm": "Avail",
    "pgrep -u $(id -un) -af python": "python",
    "kill <pid>": "",
    "kill -9 <pid>": "",
    "kill -ABRT <pid>": "",
    "export DIST_TIMEOUT=300": "",
    "export GLOO_SOCKET_IFNAME=eth0": "",
    "export LOCAL_SLURM_SETTINGS=LaunchParameters=use_interactive_step": "",
    "export NCCL_DEBUG=INFO": "",
    "export NCCL_SOCKET_IFNAME=en": "",
    "export NCCL_SOCKET_IFNAME=eth0": "",
    "export NCCL_SOCKET_IFNAME=^docker,lo,virbr": "",
    "export OMP_NUM_THREADS=1": "",
    "export PIP_CACHE_DIR=<folder there>": "",
    "export PIP_CACHE_DIR=<folder on the large disk>": "",
    "export PIP_NO_CACHE_DIR=1": "",
    "export TMPDIR=<folder there>": "",
    "unset GLOO_SOCKET_IFNAME": "",
    "unset KINETO_LOG_LEVEL": "",
    "unset MASTER_PORT": "",
}
# Typed here too. They take seconds.
SLOW = {
    "TORCH_DISTRIBUTED_DEBUG=DETAIL python day1/exercises/0.2_waits_for_ever.py": (
        "[Rank 0]: Ranks 1, 2, 3 failed to pass monitoredBarrier in 2000 ms"
    ),
    "python -X importtime -c 'import torch'": "| torch\n",
    "python -c 'import torch; print(torch.__version__)'": ".",
    "python -c 'import torch.distributed.constants as c; "
    "print(c.default_pg_timeout, c.default_pg_nccl_timeout)'": "0:30:00 0:10:00",
}
SALLOC = (
    "salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=<acc_name>_g"
)
# Typed on a local Slurm cluster, in this order: on the login side, ...
ON_LOGIN = {
    "sinfo": "main",
    "scontrol show node": "ActiveFeatures=gpu",
    SALLOC: "Granted job allocation",
    "salloc --nodes 1 --qos interactive --time 02:00:00 --constraint gpu --gpus-per-node 4 "
    "--account=<acc_name>_g": "Granted job allocation",
    "salloc --nodes 1 --qos interactive --time 04:00:00 --ntasks-per-node=1 --cpus-per-task=128 "
    "--constraint gpu --gpus-per-node 4 --account=<acc_name>_g": "Granted job allocation",
    "salloc --nodes 1 --qos interactive --time 04:00:00 --ntasks-per-node=1 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 1 --account=<acc_name>_g": "Granted job allocation",
    "salloc --nodes 1 --qos interactive --time 04:00:00 --ntasks-per-node=1 --cpus-per-task=8 "
    "--account=<acc_name>": "Granted job allocation",
    "scontrol create reservation ReservationName=course StartTime=<begin> Duration=08:00:00 "
    "NodeCnt=<nodes> Users=<users>": "Reservation created: course",
    "scontrol show reservation": "ReservationName=course",
    "salloc --reservation=course --nodes 2 --time 03:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=<acc_name>_g": "Granted job allocation",
    "squeue --reservation=course": "JOBID",
    "sbatch -N 2 --ntasks-per-node=4 --cpus-per-task=32 -C gpu --gpus-per-node 4 -t 30 "
    "-A <acc_name>_g scripts/sbatch_run.sh 9": "Submitted batch job",
    "sbatch -N 2 --ntasks-per-node=4 --cpus-per-task=32 -C gpu --gpus-per-node 4 -t 30 "
    "-A <acc_name>_g scripts/sbatch_run.sh 10": "Submitted batch job",
    "sbatch scripts/sweep.sh": "Submitted batch job",
    "sbatch --array=3 scripts/sweep.sh": "Submitted batch job",
    "sbatch scripts/sbatch_run.sh": "Submitted batch job",
    "sbatch scripts/sbatch_run.sh --doctor 10": "Submitted batch job",
    "sbatch scripts/sbatch_run.sh --torchrun 12 --epochs 3": "Submitted batch job",
    "sbatch scripts/sbatch_run.sh 12 --epochs 20": "Submitted batch job",
    "sbatch --nodes 1 --time 01:00:00 --signal=B:USR1@300 scripts/sbatch_run.sh 12 "
    "--epochs 3": "Submitted batch job",
    "scontrol show config": "proctrack/linuxproc",
    "scontrol show job <job>": "JobState=",
    "scancel <job>": "",
}
# ... and in the shell that the line for two nodes opens, which starts 2 ranks there, not 8.
IN_JOB = {
    "hostname": "",
    "srun hostname": "node2",
    "srun --pty bash": "on node1",
    "srun --pty -N1 -n1 --cpus-per-task=32 bash": "on node1",
    "srun getent hosts node1": "node1",
    "srun ip -brief address": "eth0",
    "ip -brief address": "lo",
    "squeue --me": "node[1-2]",
    "scripts/multinode_setup_and_run.sh train.py": "epoch 2: loss",
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)': "",
    "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))": "",
    "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS "
    "exec python train.py'": "epoch 2: loss",
    "scontrol show hostnames": "node1\nnode2",
    "exit": "",
}
# Typed with a cluster of its own, in this order.
ON_CLUSTER = {
    "scripts/local_slurm.sh up 2": "",
    "scripts/local_slurm.sh link 1gbit 0.2ms": "",
    "scripts/local_slurm.sh link 1gbit": "",
    "scripts/local_slurm.sh link 100mbit": "",
    "scripts/local_slurm.sh link off": "",
    "scripts/local_slurm.sh shell": "",
    "scripts/local_slurm.sh down": "",
}
# Typed by a test that takes them from here: {test: commands}.
BY_TEST = {
    "test_tensorboard_starts": [
        "tensorboard --logdir runs",
        "tensorboard --logdir=./log_ddp",
    ],
    "test_a_hang_on_several_nodes_can_be_read": [
        "export CUDA_VISIBLE_DEVICES=-1",
        "sed 's/^    dist.all_reduce(value/    dist.get_rank() == 1 or dist.all_reduce(value/' "
        "day2/9_torch_dist_multi_node.py > hang.py",
        "DIST_TIMEOUT=10 scripts/multinode_setup_and_run.sh --local 3 hang.py",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL scripts/multinode_setup_and_run.sh --local 3 hang.py",
        "PYTHONFAULTHANDLER=1 scripts/multinode_setup_and_run.sh --local 3 hang.py",
        "pgrep -u $(id -un) -af hang.py",
        "DIST_TIMEOUT=10",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    ],
    "test_a_silent_fault_stops_all_ranks": [
        "sed 's/model(images), labels/model.module(images), labels/' day2/13_mnist_ddp_recipe.py "
        "> silent.py",
        "scripts/multinode_setup_and_run.sh --local 3 silent.py --data-dir data --check-every 10",
    ],
    "test_a_batch_job_can_be_followed_signaled_and_put_back": [
        "tail -f logs/slurm-<job>.out",
        "scancel --batch --signal=USR1 <job>",
        "scontrol requeue <job>",
    ],
    "test_a_key_is_made_and_its_public_file_shown": [
        "ssh-keygen -t ed25519",
        "cat ~/.ssh/id_ed25519.pub",
    ],
    "test_output_comes_late_unless_told_otherwise": [
        "python -u",
        "print(..., flush=True)",
        "PYTHONUNBUFFERED=1",
    ],
    "test_the_variables_act": [
        "OMP_NUM_THREADS=1",
        "GLOO_SOCKET_IFNAME=eth0",
        "TORCH_CPP_LOG_LEVEL=INFO",
    ],
}
# Run by continuous integration on every change: .ci/run holds them.
BY_CI = [
    "./scripts/run_tests.sh",
    "./scripts/run_tests.sh --torch 2.6.0",
    "tests/bare.sh",
    "scripts/local_slurm.sh install",
    "pip install --requirement .ci/requirements.txt",
    "pre-commit run --all-files",
    "apt-get install chromium nodejs npm fonts-dejavu-core fonts-liberation",
]
# Not run by a test, and no parser here takes them: {what it needs: commands}.
NEEDS = {
    "an NVIDIA GPU, or several": [
        "nvidia-smi",
        "CUDA_VISIBLE_DEVICES=0",
        "NCCL_DEBUG=INFO",
        "NCCL_SOCKET_IFNAME=eth0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE=flight/rank_",
        "torchfrtrace --prefix rank_ flight",
        "python -c 'import torch; print(torch.ones(1, device=\"cuda\") + 1)'",
        "mkdir flight",
        "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        "export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=flight/rank_",
    ],
    "a computing centre with modules": [
        "module load",
        "module load pytorch",
        "module avail pytorch",
        "module list",
    ],
    "another machine, reached by ssh": [
        "ssh -L",
        "ssh -L 6006:localhost:6006 <user>@<machine>",
        "scp -r <user>@<machine>:course/runs .",
        "tmux new -s course",
        "tmux attach -t course",
        "git pull",
        "sudo shutdown -h +120",
    ],
    "conda": [
        "conda env create --file scripts/environment.yml",
        "conda activate course",
    ],
    "py-spy, which the course does not install": [
        "pip install py-spy",
        "py-spy dump --subprocesses --pid <pid>",
        "py-spy dump --pid <pid>",
        "srun --overlap --jobid <job> --nodelist node2",
    ],
    "packages that the course does not install": [
        "pip install webdataset lmdb",
        "pip install aiohttp jinja2 tabulate",
    ],
    "nobody: the text only names it": ["killall python", "torchrun --help"],
}
# What stands for a word of the user's own.
WORDS = {
    "<acc_name>": "abc",
    "<address of this repository>": ".",
    "<folder of the instructor>": "folder",
    "<folder there>": "/tmp",
    "<folder on the large disk>": "/tmp",
    "<shared folder>": "shared",
    "<pid>": "$(sleep 60 >/dev/null & echo $!)",
    "<begin>": "now",
    "<nodes>": "2",
    "<users>": "root",
    "<user>": "me",
    "<machine>": "there",
    "<job>": "$(squeue --me --sort=-i -ho %i | head -n 1)",
}


def table(text, heading=None):
    """Return the rows, lists of cells, of all tables in a page, or in a part of it."""
    part = f"\n{text}"
    if heading:
        part = part.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line[2:-2].split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert rows, f"there is no table under {heading}"
    return rows


def code_in(text):
    return re.findall(r"`([^`\n]+)`", text)


def commands_in(page):
    """Return the commands of a page: of its fences, its cheat sheet and its sentences."""
    text, found = page.read_text(), []
    for kind, body in FENCE.findall(text):
        body = re.sub(r"\\\n *", "", body)  # a command that goes on in the next line
        lines = [re.sub(r"\s{2,}#.*", "", line.strip()) for line in body.splitlines()]
        if kind == "bash":
            found += filter(None, lines)
        elif kind == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
    found += filter(COMMAND.match, code_in(FENCE.sub("", text)))
    if page == CHEAT_SHEET:
        for row in table(text):
            found += code_in(row[0] if row[0].startswith("`") else row[-1])
    return found


@functools.cache
def functions_of(file):
    """Return {name: source} of the functions of a test file."""
    source = (ROOT / "tests" / file).read_text()
    lines = source.splitlines()
    return {
        x.name: "\n".join(lines[x.lineno - 1 : x.end_lineno])
        for x in ast.parse(source).body
        if isinstance(x, ast.FunctionDef)
    }


def strings_of_test(name):
    """Return all texts in the code of a test: not in its docstring, nor in its comments."""
    file, _, function = name.partition("::")
    assert function in functions_of(file), f"there is no {name}"
    node = ast.parse(functions_of(file)[function]).body[0]
    doc = node.body[0].value if ast.get_docstring(node) else None
    kinds = (ast.Constant, ast.JoinedStr)
    texts = [x for x in ast.walk(node) if isinstance(x, kinds) and x is not doc]
    return "\n".join(str(x.value) if isinstance(x, ast.Constant) else ast.unparse(x) for x in texts)


def run_lines():
    """Return the commands in the docstrings of the lessons; [processes] is 2 there."""
    texts = [ast.get_docstring(ast.parse(load_text(x))) for x in LESSONS.values()]
    lines = [re.search(r"^Run: +(.*)$", text, re.M)[1] for text in texts]
    return {re.sub(r"[\[\]]", "", line.replace("[processes]", "2")) for line in lines}


def load_text(lesson):
    return (ROOT / lesson["file"]).read_text()


DECKS = [ROOT / "slides" / name for name in ("day1.md", "day2.md")]
WRITTEN = {command for page in PAGES + DECKS for command in commands_in(page)} | run_lines()
TYPED = [QUICK, SLOW, ON_LOGIN, IN_JOB, ON_CLUSTER, *BY_TEST.values()]
TYPED = [command for group in TYPED for command in group]
NOT_RUN = [command for group in NEEDS.values() for command in group]
# All others are given to the parsers of the programs that they name.
PARSED = sorted(WRITTEN - {*TYPED, *BY_CI, *NOT_RUN})


def test_every_command_is_held():
    """Each is typed, or given to a parser, or run by continuous integration, or has a reason."""
    assert len(WRITTEN) > 100
    listed = [*TYPED, *BY_CI, *NOT_RUN]
    assert set(listed) - WRITTEN == set(), "no page has these any more"
    assert [command for command, n in Counter(listed).items() if n > 1] == []
    assert len(PARSED) > 50
    assert len(NOT_RUN) < 40
    for name in BY_TEST:  # which takes them from there
        assert f'BY_TEST["{name}"]' in functions_of("test_readme.py")[name]


@pytest.mark.parametrize("command", PARSED)
def test_the_program_takes_the_command(command, stocked):
    for word, instead in WORDS.items():
        command = command.replace(word, instead)
    hold(command, stocked)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python day1/4_mnist_manual_ddp.py 2 --epoch-s 3", "unrecognized arguments: --epoch-s"),
        ("python day1/4_mnist_manual_ddp.py 0", "must be a whole number greater than 0, not 0"),
        ("python day1/4_mnist.py", "there is no day1/4_mnist.py"),
        ("python day1/exercises/4.1_more_ranks_worse.py 2", "takes no arguments"),
        ("python scripts/check.py 99.1", "There is no exercise 99.1"),
        ("python scripts/update_docs.py --recrod", "unrecognized arguments"),
        ("python scripts/benchmark.py --only date", "There is no case 'date'"),
        ("python day2/create_mnist_h5.py --gzip 10", "invalid choice"),
        ("scripts/multinode_setup_and_run.sh --local 2x2 9 --lr 1", "unrecognized arguments"),
        ("scripts/multinode_setup_and_run.sh --locale 2 9", "There is no option --locale"),
        ("scripts/multinode_setup_and_run.sh 99", "There is no lesson"),
        ("scripts/multinode_setup.sh 9", "there is no scripts/multinode_setup.sh"),
        ("scripts/multinode_setup_and_run.sh --local 2x2 11 --file data/none.h5", "is missing"),
        ("./scripts/run_course.sh day7", "There is no lesson"),
        ("DIST_TIMEOTU=10 scripts/multinode_setup_and_run.sh 9", "nobody reads DIST_TIMEOTU"),
        ("scripts/doctor.sh --locale 2x1", "There is no option --locale"),
        ("slides/build.sh --htlm", "There is no option --htlm"),
        ("slides/build.sh day9", "There is no deck day9"),
        ("./scripts/run_tests.sh --last", "--last"),
        ("torchrun --stand-alone day1/6_mnist_ddp_pt.py", "--stand-alone"),
        ("torchrun --standalone day1/6_mnist_ddp_pt.py 2 --epochs", "expected one argument"),
        ("accelerate launch --cpux day2/15_linear_accelerate.py", "--cpux"),
        ("accelerate launch day2/15_linear_accelerate.py --epochs 0", "greater than 0, not 0"),
        ("kill -USR9", "kill -USR9"),
        ("nobody knows this", "who takes this?"),
        ("python 'day1", "unexpected EOF"),
    ],
)
def test_a_command_that_is_wrong_is_refused(command, says, stocked):
    with pytest.raises(AssertionError, match=re.escape(says)):
        hold(command, stocked)


@pytest.mark.parametrize("command", NOT_RUN)
def test_what_is_not_run_can_be_read_by_a_shell_and_its_files_exist(command):
    for word, instead in WORDS.items():
        command = command.replace(word, instead)
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in re.findall(r"\b(?:day\d|scripts|slides|tests|data)/[\w./-]+", command):
        assert (ROOT / name).exists(), name


def test_the_variables_in_the_commands_are_read():
    names = {name for command in WRITTEN for name in re.findall(r"\b([A-Z_]{5,})=", command)}
    names |= {x.split()[1] for x in WRITTEN if x.startswith("unset ")}
    assert "DIST_TIMEOUT" in names
    assert [name for name in names if not is_read(name)] == []


def test_continuous_integration_runs_what_it_is_said_to_run():
    ci = (ROOT / ".ci" / "run").read_text().replace('"$lint/bin/', "").replace('"', "")
    ci = re.sub(r"^run_tests\b(?!\()", "scripts/run_tests.sh", ci, flags=re.M)  # its function
    packages = {x for line in re.findall(r"^need \S+ (.*)$", ci, re.M) for x in line.split()}
    for command in BY_CI:
        if command.startswith("apt-get install "):
            assert set(command.split()[2:]) <= packages, command
        else:
            words = map(re.escape, command.removeprefix("./").split())  # in a line, in this order
            assert re.search(rf"^[^#\n]*(?<![\w-]){'(?: .*)? '.join(words)}\b", ci, re.M), command


NOT_COPIED = (".git", ".venv*", ".cache", "__pycache__", "node_modules", "runs", "log*", "*.h5")
NOT_COPIED += ("ratings*", "*.html")


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the repository as it was cloned, and an environment without packages."""
    folder = tmp_path_factory.mktemp("cloned") / "my course"
    copy_tree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@here"]
    commands = (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"])
    for command in commands if shutil.which("git") else ():
        subprocess.run([*git, *command], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def stocked(tmp_path_factory):
    """Another copy of the repository, with the files that lessons look for before they start."""
    folder = tmp_path_factory.mktemp("stocked") / "my course"
    copy_tree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    stock(folder)
    return folder


def type_in(command, folder, literally=False, **env):
    """Type a command into a shell; return (exit status, output)."""
    for word, instead in () if literally else WORDS.items():
        command = command.replace(word, instead)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**ENV, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_quick_commands_can_be_typed(course):
    lesson = course / "day1" / "0_torch_dist.py"
    lesson.write_text(lesson.read_text() + "# changed\n")
    for place in (course, course / "folder" / "course"):
        make = [sys.executable, "-m", "venv", "--without-pip", place / ".venv"]
        subprocess.run(make, check=True, timeout=60)
    lacking = [program for program in ("git", "pgrep") if shutil.which(program) is None]
    if not Path("/dev/shm").exists():  # macOS
        lacking.append("/dev/shm")
    for command, expected in QUICK.items():
        # git makes the folder of the command cd.
        words = ["git"] if command == "cd course" else command.split()
        if any(word in lacking for word in words):
            continue
        status, output = type_in(command, course)
        usual = 1 if command.startswith("diff ") else 0
        assert (status, expected in output) == (usual, True), f"{command}\n{output}"
    assert "git" in lacking or (course / "course" / "README.md").exists()
    need(*lacking)  # for the rest of the commands


@pytest.mark.parametrize("command", SLOW)
def test_slow_commands_can_be_typed(command, course):
    status, output = type_in(command, course)
    assert SLOW[command] in output, output
    assert status == ("0.2_waits" in command), output


def lines_of(commands):
    """Return lines for a shell that type some commands, with a line before each."""
    terminal = "script -qec '{}' /dev/null <<< $'echo on $(hostname)\\nexit'"
    text = ""
    for command in commands:
        if command.startswith("sbatch "):  # Slurm takes these jobs and does not start them
            text += "scontrol update PartitionName=main State=DOWN\n"
        typed = terminal.format(command) if "--pty" in command else f"{command} </dev/null"
        for word, instead in WORDS.items():
            typed = typed.replace(word, instead)
        text += f"echo {shlex.quote(f'--- {command}')}\n{typed}\n"
        if command != "exit":
            text += "echo exit status $?\n"
    return text


@pytest.mark.timeout(600)
def test_commands_can_be_typed_on_a_cluster(slurm, course):
    usual = boxes.changed(boxes.USUAL.read_text(), "day1/6_mnist_ddp_pt.md")
    (course / "train.py").write_text(usual)
    line = SALLOC.replace("<acc_name>", "abc").replace("per-node=4", "per-node=1").split()
    sh = ["env", f"PATH={ENV['PATH']}", "SHELL=/bin/bash", "sh", "-c", '"$@" 2>&1', "sh"]
    for commands, shell in ((ON_LOGIN, ["bash"]), (IN_JOB, line)):
        try:
            typed = lines_of(commands)
            done = slurm.run(*sh, *shell, cwd=course, input=typed, timeout=280)
        finally:  # or other tests wait for these nodes
            slurm.run("scancel", "--me")
            slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
            slurm.run("scontrol", "delete", "ReservationName=course")
        said = dict(re.findall(r"^--- (.*)\n((?:(?!--- ).*\n)*)", done.stdout, re.M))
        assert list(said) == list(commands), done.stdout
        for command, expected in commands.items():
            assert expected in said[command], done.stdout
            assert command == "exit" or said[command].endswith("exit status 0\n"), done.stdout


def test_a_batch_job_can_be_followed_signaled_and_put_back(slurm, course):
    """The commands that need a job that runs: the log tells of each."""
    follow, signal, requeue = BY_TEST["test_a_batch_job_can_be_followed_signaled_and_put_back"]
    (course / "wait.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    submit = ("sbatch", "--parsable", "--ntasks-per-node=1", "scripts/sbatch_run.sh", "wait.py")
    job = slurm.run(*submit, cwd=course).stdout.strip()
    log = course / "logs" / f"slurm-{job}.out"
    try:
        assert wait_for(lambda: log.exists() and "ready" in log.read_text(), 60)
        for command, says in ((signal, ": warn the ranks"), (requeue, "Slurm ends this job")):
            done = slurm.run("bash", "-c", command.replace("<job>", job), cwd=course)
            assert done.returncode == 0, done.stderr
            assert wait_for(lambda says=says: says in log.read_text(), 30), log.read_text()
        output = type_in(f"timeout 5 {follow.replace('<job>', job)}", course)[1]
        assert output.endswith(log.read_text()[-100:])
    finally:
        slurm.run("scancel", job)


def test_a_cluster_can_be_typed(course):
    """Up, slowed down and down again, in a folder of its own."""
    need_slurm()
    env = {"LOCAL_SLURM_DIR": f"/run/local-slurm-typed-{os.getpid()}"}
    try:
        for command, expected in ON_CLUSTER.items():
            status, output = type_in(command, course, **env)
            assert (status, expected in output) == (0, True), f"{command}\n{output}"
    finally:
        type_in("scripts/local_slurm.sh down", course, **env)


def start(*command, cwd, **env):
    """Start a program with stdout and stderr in one pipe, and in a session of its own."""
    return subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env={**ENV, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process):
    """End a program with all that it has started; return the rest of its output."""
    for pid in processes_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    return process.communicate(timeout=10)[0]


def test_tensorboard_starts(tmp_path):
    commands = BY_TEST["test_tensorboard_starts"]
    servers = [start(*command.split(), cwd=tmp_path) for command in commands]
    try:
        for server in servers:
            output = ""
            while "http://localhost:" not in output:
                line = server.stdout.readline()
                assert line, f"{output}\nexit status {server.wait(10)}"
                output += line
    finally:
        for server in servers:
            end(server)


def test_a_key_is_made_and_its_public_file_shown(tmp_path):
    make, show = BY_TEST["test_a_key_is_made_and_its_public_file_shown"]
    need("ssh-keygen")
    # It looks for the home folder in the list of users, so the file is named here.
    file = tmp_path / ".ssh" / "id_ed25519"
    file.parent.mkdir()
    status, output = type_in(f"{make} -f {file} <<< $'\\n\\n'", tmp_path)
    assert status == 0, output
    assert type_in(show, tmp_path, HOME=str(tmp_path))[1].startswith("ssh-ed25519 ")


def test_the_cell_of_a_notebook(course, tmp_path):
    """As a notebook does it: no terminal, and the torch that is there."""
    need("git")
    site = Path(torch.__file__).parents[1]
    before = {path: path.stat().st_mtime_ns for path in site.glob("torch*")}
    (cell,) = (b for k, b in FENCE.findall(RENTED.read_text()) if b.startswith("!git clone"))
    clone, show, lesson = (line.removeprefix("!") for line in cell.splitlines())
    place = f"file://{course}".replace(" ", "%20")
    clone = clone.replace("<address of this repository>", shlex.quote(place))
    assert type_in(clone, tmp_path)[0] == 0
    status, output = type_in(show, tmp_path)
    assert (status, output) == (0, f"{torch.__version__} {torch.cuda.device_count()}\n")
    status, output = type_in(f"{lesson} --rounds 1 --max-steps 5 --batch-size 8", tmp_path)
    assert status == 0, output
    assert proves(output), output
    assert "=> 2 processes: " in output
    assert {path: path.stat().st_mtime_ns for path in site.glob("torch*")} == before
    assert not [*tmp_path.rglob(".venv*")]


def test_the_guide_shows_where_the_ranks_stand(tmp_path):
    """Two of the ways of day1/GUIDE.md, on exercise 0.2 with a longer timeout."""
    need("pgrep")
    (body,) = (
        b for k, b in FENCE.findall((ROOT / "day1" / "GUIDE.md").read_text()) if k == "python"
    )
    added = [line.strip().replace("20", "1") for line in body.splitlines()]
    text = (ROOT / "day1" / "exercises" / "0.2_waits_for_ever.py").read_text()
    head = 'def main():\n    """Run on every rank: count the images of all ranks."""\n'
    assert head in text
    text = text.replace(head, head + "".join(f"    {line}\n" for line in added))
    file = tmp_path / "stands_still.py"
    file.write_text(text.replace("seconds=2", "seconds=30"))
    place = 1 + next(i for i, x in enumerate(text.splitlines()) if "dist.all_reduce(" in x)
    job = start(sys.executable, file, cwd=tmp_path, PYTHONFAULTHANDLER="1")
    output, lines = "", []
    try:
        # Rank 0 after 1 s, rank 1 after 2 s, and so on.
        expected = [f"Timeout (0:00:0{1 + rank})!" for rank in range(4)]
        while any(x not in output for x in (*expected, f"line {place} in report")):
            line = job.stdout.readline()
            assert line, output
            output += line
        lines = subprocess.run(
            ["pgrep", "-af", str(file)], capture_output=True, text=True
        ).stdout.splitlines()  # each rank is in a session of its own
        assert len(lines) == 5, lines  # torchrun, then the ranks
        os.kill(int(lines[1].split()[0]), signal.SIGABRT)
        output = job.communicate(timeout=20)[0]
    finally:
        for line in lines[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        end(job)
    assert "Fatal Python error: Aborted" in output
    assert f"line {place} in report" in output


def test_a_hang_on_several_nodes_can_be_read(course):
    need("pgrep")
    commands = BY_TEST["test_a_hang_on_several_nodes_can_be_read"]
    _, make, timed_out, compared, standing, find, *variables = commands
    assert [timed_out.split()[0], compared.split()[0]] == variables  # they act below
    assert type_in(make, course)[0] == 0
    text = (course / "hang.py").read_text()
    place = 1 + text[: text.index("dist.get_rank() == 1 or")].count("\n")
    left_out = f'/hang.py", line {place}, in main\n'
    _, output = type_in(timed_out, course)
    assert "Timed out waiting 10000ms" in output
    for rank in range(3):
        last = re.findall(rf"^\[rank{rank}\]: +File .*(/hang\.py.*\n)", output, re.M)[-1]
        assert (last == left_out) == (rank != 1), output
        assert rank != 1 or last.endswith("in gather\n")
    _, output = type_in(compared, course)
    assert "Detected mismatch between collectives on ranks. Rank " in output
    assert "OpType=ALLREDUCE" in output
    # Typed in two terminals.
    variable, program, *arguments = standing.split()
    job = start(course / program, *arguments, cwd=course, **dict([variable.split("=")]))
    try:
        output = ""
        while "ranks: 3, device:" not in output:
            line = job.stdout.readline()
            assert line, output
            output += line
        time.sleep(3)  # now they stand
        found = type_in(find, course)[1].splitlines()
        ranks = [x.split()[0] for x in found if " -u " in x]
        assert len(ranks) == 3, found
        (first,) = (x for x in ranks if "\0RANK=0\0" in Path(f"/proc/{x}/environ").read_text())
        os.kill(int(first), signal.SIGABRT)
        output += job.communicate(timeout=20)[0]
    finally:
        end(job)
    assert "Fatal Python error: Aborted" in output
    assert f'/hang.py", line {place} in main' in output


def test_a_silent_fault_stops_all_ranks(course):
    make, check = BY_TEST["test_a_silent_fault_stops_all_ranks"]
    assert type_in(make, course)[0] == 0
    arguments = check.partition("silent.py ")[2].split()  # the launcher would take longer
    status, output = run_ranks(3, course / "silent.py", *arguments, cwd=course)
    assert status == 1
    assert output.count("After batch 20: another module.conv1.weight on ranks [1, 2].\n") == 1
    assert "Traceback" not in output
    assert "epoch 0" not in output


def test_output_comes_late_unless_told_otherwise(tmp_path):
    """In each way of the text it comes at once; without them it is held back until the end."""
    code = "import pathlib, time; {}; pathlib.Path('{}').touch(); time.sleep(60)"
    processes = []
    for number, way in enumerate(["", *BY_TEST["test_output_comes_late_unless_told_otherwise"]]):
        text = way if way.startswith("print(") else "print(...)"
        options = way.split()[1:] if way.startswith("python ") else []
        name, _, value = way.partition("=") if "(" not in way else ("", "", "")
        env = {"PYTHONUNBUFFERED": "", **({name: value} if value else {})}
        program = [sys.executable, *options, "-c", code.format(text, number)]
        processes.append(start(*program, cwd=tmp_path, **env))
    late, *prompt = processes
    assert [process.stdout.readline() for process in prompt] == ["Ellipsis\n"] * 3
    # This one has printed too, into a buffer.
    assert wait_for(lambda: (tmp_path / "0").exists(), 30)
    assert [end(process) for process in (late, *prompt)] == [""] * 4  # it never came


def test_the_variables_act(course):
    launcher = "scripts/multinode_setup_and_run.sh --local 2x2 --dry-run 9"
    lesson = "python day1/0_torch_dist.py 2"
    seen = {  # what must be seen, and only with the variable
        "OMP_NUM_THREADS=1": (launcher, "each rank: 1 threads", {"OMP_NUM_THREADS": "3"}),
        "GLOO_SOCKET_IFNAME=eth0": (launcher, "interface eth0", {}),
        "TORCH_CPP_LOG_LEVEL=INFO": (lesson, "[c10d]", {}),
    }
    for variable in BY_TEST["test_the_variables_act"]:
        command, expected, otherwise = seen[variable]
        assert expected in type_in(f"{variable} {command}", course)[1], variable
        status, output = type_in(command, course, **otherwise)
        assert status == 0, output
        assert expected not in output, variable


# Each symptom in the tables of troubles, and where it is seen. A function below, which must say
# the words; a test or a file, in which they must stand; or "needs", marked so in the table.
SYMPTOMS = {
    # On one machine.
    "`No module named 'torch'`, `torchrun: command not found`": "shell",
    "`There is no python3 here`, `Python 3.11 or newer is needed`": "shell",
    "`No space left on device`": "shell",
    "`module 'torch' has no attribute 'accelerator'`": "needs: with torch before 2.6",
    "There is a GPU, and the lessons take the CPU. Your own code says "
    "`Torch not compiled with CUDA enabled`": "torch",
    "`Found no NVIDIA driver on your system`": "torch",
    "`The NVIDIA driver on your system is too old`": "needs: with GPUs",
    "`nvcc: command not found`, or nvcc shows another CUDA than torch": "shell",
    "`... is missing or damaged. Restore it: git checkout data/MNIST`": (
        "faults/test_data.py::test_missing_or_damaged_data_gets_one_sentence"
    ),
    "`File not found or corrupted.`, or other errors about a data set's files, in some starts and "
    "not in others": "mistakes",
    "`fatal: not a git repository`": "shell",
    "`There is no lesson 'day7'`": "shell",
    "`error: unrecognized arguments`": "lessons",
    "`unrecognized arguments: --local-rank=0`, or "
    "`the following arguments are required: --local_rank`": "mistakes",
    "`environment variable RANK expected, but not set`": "mistakes",
    "`argument processes: must be a whole number greater than 0, not 0`": "lessons",
    "`-- Process 2 terminated with the following error:`": (
        "faults/test_processes.py::test_a_rank_of_day_1_raises_while_another_waits"
    ),
    "`process 2 terminated with signal SIGKILL`": (
        "faults/test_processes.py::test_a_rank_of_day_1_is_killed"
    ),
    "`Connection closed by peer`": "torch",
    "All goes well until the last batches of an epoch. Then the job hangs, or says "
    "`Connection closed by peer`": "mistakes",
    "Nothing for 60 s, then `Timed out waiting 60000ms for recv operation to complete`": "torch",
    "`Ranks 1, 2, 3 failed to pass monitoredBarrier`": (
        "test_readme.py::test_slow_commands_can_be_typed"
    ),
    "`Detected mismatch between collectives on ranks`": "torch",
    "`Expected to have finished reduction in the prior iteration before starting a new one`": (
        "mistakes"
    ),
    "`Expected to mark a variable ready only once`, and below it "
    "`has been marked as ready twice`": "mistakes",
    "`has been modified by an inplace operation`, in a model with BatchNorm that takes two batches "
    "before one `backward` (torch 2.9 and older)": "mistakes",
    '`Unexpected key(s) in state_dict: "module.weight"`': "mistakes",
    "FutureWarning: `torch.distributed.all_gather_into_tensor` is deprecated": "mistakes",
    "`CUDA out of memory`": "needs: with GPUs",
    "`nvidia-smi` shows a GPU that is idle most of the time": "needs: with GPUs",
    "`Duplicate GPU detected`": "needs: with GPUs",
    "NCCL's `unhandled system error`": "needs: with GPUs",
    "`Cannot re-initialize CUDA in forked subprocess`": "needs: with GPUs",
    "`destroy_process_group() was not called before program exit`": "needs: with GPUs",
    "`WRONG` at the end of the line with `=>`, or in the last table": "files",
    "`no proof line`": (
        "test_scripts.py::test_run_course_waits_for_nobody_and_names_the_lesson_that_left_something"
    ),
    "`stopped after 300 s`": "shell",
    "`processes left: 1`": (
        "test_scripts.py::test_run_course_waits_for_nobody_and_names_the_lesson_that_left_something"
    ),
    "`skipped:` and a sentence": (
        "test_scripts.py::test_run_course_skips_what_this_machine_cannot_run"
    ),
    "In lesson 7, a gain (`weak`, `strong`) below 1": "files",
    "With more processes, the loss is higher and the accuracy lower": (
        "test_lessons.py::test_lesson_8_scaling_brings_the_loss_curve_closer"
    ),
    "Lines about `ActivityProfiler`": "torch",
    "Into a file or through a pipe, all output comes at the end": (
        "test_readme.py::test_output_comes_late_unless_told_otherwise"
    ),
    "`TensorBoard could not bind to port 6006, it was already in use`": "tensorboard",
    "TensorBoard shows `No dashboards are active for the current data set.`": "files",
    "In TensorBoard, the trace page shows a spinner without end": "files",
    "`Stale: day1/1_torch_dist_gpu.md. Run: python scripts/update_docs.py`": "shell",
    # On several nodes.
    "`salloc: command not found`": "shell",
    "`acc_name: No such file or directory`": "shell",
    "`Invalid account or account/partition combination specified`": (
        "needs: with Slurm's accounting"
    ),
    "`command not found`, or `No such file or directory`, behind the name "
    "multinode_setup_and_run.sh": "shell",
    "`Invalid feature specification`, `Invalid partition name specified`, "
    "`Requested node configuration is not available`": "slurm",
    "`queued and waiting for resources`": "slurm",
    "`This is not inside a Slurm allocation`": "shell",
    "`start this lesson with scripts/multinode_setup_and_run.sh`": "lessons",
    "`No Python with torch on`": "shell",
    "`ranks on each: 1`, but there are four GPUs": "slurm",
    "`More processors requested than permitted`": "slurm",
    "`... is missing, damaged or of another kind`": (
        "faults/test_data.py::test_lesson_11_refuses_a_file_with_a_sentence"
    ),
    "`is there already. To write it again: --force`": (
        "test_lesson_11.py::test_a_file_that_is_there_stays_unless_forced"
    ),
    "`filter returned failure during read`": (
        "test_lesson_11.py::test_damage_inside_a_chunk_is_noticed"
    ),
    "`message: address already in use`, or "
    "`is in use. Choose another one: export MASTER_PORT=29501`": "slurm",
    "A job meets ranks that are not its own, or misses one of its own": (
        "test_launcher.py::test_two_jobs_at_the_same_time_do_not_meet"
    ),
    "Started by hand, torchrun waits for minutes and says nothing": "torchrun",
    "`RendezvousTimeoutError`, after ten minutes of silence, or "
    "`The connection to the C10d store has failed`": "mistakes",
    "Nothing for 60 s, then `The client socket has timed out after 60000ms while trying to "
    "connect to`": "torch",
    "`Gloo connectFullMesh failed`, `Connection refused, remote=[127.0.0.1]` or `[127.0.1.1]`": (
        "slurm"
    ),
    "`Gloo connectFullMesh failed` with `No route to host`, or after minutes with "
    "`Connect timeout`": "needs: with a firewall",
    "`Unable to find address for: eth9`": "torch",
    "`The hostname of the client socket cannot be retrieved`": "torch",
    "NCCL is slow or stops at the start, and each rank sees one GPU only": "needs: with GPUs",
    "NCCL is slow between nodes": "needs: with GPUs",
    "`Bootstrap : no socket interface found`, or NCCL hangs at the first collective": (
        "needs: with GPUs"
    ),
    "All ranks hang; after 60 s `Watchdog caught collective operation timeout`": (
        "needs: with GPUs"
    ),
    "No error until the end, but a poor model": "torch",
    "`After batch 20: another module.conv1.weight on ranks [1, 2].`": (
        "test_readme.py::test_a_silent_fault_stops_all_ranks"
    ),
    "All ranks are slow, although only one node is busy with something else": (
        "test_lesson_9.py::test_lesson_9_on_imitated_nodes"
    ),
    "`ended with signal KILL`": ("faults/test_processes.py::test_a_rank_on_a_node_is_killed"),
    "`User defined signal 1`, shortly before the time is over": "slurm",
    "`SignalException: Process 4711 got signal: 15`": "mistakes",
    "`DUE TO TIME LIMIT`": "slurm",
    "`snapshot.pt is of a job with other arguments. Repeat those, or delete`": (
        "test_lesson_12.py::test_stopped_by_a_signal_it_goes_on_with_another_number_of_ranks"
    ),
}
MARK = re.compile(r" \((only with(?:out)? [^()]+)\)$")


def symptoms():
    """Return {symptom without its mark: mark} of all tables of troubles."""
    rows = table((ROOT / "day1" / "TROUBLESHOOTING.md").read_text())
    names = [row[0] for row in rows if row[0] != "symptom"]
    assert len(names) == len(set(names)), "a symptom stands in two rows"
    marks = {name: MARK.search(name) for name in names}
    return {MARK.sub("", name): mark and mark[1] for name, mark in marks.items()}


def normal(text):
    """Return a text with each number, and each {expression} of an f-string, as #."""
    return re.sub(r"\d+|{[^{}]*}", "#", text)


def assert_said(holder, said):
    """Assert that a text has the words of all symptoms with this holder."""
    symptoms = [x for x in SYMPTOMS if SYMPTOMS[x] == holder]
    assert symptoms, f"no symptom is held by {holder}"
    for symptom in symptoms:
        for words in code_in(symptom):
            words = words.removeprefix("... ")
            assert normal(words) in normal(said), f"nobody says: {words}\n{said}"


def test_every_symptom_is_held():
    written = symptoms()
    assert len(written) >= 20
    assert set(written) == set(SYMPTOMS)
    for symptom, holder in SYMPTOMS.items():
        needs = holder.removeprefix("needs: ") if holder.startswith("needs: ") else None
        assert written[symptom] == (needs and f"only {needs}"), symptom
        if "::" in holder:
            source = strings_of_test(holder)
            if holder == "test_readme.py::test_slow_commands_can_be_typed":
                source = " ".join(SLOW.values())
            assert_said(holder, source)
        elif not needs:
            names = (f"test_the_{holder}_say", f"test_the_{holder}_says")
            assert set(names) & set(functions_of("test_readme.py")), symptom


def test_the_table_of_faults_is_that_of_the_tests():
    """A row for each fault that a test names, and no other."""
    page = (ROOT / "tests" / "faults" / "README.md").read_text()
    rows = [row for row in table(page)[1:] if not row[0].startswith("**")]
    written, named = {fault for row in rows for fault in row[0].split("; ")}, []
    files = set((ROOT / "tests" / "faults").glob("test_*.py"))
    texts = [x.read_text() for x in files if x.stem != "test_catalogue"]
    constants = {  # some are parameters of a test
        x.value for text in texts for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Constant)
    }
    for text in texts:
        for call in ast.walk(ast.parse(text)):
            function = isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2]
            if function in ("check", "saw", "refused") and not isinstance(call.args[0], ast.Name):
                parts = getattr(call.args[0], "values", [call.args[0]])
                named += [
                    "".join(
                        re.escape(x.value) if isinstance(x, ast.Constant) else ".+" for x in parts
                    )
                ]
    assert len(named) > 30
    for fault in named:
        for part in fault.split(";\\ "):
            assert [x for x in written if re.fullmatch(part, x)], fault
    for fault in written:
        known = [part for x in named for part in x.split(";\\ ") if re.fullmatch(part, fault)]
        assert known or fault in constants, fault


def test_the_shell_says(course, tmp_path):
    old = tmp_path / "old" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    copy = tmp_path / "copy"
    copy_tree(course, copy, ignore=shutil.ignore_patterns(".git", ".venv"))
    lessons = copy / "scripts" / "course.toml"
    lessons.write_text(re.sub(r"^seconds = \d+", "seconds = 0", lessons.read_text(), flags=re.M))
    lesson = copy / "day1" / "0_torch_dist.py"
    lesson.write_text(lesson.read_text().replace("\nimport", "\n# changed\nimport", 1))
    nothing = f"PATH={tmp_path}"
    launcher = "scripts/multinode_setup_and_run.sh"
    commands = [
        "python -S day1/0_torch_dist.py",
        f"{nothing}; torchrun --standalone day1/0_torch_dist.py",
        f"{nothing}; salloc --nodes 2",
        f"{nothing}; nvcc --version",
        "PYTHON=python9 ./scripts/run_course.sh",
        f"PYTHON={old} ./scripts/run_course.sh",
        "echo full > /dev/full",
        "GIT_CEILING_DIRECTORIES=/ git checkout data/MNIST",
        "./scripts/run_course.sh day7",
        "./scripts/run_course.sh 0",
        "python scripts/update_docs.py --check",
        SALLOC,
        f"{launcher} 9",
        "./multinode_setup_and_run.sh 9",
        "multinode_setup_and_run.sh 9",
        f"PATH={old.parent}:$PATH; unset PYTHON; {launcher} --local 2 9",
    ]
    said = ""
    for command in commands:
        status, output = type_in(command, copy, literally=True)
        assert status, f"{command}\n{output}"
        said += output
    no_git = shutil.which("git") is None
    assert_said("shell", said + "fatal: not a git repository" * no_git)
    if no_git:
        cannot("one message needs git")


def test_the_lessons_say(tmp_path):
    commands = [
        ("day1/0_torch_dist.py", "0"),
        ("day1/4_mnist_manual_ddp.py", "--batchsize", "8"),
        ("day2/9_torch_dist_multi_node.py",),
    ]
    jobs = [start(sys.executable, ROOT / file, *words, cwd=tmp_path) for file, *words in commands]
    assert_said("lessons", "".join(job.communicate(timeout=60)[0] for job in jobs))
    assert [job.returncode for job in jobs] == [2, 2, 2]


# What PyTorch says. The ranks are threads here: quick, and the messages are the same.
TORCH_SAYS = """
import os, socket, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper
from torch.profiler import profile

WAIT = timedelta(seconds=2)

def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except Exception as error:
        print(error, flush=True)

def together(*functions, debug=False):
    def be_a_rank(rank, function):
        group = dist.ProcessGroupGloo(dist.PrefixStore("a", store), rank, len(functions), WAIT)
        if debug:
            helper = dist.ProcessGroupGloo(dist.PrefixStore("b", store), rank, len(functions), WAIT)
            group = _ProcessGroupWrapper(group, helper)
        attempt(function, group)
        if function is not leave:
            done.wait()
    store, done = dist.HashStore(), threading.Event()
    threads = [threading.Thread(target=be_a_rank, args=x) for x in enumerate(functions)]
    for thread in threads:
        thread.start()
    threads[0].join(5)
    done.set()

def reduce(group, size=3):
    group.allreduce([torch.ones(size)]).wait()

def leave(group):
    reduce(group)

def stay_and_leave(group):
    leave(group)
    time.sleep(0.5)
    reduce(group)

def six_steps(group):
    for step in range(6):
        reduce(group)
        print("step", step, "done", flush=True)

def skip_one(group):
    for step in range(6):
        if step != 2:
            reduce(group)

with socket.socket() as nobody:
    nobody.bind(("127.0.0.1", 0))
    attempt(dist.TCPStore, "127.0.0.1", nobody.getsockname()[1], timeout=WAIT)
with socket.create_server(("", 0)) as other:
    attempt(dist.TCPStore, "127.0.0.1", other.getsockname()[1], is_master=True, timeout=WAIT)
os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
attempt(dist.ProcessGroupGloo, dist.HashStore(), 0, 1, WAIT)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
together(reduce, lambda group: None)
together(stay_and_leave, leave)
together(reduce, lambda group: reduce(group, 4), debug=True)
print("no error until the end")
together(six_steps, skip_one)
with profile():
    torch.ones(3) + 1
attempt(torch.cuda.init)
torch.cuda._initialized = False
vars(torch._C).pop("_cuda_getDeviceCount", None)  # what a torch for CPUs only lacks
attempt(torch.cuda.init)
if len(sys.argv) > 1:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore(sys.argv[1], server.port, timeout=WAIT)
    time.sleep(0.5)
"""
NAMELESS = "`The hostname of the client socket cannot be retrieved`"


def test_the_torch_say(tmp_path):
    (tmp_path / "says.py").write_text(TORCH_SAYS)
    command = [sys.executable, "-u", tmp_path / "says.py"]
    # A network of our own, in which a machine has an address and no name.
    setup = 'ip link set lo up && ip address add 10.9.9.9/32 dev lo && exec "$@"'
    inside = ["unshare", "--net", "sh", "-c", setup, "sh"]
    alone = works(*inside, "true")
    command = [*inside, *command, "10.9.9.9"] if alone else command
    job = start(*command, cwd=tmp_path, KINETO_LOG_LEVEL="0")
    said = job.communicate(timeout=100)[0]
    assert job.returncode == 0, said
    steps = said.partition("no error until the end\n")[2].splitlines()[:6]
    assert steps[:5] == [f"step {i} done" for i in range(5)]
    assert "Timed out waiting" in steps[5]
    if not alone:
        said += NAMELESS
    if torch.version.cuda is None or torch.cuda.is_available():
        said += "Found no NVIDIA driver on your system"
    assert_said("torch", said)
    if not alone:
        cannot("one message needs the right to make a network namespace, and the command ip")


def test_the_torchrun_say(tmp_path):
    """It says nothing at all, for as long as we wait here."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{silent.getsockname()[1]}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *meet]
        command += ["--rdzv-conf=is_host=0", ROOT / LESSONS["9"]["file"]]
        job = start(*command, cwd=tmp_path)
        silent.settimeout(60)
        connection, _ = silent.accept()  # it has come
        time.sleep(3)
        running = job.poll() is None
        assert end(job) == ""
        assert running
        connection.close()


# Mistakes in one's own script, made on two ranks.
MISTAKES = """
import hashlib, http.server, os, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchvision.datasets import MNIST

def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except Exception as error:
        print(error, flush=True)

class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, batch):
        return self.used(batch)

class Checkpointed(nn.Sequential):
    def forward(self, batch):
        return checkpoint(super().forward, batch, use_reentrant=True)

def train(steps, model):
    for _ in range(steps):
        model(torch.ones(4, 2, requires_grad=True)).sum().backward()

def two_batches(model):
    (model(torch.ones(4, 2)).sum() + model(torch.ones(4, 2)).sum()).backward()

def is_slow(self):
    self.send_response(200)
    self.end_headers()
    for _ in range(10):
        self.wfile.write(b"x" * 20_000)
        time.sleep(0.2)

def download_at_the_same_time():
    handler = type("", (http.server.BaseHTTPRequestHandler,), {"do_GET": is_slow})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    MNIST.mirrors = [f"http://127.0.0.1:{server.server_port}/"]
    MNIST.resources = [("images.gz", hashlib.md5(b"x" * 200_000).hexdigest())]
    ranks = [
        threading.Timer(delay, attempt, (MNIST, "data"), {"download": True}) for delay in (0, 1.5)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()

rank = int(os.environ.pop("RANK"))
attempt(dist.init_process_group, "gloo")
os.environ["RANK"] = str(rank)
dist.init_process_group("gloo")
attempt(train, 2, DistributedDataParallel(TwoLayers()))
model = Checkpointed(nn.Linear(2, 2))
attempt(train, 1, DistributedDataParallel(model, find_unused_parameters=True))
attempt(two_batches, DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
model = nn.Linear(2, 2)
ddp_model = DistributedDataParallel(model)
attempt(model.load_state_dict, ddp_model.state_dict())
dist.all_gather_into_tensor(torch.empty(2), torch.ones(1))
with Join([ddp_model]):
    train(2 + rank, ddp_model)
print("joined", flush=True)
if rank == 0:
    download_at_the_same_time()
dist.barrier()
attempt(train, 2 + rank, ddp_model)
if rank == 0:
    dist.destroy_process_group()
    time.sleep(2)
"""


def test_the_mistakes_say(tmp_path):
    (tmp_path / "ranks.py").write_text(MISTAKES)
    _, said = run_ranks(2, tmp_path / "ranks.py", cwd=tmp_path)
    assert said.count("joined\n") == 2, said
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    old, new = "modified by an inplace operation", "torch.distributed.all_gather_into_tensor"
    if version < (2, 10) or version > (2, 12):  # between them we have not tried it
        assert (old in said, new in said) == (version < (2, 10), (2, 12) < version < (2, 15)), said
    (tmp_path / "takes_none.py").write_text("import argparse as a; a.ArgumentParser().parse_args()")
    (tmp_path / "wants_it.py").write_text(
        "import argparse; x = argparse.ArgumentParser(); "
        "x.add_argument('--local_rank', required=True); x.parse_args()"
    )
    (tmp_path / "sleeps.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    nowhere = "--rdzv-endpoint=127.0.0.1"
    meet = ("run", "--nnodes=2", "--rdzv-backend=c10d", f"{nowhere}:{port}")
    commands = [
        ("launch", "takes_none.py"),
        ("run", "--standalone", "wants_it.py"),
        (*meet, "--rdzv-conf=is_host=1,join_timeout=3", "takes_none.py"),
        (*meet[:-1], f"{nowhere}:1", "--rdzv-conf=is_host=0,read_timeout=3", "takes_none.py"),
        ("run", "--standalone", "sleeps.py"),
    ]
    jobs = [
        start(sys.executable, "-m", f"torch.distributed.{name}", *words, cwd=tmp_path)
        for name, *words in commands
    ]
    while "here\n" not in jobs[-1].stdout.readline():
        assert jobs[-1].poll() is None
    jobs[-1].terminate()
    said += "".join(job.communicate(timeout=60)[0] for job in jobs)
    assert_said("mistakes", f"{said}has been {old}{new}")


def test_the_tensorboard_say(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        job = start("tensorboard", "--logdir", "runs", "--port", port, cwd=tmp_path)
        assert_said("tensorboard", job.communicate(timeout=60)[0])


def test_the_files_say():
    import tensorboard
    import torch_tb_profiler

    pages = zipfile.ZipFile(Path(tensorboard.__file__).parent / "webfiles.zip")
    said = pages.read("index.js").decode()
    for name in ("0", "3", "7"):
        said += (ROOT / LESSONS[name]["file"]).read_text()
    assert_said("files", said)
    page = Path(torch_tb_profiler.__file__).parent / "static" / "index.html"
    assert "https://www.gstatic.com/charts/loader.js" in page.read_text()


def test_the_slurm_say(slurm, tmp_path):
    launcher = str(ROOT / "scripts" / "multinode_setup_and_run.sh")
    over = "(sleep 1; scontrol update jobid=$SLURM_JOB_ID TimeLimit=0) & srun sleep 60"
    # A program that has the port which the lesson wants: one given by the user, or the step's own.
    other = "import socket, time; x = socket.create_server((str(), int(PORT))); time.sleep(60)"
    wait = "sleep 1; until ss -Htln | grep -q :$PORT; do sleep 0.1; done"
    busy = f'"$3" -c "${{0/PORT/$PORT}}" & {wait}; MASTER_PORT=$1 "$2" 9; s=$?; kill $!; exit $s'
    of_step = "PORT=$((20000 + (SLURM_JOB_ID * 97 + SLURM_STEP_ID * 7) % 10000)); "
    commands = [
        ["salloc", "--nodes", 2, "--constraint", "none", "true"],
        ["salloc", "--nodes", 2, "--partition", "none", "true"],
        ["salloc", "--nodes", 2, "--gpus-per-node", 5, "true"],
        ["salloc", "--nodes", 2, "timeout", 2, "salloc", "--cpus-per-task", 128, "true"],
        ["salloc", "--cpus-per-task", 2, "srun", "--cpus-per-task", 4, "hostname"],
        ["salloc", "--nodes", 2, launcher, "--dry-run", 9],
        ["srun", "bash", "-c", "kill -USR1 $$"],
        ["salloc", "--nodes", 2, "bash", "-c", over],
        ["env", "GLOO_SOCKET_IFNAME=lo", "salloc", "--nodes", 2, launcher, 9],
        ["srun", "bash", "-c", f"PORT=29555; {busy}", other, "29555", launcher, sys.executable],
        ["srun", "bash", "-c", of_step + busy, other, "", launcher, sys.executable],
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        done = [*pool.map(lambda command: slurm.run(*map(str, command), cwd=tmp_path), commands)]
    assert [x.returncode != 0 for x in done] == [command[-2] != "--dry-run" for command in commands]
    assert_said("slurm", "".join(x.stdout + x.stderr for x in done))


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    made = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("day", read_days(), ids=lambda day: day["id"])
def test_the_agenda_is_that_of_the_slides(day):
    """The timetable of a class, in course.toml, has the minutes that the deck's agenda shows."""
    planned = Counter()
    for _, minutes, title, *_ in parts_of(day, read_pages()):
        planned[title] += minutes
    assert planned == agenda(day["id"])


def test_the_run_times_are_those_of_lessons():
    rows = table((ROOT / "slides" / "TEACHING.md").read_text(), "How long the lessons run")[1:]
    cells = [(row[column], row[column + 1]) for column in (0, 2, 4) for row in rows]
    times = {name: float(seconds) for name, seconds in cells if name}
    assert list(times) == list(LESSONS), "the table in slides/TEACHING.md"
    assert all(0 < seconds < 300 for seconds in times.values())


# Abbreviations that are names, or explained where they stand.
NAMES = {
    "AWS",
    "CINECA",
    "COMPOSITE",
    "CSC",
    "DETAIL",
    "DIFFERENT",
    "EFA",
    "EPYC",
    "FSDP2",
    "HIP",
    "IDRIS",
    "INFO",
    "JURECA",
    "JUWELS",
    "LICENSE",
    "LUMI",
    "MI250X",
    "MIT",
    "MPI",
    "MPICH",
    "NERSC",
    "NVIDIA",
    "P100",
    "PDF",
    "PYTHONFAULTHANDLER",
    "RCCL",
    "README",
    "RHEL",
    "ROCR",
    "SIGTERM",
    "SLES",
    "SUM",
    "TACC",
    "TODO",
    "USR1",
    "VGG",
    "WSL",
    "XPU",
}


def test_the_glossary_has_the_words_of_the_course():
    rows = table((ROOT / "day1" / "GLOSSARY.md").read_text())[1:]
    rows = [[re.sub(r"^<a .*</a>", "", name), meaning] for name, meaning in rows]
    names = [name for name, _ in rows]
    assert names == sorted(names, key=str.lower)
    explained = " ".join(" ".join(row) for row in rows)
    short, terms = set(), set()
    for page in [*PAGES, *ROOT.glob("slides/[bd]*.md")]:
        text = FENCE.sub("", page.read_text())
        if "\n## Words of the day\n" in text:
            terms |= {row[0] for row in table(text, "Words of the day")[1:]}
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # a link is its words
        if page in PAGES:  # bold where explained; a deck has its words of the day
            terms |= set(re.findall(r"(?<=\w )\*\*([a-z][a-z ]*)\*\*", text))
        text = re.sub(r"<!--.*?-->|\]\(\S+\)|<\S+>|`[^`\n]*`", "", text, flags=re.S)
        short |= set(re.findall(r"(?<!_)\b[A-Z][A-Z0-9]{2,}\b(?!_)", text))
    assert {"nodes", "queue", "world size"} < terms
    assert {x for x in short - NAMES if not re.search(rf"\b{x}s?\b", explained, re.I)} == set()
    known = " ".join(names).lower()
    assert {x for x in terms if x.lower().removesuffix("s") not in known} == set()
