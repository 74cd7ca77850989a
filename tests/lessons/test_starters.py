"""Who starts the ranks, and how: each starter leaves out something else, or ends in its own way."""

import os
import pty
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from support.cases import arguments_of
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, full, load_lesson, output_of, proves, run


@pytest.mark.parametrize("lesson_id", ["6", "13", *(full(x) for x in ("9", "20"))])
def test_kubernetes_gives_no_local_rank(lesson_id, tmp_path, tmp_path_factory):
    options = arguments_of(lesson_id, tmp_path_factory)
    without = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    file = ROOT / LESSONS[lesson_id]["file"]
    output = output_of(run_ranks(2, file, *options, cwd=tmp_path, without=without))
    assert "ranks: 2, " in output
    assert proves(output)


def test_the_line_of_the_page_tells_the_ranks_of_mpirun_who_they_are(tmp_path):
    page = (ROOT / "day2" / "NODES.md").read_text()
    (line,) = re.findall("^mpirun -np 2 (bash -c '.* )train.py'$", page, re.M)
    file = str(ROOT / LESSONS["6"]["file"]).replace(" ", r"\ ")
    line += f"{file} --epochs 1 --max-steps 3'"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_LOCAL_RANK={0} OMPI_COMM_WORLD_SIZE=2 "
    both = f"{given.format(0)}{line} & {given.format(1)}{line} & wait"
    output = output_of(run(["bash", "-c", both], 200, tmp_path, env))
    assert "ranks: 2, " in output
    assert proves(output)


@pytest.mark.parametrize("lesson_id", ["6", full("20")])
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", full("PMI_SIZE")])
def test_copies_that_mpirun_has_started_do_not_train_alone(name, lesson_id, tmp_path):
    command = [sys.executable, ROOT / LESSONS[lesson_id]["file"]]
    said = output_of(run(command, 200, tmp_path, {name: "2"}), 1)
    assert re.fullmatch("mpirun has started this 2 times: .*\n", said)


@mock.patch.dict(os.environ, SLURM_STEP_NUM_TASKS="2")
def test_python_typed_in_a_shell_of_srun_is_the_only_rank():
    with mock.patch.object(sys.stdin, "isatty", return_value=True):
        load_lesson("13").name_rank()
    assert os.environ["WORLD_SIZE"] == "1"


@pytest.mark.full
def test_a_closed_terminal_costs_no_step(tmp_path):
    """Torchrun hears of it even under nohup; what the ranks print then gets an error."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / LESSONS["13"]["file"]), "1", "--data", "random", "--log-every", "1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, *command])
    said = b""
    while b"step 2 of " not in said:
        said += os.read(terminal, 10_000)
    os.close(terminal)
    os.waitpid(pid, 0)
    assert list(tmp_path.glob("runs/13_train/step-[0-9]*")), said.decode()
