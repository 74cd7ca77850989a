"""The text: each command can be typed, each symptom is really seen, each link leads somewhere."""

import ast
import functools
import os
import re
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

import pytest
from helpers import LESSONS, ROOT, cannot, processes_of

GLOBS = ("*.md", "*/*.md", "*/exercises/*.md")
PAGES = [page for glob in GLOBS for page in sorted(ROOT.glob(glob))]
PAGES = [page for page in PAGES if page.parent.name != "slides" or not page.stem.startswith("day")]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
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
    "diff day1/4_mnist_manual_ddp.py day1/6_mnist_ddp_pt.py": "> from torch.nn.parallel import",
    "diff day1/exercises/4.1_more_ranks_worse.py day1/exercises/solutions/": "<",
    "diff day2/exercises/10.1_another_accuracy.py day2/exercises/solutions/": "<",
    "git status": "modified:   day1/0_torch_dist.py",
    "git diff": "-# changed",
    "git checkout day1": "",
    "git checkout day1/4_mnist_manual_ddp.py": "",
    "git checkout day1/6_mnist_ddp_pt.py": "",
    "git checkout day1/exercises/4.1_more_ranks_worse.py": "",
    "git checkout day2/exercises/10.1_another_accuracy.py": "",
    "git checkout data/MNIST": "",
    "git clone <address of this repository> course": "",
    "cd course": "",
    "source .venv/bin/activate": "",
    "source <folder of the instructor>/course/.venv/bin/activate": "",
    "du -sh .venv": ".venv",
    "find .venv -type f": ".venv/bin/activate",
    "df -h .": "Avail",
    "pgrep -u $USER -af python": "python",
    "kill <pid>": "",
    "kill -9 <pid>": "",
    "export GLOO_SOCKET_IFNAME=eth0": "",
    "export NCCL_DEBUG=INFO": "",
    "export OMP_NUM_THREADS=1": "",
    "export PIP_CACHE_DIR=<folder there>": "",
    "export PIP_CACHE_DIR=<folder on the large disk>": "",
    "export PIP_NO_CACHE_DIR=1": "",
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
    "python -c 'import torch; print(torch.cuda.is_available())'": "e\n",
    "python -c 'import torch.distributed.constants as c; "
    "print(c.default_pg_timeout, c.default_pg_nccl_timeout)'": "0:30:00 0:10:00",
}
# Typed on a local Slurm cluster, in this order: on the login side, ...
ON_LOGIN = {
    "sinfo": "main",
    "scontrol show node": "ActiveFeatures=gpu",
    "scontrol create reservation ReservationName=course StartTime=<begin> Duration=08:00:00 "
    "NodeCnt=<nodes> Users=<users>": "Reservation created: course",
    "scontrol show reservation": "ReservationName=course",
    "salloc --reservation=course --nodes 2 --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=<acc_name>_g": "Granted job allocation",
    "squeue --reservation=course": "JOBID",
    "sbatch -N 2 --ntasks-per-node=4 --cpus-per-task=32 -C gpu --gpus-per-node 4 -t 30 "
    "-A <acc_name>_g scripts/sbatch_run.sh 9": "Submitted batch job",
    "sbatch -N 2 --ntasks-per-node=4 --cpus-per-task=32 -C gpu --gpus-per-node 4 -t 30 "
    "-A <acc_name>_g scripts/sbatch_run.sh 10": "Submitted batch job",
    "scontrol show job <job>": "JobState=",
    "scancel <job>": "",
}
# ... and in the shell that the line of README.md opens.
IN_JOB = {
    "srun hostname": "node2",
    "srun --pty bash": "on node1",
    "srun getent hosts node1": "node1",
    "srun ip -brief address": "eth0",
    "ip -brief address": "lo",
    "squeue --me": "node[1-2]",
    "scontrol show hostnames": "node1\nnode2",
    "exit": "",
}
SALLOC = (
    "salloc --nodes 2 --qos interactive --time 00:30:00 --ntasks-per-node=4 --cpus-per-task=32 "
    "--constraint gpu --gpus-per-node 4 --account=<acc_name>_g"
)
# Run by a test, at least with other numbers: {file::test: commands}. A lesson started as
# course.toml says is run by the test named after it.
BY_TEST = {
    "test_scripts.py::test_run_course_shows_the_proof_of_each_lesson": [
        "run_course.sh",
        "./scripts/run_course.sh",
        "./scripts/run_course.sh 0",
        "./scripts/run_course.sh 4 6",
        "./scripts/run_course.sh day1",
    ],
    "test_readme.py::test_the_shell_says": ["PYTHON=python3.12 ./scripts/run_course.sh"],
    "test_lessons.py::test_lesson_4_shares_the_images_and_equals_one_process": [
        "python day1/4_mnist_manual_ddp.py 2",
        "python day1/4_mnist_manual_ddp.py 2 --epochs 1 --max-steps 5",
    ],
    "test_lessons.py::test_lesson_5_says_where_the_time_goes": [
        "python day1/5_mnist_manual_ddp_profile.py --max-steps 40"
    ],
    "test_lessons.py::test_lesson_6_gives_the_losses_of_lessons_2_and_4": [
        "python day1/6_mnist_ddp_pt.py 2",
        "python day1/6_mnist_ddp_pt.py 2 --epochs 1 --max-steps 5",
    ],
    "test_lessons.py::test_lesson_7_times_the_same_work_twice": [
        "CUDA_VISIBLE_DEVICES= python day1/7_mnist_ddp_pt_timing.py 2"
    ],
    "test_lessons.py::test_lesson_8_runs_at_every_size": [
        "python day1/8_mnist_ddp_pt_lr.py 2",
        "python day1/8_mnist_ddp_pt_lr.py 4",
    ],
    "test_lessons.py::test_torchrun_can_start_a_lesson_too": [
        "torchrun --standalone --nproc-per-node=2 day1/6_mnist_ddp_pt.py"
    ],
    "test_readme.py::test_the_lessons_say": ["python day2/9_torch_dist_multi_node.py"],
    "test_nodes.py::test_lesson_9_on_imitated_nodes": [
        "scripts/multinode_setup_and_run.sh --local 2x2 9",
    ],
    "test_nodes.py::test_monitor_notes_how_busy_each_node_is": [
        "scripts/multinode_setup_and_run.sh --local 2x2 --monitor 9",
    ],
    "test_nodes.py::test_lesson_10_on_imitated_nodes_has_the_losses_of_one_node": [
        "scripts/multinode_setup_and_run.sh --local 2x2 10"
    ],
    "test_nodes.py::test_the_salloc_line_and_lesson_9": [
        SALLOC,
        "scripts/multinode_setup_and_run.sh",
        "scripts/multinode_setup_and_run.sh 9",
    ],
    "test_nodes.py::test_lesson_10_on_two_nodes_has_the_losses_of_one": [
        "scripts/multinode_setup_and_run.sh 10"
    ],
    "test_nodes.py::test_torchrun_on_two_nodes": [
        "scripts/multinode_setup_and_run.sh --torchrun 9"
    ],
    "test_nodes.py::test_lesson_11_by_sbatch_writes_to_logs": [
        "scripts/multinode_setup_and_run.sh 11",
        "scripts/sbatch_run.sh",
    ],
    "test_nodes.py::test_a_cluster_leaves_nothing_behind": [
        "scripts/local_slurm.sh",
        "scripts/local_slurm.sh up 2",
        "scripts/local_slurm.sh shell",
        "scripts/local_slurm.sh down",
    ],
    "test_nodes.py::test_srun_itself_may_call_the_launcher_and_a_slow_link_shows": [
        "scripts/local_slurm.sh link 1gbit",
        "scripts/local_slurm.sh link 1gbit 0.2ms",
        "scripts/local_slurm.sh link off",
    ],
    "test_doctor.py::test_all_is_well_on_imitated_nodes": ["scripts/doctor.sh --local 2x1"],
    "test_doctor.py::test_all_is_well_on_the_nodes_of_a_cluster": ["scripts/doctor.sh"],
    "test_streaming.py::mnist_file": ["python day2/create_mnist_h5.py"],
    "test_streaming.py::test_gzip_copies_and_chunks": [
        "python day2/create_mnist_h5.py --copies 20 --file data/mnist20.h5",
        "python day2/create_mnist_h5.py --gzip 4 --file data/mnist_gzip.h5",
    ],
    "test_streaming.py::test_lesson_11_learns_the_same_from_the_file_as_from_memory": [
        "scripts/multinode_setup_and_run.sh --local 2x2 11"
    ],
    "test_streaming.py::test_lesson_11_measures_the_whole_test_set": [
        "scripts/multinode_setup_and_run.sh --local 2x2 11 --file data/mnist20.h5 --stream-only "
        "--epochs 1"
    ],
    "test_exercises.py::test_a_file_run_by_hand_shows_the_symptom": [
        "python day1/exercises/0.2_waits_for_ever.py",
        "python day1/exercises/4.1_more_ranks_worse.py",
        "python day2/exercises/10.1_another_accuracy.py",
    ],
    "test_exercises.py::test_the_file_as_given_fails_with_the_message_meant_for_it": [
        "python scripts/check.py 4.1",
        "python scripts/check.py 10.1",
    ],
    "test_exercises.py::test_hints_come_one_at_a_time": [
        "python scripts/check.py 4.1 --hint",
        "python scripts/check.py 10.1 --hint",
    ],
    "test_lesson_12.py::test_ranks_that_are_killed_change_nothing": [
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 "
        "--max-restarts=3 day2/12_mnist_ddp_torchrun_elastic.py --crash-at-step 100",
        "scripts/multinode_setup_and_run.sh --local 2x2 --max-restarts 3 12 --crash-at-step 100",
    ],
    "test_lesson_12.py::test_a_failing_rank_on_two_nodes_of_slurm": [
        "scripts/multinode_setup_and_run.sh --max-restarts 3 12 --crash-at-step 100"
    ],
    "test_lesson_12.py::test_stopped_by_a_signal_it_goes_on_with_another_number_of_ranks": [
        "kill -TERM"
    ],
    "test_lesson_13.py::test_two_nodes_of_a_real_slurm_learn_what_one_process_does": [
        "scripts/multinode_setup_and_run.sh 13"
    ],
    "test_lesson_15.py::test_on_two_nodes_of_slurm": ["scripts/multinode_setup_and_run.sh 15"],
    "test_lesson_14.py::test_two_nodes_of_slurm_give_the_same_model": [
        "scripts/multinode_setup_and_run.sh 14",
    ],
    "test_lesson_14.py::test_memory_does_not_grow_with_the_ratings": [
        "scripts/multinode_setup_and_run.sh --local 1 14 --batch-size 4096",
        "scripts/multinode_setup_and_run.sh --local 1 14 --folder data/ratings200 --batch-size 4096"
        " --epochs 1",
    ],
    "test_lesson_14.py::test_a_csv_becomes_files_of_even_size_in_random_order": [
        "python day2/create_ratings.py",
        "python day2/create_ratings.py --copies 200 --folder data/ratings200",
        "python day2/create_ratings.py --force --csv data/ml-latest-small/ratings.csv",
    ],
    "test_lesson_14.py::test_an_archive_is_unpacked_and_a_damaged_one_is_not": [
        "python scripts/get_movielens.py",
    ],
    "test_lesson_16.py::test_on_a_slow_link_powersgd_is_faster_and_learns_as_well": [
        "scripts/local_slurm.sh link 100mbit",
        "salloc --nodes 2 scripts/multinode_setup_and_run.sh 16",
        "scripts/multinode_setup_and_run.sh 16",
    ],
    "test_lesson_17.py::test_two_nodes_of_a_real_slurm_go_on_where_four_ranks_stopped": [
        "scripts/multinode_setup_and_run.sh 17",
        "scripts/multinode_setup_and_run.sh --local 2x1 17 --resume",
    ],
    "test_traces.py::test_perfetto_shows_all_ranks_and_asks_nobody_else": [
        "python scripts/view_traces.py",
        "python scripts/view_traces.py log",
    ],
    "test_benchmark.py::tiny": ["python scripts/benchmark.py --only data all_reduce"],
    "test_slides.py::test_excerpts_and_figures_are_current": [
        "python slides/excerpts.py",
        "python slides/figures/draw.py",
    ],
    "test_slides.py::test_the_slides_can_be_built_and_nothing_is_cut_off": [
        "slides/build.sh",
        "slides/build.sh --html",
    ],
    "test_readme.py::test_tensorboard_starts": [
        "tensorboard --logdir runs",
        "tensorboard --logdir=./log_ddp",
    ],
    "test_readme.py::test_the_guide_shows_where_the_ranks_stand": [
        "python -X faulthandler day1/0_torch_dist.py",
        "kill -ABRT <pid>",
    ],
    "test_readme.py::test_a_hang_on_several_nodes_can_be_read": [
        "sed 's/^    dist.all_reduce(value/    dist.get_rank() == 1 or dist.all_reduce(value/' "
        "day2/9_torch_dist_multi_node.py > hang.py",
        "DIST_TIMEOUT=10 scripts/multinode_setup_and_run.sh --local 3 hang.py",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL scripts/multinode_setup_and_run.sh --local 3 hang.py",
        "PYTHONFAULTHANDLER=1 scripts/multinode_setup_and_run.sh --local 3 hang.py",
        "pgrep -u $USER -af hang.py",
    ],
    "test_readme.py::test_output_comes_late_unless_told_otherwise": [
        "python -u",
        "python -u day1/0_torch_dist.py",
        "print(..., flush=True)",
        "PYTHONUNBUFFERED=1",
    ],
    "faults/test_processes.py::test_a_stopped_rank_is_seen_by_the_timeout": ["DIST_TIMEOUT=10"],
    "test_readme.py::test_the_variables_act": [
        "OMP_NUM_THREADS=1 python day1/0_torch_dist.py",
        "OMP_NUM_THREADS=1",
        "TORCH_CPP_LOG_LEVEL=INFO",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "GLOO_SOCKET_IFNAME=eth0",
    ],
}
# Run by continuous integration on every change: .ci/run holds them.
BY_CI = [
    "./scripts/run_tests.sh",
    "scripts/local_slurm.sh install",
    "pip install pre-commit",
    "pre-commit run --all-files",
    "apt-get install chromium nodejs npm fonts-dejavu-core fonts-liberation",
]
# Not run by a test: {what it needs: commands}.
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
        "mkdir flight",
        "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        "export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=flight/rank_",
        "accelerate launch --num_processes 2 day2/15_linear_accelerate.py",
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
    ],
    "py-spy, which the course does not install": [
        "pip install py-spy",
        "py-spy dump --subprocesses --pid <pid>",
        "py-spy dump --pid <pid>",
        "srun --overlap --jobid <job> --nodelist node2",
    ],
    "minutes, and a machine with nothing else to do": [
        "python scripts/update_docs.py --faults",
        "python tests/soak.py",
        "python scripts/update_docs.py --record",
        "python scripts/read_speed.py",
        "python scripts/benchmark.py",
        "python scripts/benchmark.py --seconds 100",
    ],
    "two more formats, which the course does not install": ["pip install webdataset lmdb"],
    "nobody: the text warns of it": ["killall python"],
}
# What stands for a word of the user's own.
WORDS = {
    "<acc_name>": "abc",
    "<address of this repository>": ".",
    "<folder of the instructor>": "folder",
    "<folder there>": "/tmp",
    "<folder on the large disk>": "/tmp",
    "<pid>": "$(sleep 60 >/dev/null & echo $!)",
    "<begin>": "now",
    "<nodes>": "2",
    "<users>": "root",
    "<job>": "$(squeue --me --sort=-i -ho %i | head -n 1)",
}


def table(text, heading):
    """Return the rows, lists of cells, of all tables in a part of a page."""
    part = f"\n{text}".partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
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
    if "\n## Cheat sheet\n" in text:
        for row in table(text, "Cheat sheet"):
            found += code_in(row[0] if row[0].startswith("`") else row[-1])
    return found


def by_lesson(command):
    """Return whether a command starts a lesson as course.toml does, with its path or number.

    test_lessons.py, test_nodes.py and test_streaming.py run each lesson.
    """
    for name, lesson in LESSONS.items():
        if lesson.get("nodes"):
            start = ["scripts/multinode_setup_and_run.sh", "--local", "2x2"]
            start += lesson.get("launcher", [])
            known = [" ".join([*start, x, *lesson["arguments"]]) for x in (lesson["file"], name)]
        else:
            known = [" ".join(["python", lesson["file"], *lesson["arguments"]])]
        if command in known:
            return True
    return False


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


def source_of_test(name):
    file, _, function = name.partition("::")
    assert function in functions_of(file), f"there is no {name}"
    return functions_of(file)[function]


def test_every_command_is_held():
    written = {command for page in PAGES for command in commands_in(page)}
    assert len(written) > 100
    groups = [QUICK, SLOW, ON_LOGIN, IN_JOB, BY_CI, *BY_TEST.values(), *NEEDS.values()]
    count = Counter(command for group in groups for command in group)
    held = set(count)
    unknown = {command for command in written - held if not by_lesson(command)}
    assert not unknown, f"add to a list in test_readme.py how these are held: {unknown}"
    assert not held - written, "no README has these any more"
    assert [command for command in count if count[command] > 1] == []
    for name in BY_TEST:
        source_of_test(name)
    ci = (ROOT / ".ci" / "run").read_text()
    for command in BY_CI:
        words = set(command.removeprefix("./").split()) - {"apt-get"}
        assert all(word in ci for word in words), command


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the repository as it was cloned, and an environment without packages."""
    folder = tmp_path_factory.mktemp("cloned") / "my course"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", ".cache", "__pycache__", "node_modules", "runs", "log*", "*.h5", "*.html"
    )
    shutil.copytree(ROOT, folder, ignore=ignore)
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@here"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *command], check=True, timeout=60)
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
    for command, expected in QUICK.items():
        status, output = type_in(command, course)
        usual = 1 if command.startswith("diff ") else 0
        assert (status, expected in output) == (usual, True), f"{command}\n{output}"
    assert (course / "course" / "README.md").exists()


@pytest.mark.parametrize("command", SLOW)
def test_slow_commands_can_be_typed(command, course):
    status, output = type_in(command, course)
    assert SLOW[command] in output, output
    assert status == ("0.2_waits" in command), output


def lines_of(commands):
    """Return lines for a shell that type some commands, with a line before each."""
    terminal = "script -qec 'srun --pty bash' /dev/null <<< $'echo on $(hostname)\\nexit'"
    text = ""
    for command in commands:
        typed = terminal if "--pty" in command else f"{command} </dev/null"
        for word, instead in WORDS.items():
            typed = typed.replace(word, instead)
        text += f"echo '--- {command}'\n{typed}\n"
    return text


def test_commands_can_be_typed_on_a_cluster(slurm, course):
    line = SALLOC.replace("<acc_name>", "abc").split()
    for commands, shell in ((ON_LOGIN, ["bash"]), (IN_JOB, ["env", "SHELL=/bin/bash", *line])):
        done = slurm.run(
            "sh", "-c", '"$@" 2>&1', "sh", *shell, cwd=course, input=lines_of(commands)
        )
        slurm.run("scancel", "--me")
        slurm.run("scontrol", "delete", "ReservationName=course")
        said = dict(re.findall(r"^--- (.*)\n((?:(?!--- ).*\n)*)", done.stdout, re.M))
        assert list(said) == list(commands), done.stdout
        for command, expected in commands.items():
            assert expected in said[command], done.stdout


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
    commands = BY_TEST["test_readme.py::test_tensorboard_starts"]
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


def test_the_guide_shows_where_the_ranks_stand(tmp_path):
    """Two of the ways of day1/GUIDE.md, on exercise 0.2 with a longer timeout."""
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
    job = start(sys.executable, "-X", "faulthandler", file, cwd=tmp_path)
    output = ""
    try:
        while output.count("Timeout (0:00:01)!") < 4 or f"line {place} in report" not in output:
            line = job.stdout.readline()
            assert line, output
            output += line
        lines = subprocess.run(
            ["pgrep", "-s", str(job.pid), "-af", "forkserver"], capture_output=True, text=True
        ).stdout.splitlines()
        assert len(lines) == 5  # the parent, then the ranks
        os.kill(int(lines[1].split()[0]), signal.SIGABRT)
        output = job.communicate(timeout=20)[0]
    finally:
        end(job)
    assert "Fatal Python error: Aborted" in output
    assert f"line {place} in report" in output


def test_a_hang_on_several_nodes_can_be_read(course):
    make, timed_out, compared, standing, find = BY_TEST[
        "test_readme.py::test_a_hang_on_several_nodes_can_be_read"
    ]
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
    assert (
        "Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0, OpType=_ALLGATHER_BASE"
    ) in output
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


def test_output_comes_late_unless_told_otherwise(tmp_path):
    code = "import time; print('now'{}); time.sleep(20)"
    late, *prompt = (
        start(sys.executable, *options, "-c", code.format(more), cwd=tmp_path, **env)
        for options, more, env in (
            ((), "", {"PYTHONUNBUFFERED": ""}),
            (("-u",), "", {}),
            ((), ", flush=True", {}),
            ((), "", {"PYTHONUNBUFFERED": "1"}),
        )
    )
    assert [process.stdout.readline() for process in prompt] == ["now\n"] * 3
    assert [end(process) for process in (late, *prompt)] == [""] * 4  # it never came


def test_the_variables_act(course):
    launcher = "scripts/multinode_setup_and_run.sh --local 2x2 --dry-run 9"
    assert "each rank: 7 threads" in type_in(f"OMP_NUM_THREADS=7 {launcher}", course)[1]
    assert "interface eth7" in type_in(f"GLOO_SOCKET_IFNAME=eth7 {launcher}", course)[1]
    (lesson,) = (x for x in BY_TEST["test_readme.py::test_the_variables_act"] if " " in x)
    _, output = type_in(lesson, course, TORCH_CPP_LOG_LEVEL="INFO")
    assert "[c10d]" in output
    assert "=> every rank holds the sum 0+1+2+3 = 6" in output
    debug = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    assert any(command.startswith(debug) for command in SLOW)  # it is seen there


# Each symptom in the tables of troubles, and where it is seen. A function below, which must say
# the words; a test or a file, in which they must stand; or "needs", marked so in the table.
SYMPTOMS = {
    # README.md
    "`No module named 'torch'`, `torchrun: command not found`": "shell",
    "`There is no python3 here`, `Python 3.11 or newer is needed`": "shell",
    "`No space left on device`": "shell",
    "`module 'torch' has no attribute 'accelerator'`": "needs: with torch before 2.6",
    "`The NVIDIA driver on your system is too old`": "needs: with GPUs",
    "`... is missing or damaged. Restore it: git checkout data/MNIST`": (
        "faults/test_data.py::test_missing_or_damaged_data_gets_one_sentence"
    ),
    "`fatal: not a git repository`": "shell",
    "`There is no lesson 'day7'`": "shell",
    "`error: unrecognized arguments`": "lessons",
    "`processes must be greater than 0, not 0`": "lessons",
    "`-- Process 2 terminated with the following error:`": (
        "faults/test_processes.py::test_a_rank_of_day_1_raises_while_another_waits"
    ),
    "`process 2 terminated with signal SIGKILL`": (
        "faults/test_processes.py::test_a_rank_of_day_1_is_killed"
    ),
    "`Connection closed by peer`": "torch",
    "Nothing for 60 s, then `Timed out waiting 60000ms for recv operation to complete`": "torch",
    "`Ranks 1, 2, 3 failed to pass monitoredBarrier`": (
        "test_readme.py::test_slow_commands_can_be_typed"
    ),
    "`Detected mismatch between collectives on ranks`": "torch",
    "`CUDA out of memory`": "needs: with GPUs",
    "`Duplicate GPU detected`": "needs: with GPUs",
    "`WRONG: not every rank holds`, `DIFFERENT models`": "files",
    "`its proof line is missing or wrong`": (
        "test_scripts.py::test_run_course_fails_when_a_lesson_does"
    ),
    "`stopped after 300 s`": "shell",
    "A number below 1 before `times the images/s of one process`": "files",
    "With more processes, the loss is higher and the accuracy lower": (
        "test_lessons.py::test_lesson_8_scaling_brings_the_loss_curve_closer"
    ),
    "Lines about `ActivityProfiler`": "torch",
    "Into a file or through a pipe, all output comes at the end": (
        "test_readme.py::test_output_comes_late_unless_told_otherwise"
    ),
    "`TensorBoard could not bind to port 6006, it was already in use`": "tensorboard",
    "TensorBoard shows `No dashboards are active for the current data set.`": "files",
    "In TensorBoard, the trace page shows a spinner for ever": "files",
    "`Stale: day1/README.md. Run: python scripts/update_docs.py`": "shell",
    # day2/README.md
    "`salloc: command not found`": "shell",
    "`acc_name: No such file or directory`": "shell",
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
    "`is there already. To write it anew: --force`": (
        "test_streaming.py::test_a_file_that_is_there_stays_unless_forced"
    ),
    "`filter returned failure during read`": (
        "test_streaming.py::test_damage_inside_a_chunk_is_noticed"
    ),
    "`message: address already in use`, or "
    "`is in use. Choose another one: export MASTER_PORT=29501`": "torch",
    "A job meets ranks that are not its own, or misses one of its own": (
        "test_nodes.py::test_two_jobs_at_the_same_time_do_not_meet"
    ),
    "Started by hand, torchrun waits for minutes and says nothing": "torchrun",
    "Nothing for 60 s, then `The client socket has timed out after 60000ms while trying to "
    "connect to`": "torch",
    "`Gloo connectFullMesh failed`, `Connection refused, remote=[127.0.0.1]` or `[127.0.1.1]`": (
        "slurm"
    ),
    "`Unable to find address for: eth9`": "torch",
    "`The hostname of the client socket cannot be retrieved`": "torch",
    "NCCL is slow or stops at the start, and each rank sees one GPU only": "needs: with GPUs",
    "NCCL is slow between nodes": "needs: with GPUs",
    "All stand still; after 60 s `Watchdog caught collective operation timeout`": (
        "needs: with GPUs"
    ),
    "No error until the end, but a poor model": "torch",
    "All ranks are slow, although only one node is busy with something else": (
        "test_nodes.py::test_lesson_9_on_imitated_nodes"
    ),
    "`ended with signal KILL`": ("faults/test_processes.py::test_a_rank_on_a_node_is_killed"),
    "`User defined signal 1`, shortly before the time is over": "slurm",
    "`DUE TO TIME LIMIT`": "slurm",
    "`snapshot.pt is of a job with other arguments. Repeat those, or delete`": (
        "test_lesson_12.py::test_stopped_by_a_signal_it_goes_on_with_another_number_of_ranks"
    ),
}
MARK = re.compile(r" \((only with(?:out)? [^()]+)\)$")


def symptoms():
    """Return {symptom without its mark: mark} of all tables of troubles."""
    rows = table((ROOT / "README.md").read_text(), "Troubleshooting")
    rows += table((ROOT / "day2" / "README.md").read_text(), "When it does not work")
    names = [row[0] for row in rows if row[0] != "symptom"]
    assert len(names) == len(set(names)), "a symptom stands in two rows"
    marks = {name: MARK.search(name) for name in names}
    return {MARK.sub("", name): mark and mark[1] for name, mark in marks.items()}


def normal(text):
    """Return a text with each number, and each {expression} of an f-string, as #."""
    return re.sub(r"\d+|{[^{}]*}", "#", text)


def assert_said(holder, said):
    """Assert that a text has the words of all symptoms with this holder."""
    for symptom in (x for x in SYMPTOMS if SYMPTOMS[x] == holder):
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
            source = source_of_test(holder)
            if holder == "test_readme.py::test_slow_commands_can_be_typed":
                source = " ".join(SLOW.values())
            assert_said(holder, source)
        elif not needs:
            assert f"test_the_{holder}_say" in " ".join(functions_of("test_readme.py"))


def test_the_table_of_faults_is_that_of_the_tests():
    """A row for each fault that a test names, and no other."""
    page = (ROOT / "README.md").read_text()
    rows = [row for row in table(page, "When it goes wrong")[1:] if not row[0].startswith("**")]
    written, named = {fault for row in rows for fault in row[0].split("; ")}, []
    files = set((ROOT / "tests" / "faults").glob("test_*.py"))
    texts = [x.read_text() for x in files if x.stem != "test_catalogue"]
    everything = "".join(texts)  # some stand in the parameters of a test
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
        assert known or fault in everything, fault


def test_the_shell_says(course, tmp_path):
    old = tmp_path / "old" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    copy = tmp_path / "copy"
    shutil.copytree(course, copy, ignore=shutil.ignore_patterns(".git", ".venv"))
    lessons = copy / "scripts" / "course.toml"
    lessons.write_text(re.sub(r"^seconds = \d+", "seconds = 0", lessons.read_text(), flags=re.M))
    (copy / "day1" / "0_torch_dist.py").open("a").write("# changed\n")
    nothing = f"PATH={tmp_path}"
    launcher = "scripts/multinode_setup_and_run.sh"
    commands = [
        "python -S day1/0_torch_dist.py",
        f"{nothing}; torchrun --standalone day1/0_torch_dist.py",
        f"{nothing}; salloc --nodes 2",
        "PYTHON=python9 ./scripts/run_course.sh",
        f"PYTHON={old} ./scripts/run_course.sh",
        "echo full > /dev/full",
        "GIT_CEILING_DIRECTORIES=/ git checkout data/MNIST",
        "./scripts/run_course.sh day7",
        "./scripts/run_course.sh 0",
        "python scripts/update_docs.py --check",
        SALLOC,
        f"{launcher} 9",
        f"PATH={old.parent}:$PATH; unset PYTHON; {launcher} --local 2 9",
    ]
    said = ""
    for command in commands:
        status, output = type_in(command, copy, literally=True)
        assert status, f"{command}\n{output}"
        said += output
    assert_said("shell", said)


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
    alone = subprocess.run([*inside, "true"], capture_output=True).returncode == 0
    command = [*inside, *command, "10.9.9.9"] if alone else command
    job = start(*command, cwd=tmp_path, KINETO_LOG_LEVEL="0")
    said = job.communicate(timeout=100)[0]
    assert job.returncode == 0, said
    steps = said.partition("no error until the end\n")[2].splitlines()[:6]
    assert steps[:5] == [f"step {i} done" for i in range(5)]
    assert "Timed out waiting" in steps[5]
    launcher = (ROOT / "scripts" / "multinode_setup_and_run.sh").read_text()
    words = "is in use. Choose another one: export MASTER_PORT=29501"
    assert words in launcher
    if not alone:
        said += NAMELESS
    assert_said("torch", said + words)
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
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        done = [*pool.map(lambda command: slurm.run(*map(str, command), cwd=tmp_path), commands)]
    assert [x.returncode != 0 for x in done] == [command[-2] != "--dry-run" for command in commands]
    assert_said("slurm", "".join(x.stdout + x.stderr for x in done))


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


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


def test_the_agenda_is_that_of_the_slides():
    cells = table((ROOT / "slides" / "TEACHING.md").read_text(), "Agenda")
    days = " ".join(" | ".join(row) + "\n" for row in cells).split("begin | part | minutes\n")[1:]
    for deck, text in zip(("day1", "day2", "beyond"), days, strict=True):
        rows = re.findall(r"(\d\d):(\d\d) \| ([\w -]+) \| (\d+)", text)
        clock = 9 * 60
        for hour, minute, _, minutes in rows:
            assert int(hour) * 60 + int(minute) == clock
            clock += int(minutes)
        slide = (ROOT / "slides" / f"{deck}.md").read_text().split("\n---\n")[2]
        shown = re.findall(r"\| (\w[\w -]*) \| (\d+)(?= \|)", slide)
        assert shown
        assert Counter((part, minutes) for _, _, part, minutes in rows) == Counter(shown)


def test_the_run_times_are_those_of_lessons():
    rows = table((ROOT / "slides" / "TEACHING.md").read_text(), "How long the lessons run")[1:]
    names = [name for name, _ in rows]
    assert names
    assert names == [name for name in LESSONS if name in names]
    assert all(0 < float(seconds) < 300 for _, seconds in rows)


# Abbreviations that are names, or explained where they stand.
NAMES = {
    "DETAIL",
    "DIFFERENT",
    "FSDP2",
    "INFO",
    "LICENSE",
    "MIT",
    "MPI",
    "NVIDIA",
    "PDF",
    "README",
    "SUM",
    "TODO",
    "WSL",
    "XPU",
}


def test_the_glossary_has_the_words_of_the_course():
    rows = table((ROOT / "README.md").read_text(), "Glossary")[1:]
    names = [name for name, _ in rows]
    assert names == sorted(names, key=str.lower)
    explained = " ".join(" ".join(row) for row in rows)
    short, terms = set(), set()
    for page in [*PAGES, *ROOT.glob("slides/[bd]*.md")]:
        text = FENCE.sub("", page.read_text())
        if "\n## Words of the day\n" in text:
            terms |= {row[0] for row in table(text, "Words of the day")[1:]}
        terms |= set(re.findall(r"(?<=\w )\*\*([a-z][a-z ]*)\*\*", text))  # bold where explained
        text = re.sub(r"<!--.*?-->|\]\(\S+\)|<\S+>|`[^`\n]*`", "", text, flags=re.S)
        short |= set(re.findall(r"(?<!_)\b[A-Z][A-Z0-9]{2,}\b(?!_)", text))
    assert {"chunks", "nodes", "world size"} < terms
    assert {x for x in short - NAMES if not re.search(rf"\b{x}s?\b", explained, re.I)} == set()
    known = " ".join(names).lower()
    assert {x for x in terms if x.lower().removesuffix("s") not in known} == set()


def test_the_cheat_sheet_prints_on_one_page(tmp_path):
    import markdown

    browser = os.environ.get("CHROME_PATH", "chromium")
    if shutil.which(browser) is None or shutil.which("pdfinfo") is None:
        cannot("needs chromium and pdfinfo")
    part = (ROOT / "README.md").read_text().partition("\n## Cheat sheet\n")[2].partition("\n## ")[0]
    page = tmp_path / "page.html"
    assert "with a scale of 60%" in part
    style = """@page {size: A4; margin: 1cm}
      body {zoom: 0.6; font: 16px/1.5 sans-serif; margin: 0}
      table {border-collapse: collapse; margin-bottom: 16px}
      td, th {padding: 6px 13px; border: 1px solid}
      code {font: 85%/1.4 monospace; padding: 0.2em 0.4em}"""  # about as GitHub has it
    page.write_text(f"<style>{style}</style>{markdown.markdown(part, extensions=['tables'])}")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    command += [f"--user-data-dir={tmp_path}/browser", f"--print-to-pdf={tmp_path}/page.pdf", page]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    info = subprocess.run(["pdfinfo", tmp_path / "page.pdf"], capture_output=True, text=True)
    assert re.search(r"^Pages: +1$", info.stdout, re.M), info.stdout
