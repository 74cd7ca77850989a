"""The launcher on simulated nodes: it starts ranks, names the first to fail, divides GPUs."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import processes
import pytest
from launcher import gpus
from support.run import (
    BEGIN,
    IMPORT,
    LAUNCHER,
    ROOT,
    launch,
    output_of,
    wait_without_trouble,
)


def test_each_rank_gets_its_variables_and_all_arguments(launch_ranks, monkeypatch):
    for name in ("MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    text = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS MASTER_ADDR MASTER_PORT"
ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # Slurm's warning comes too early
row = [*(os.environ[name] for name in names.split()), ignored, sys.argv[1:]]
os.write(1, (" ".join(map(str, row)) + "\\n").encode())
"""
    with launch_ranks(text, "2x3") as job:
        wait_without_trouble(job)
    assert (job.status, job.errors) == (0, "")
    port = re.search(r"^rendezvous: 127\.0\.0\.1:(\d+), interface lo", job.output, re.M)[1]
    rows = sorted(job.output.splitlines()[3:])
    threads = max(1, len(os.sched_getaffinity(0)) // 6)
    rest = f"6 3 {threads} 127.0.0.1 {port} True ['a b', '--', '-x']"
    assert rows == [f"{rank} {rank % 3} {rest}" for rank in range(6)]


# What a file sees, and what it says of an error.
SEEN = """import os, sys, torch
print(sys.argv, sys.path, __file__, __name__, __spec__, os.getcwd(), sys.stdin.read())
print(torch.get_num_threads())
raise ValueError("ouch")
"""


def test_a_forked_rank_sees_and_says_what_python_shows_it(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    file = tmp_path / "day2" / "seen.py"
    file.parent.mkdir()
    file.write_text(SEEN)
    options = {"cwd": tmp_path, "env": os.environ | {"OMP_NUM_THREADS": "3"}, "stderr": -1}
    alone = processes.run([sys.executable, "-u", file, "a b"], 100, **options)
    command = [tmp_path / "scripts" / LAUNCHER.name, "--local", 1, file, "a b"]
    forked = processes.run(command, 100, **options)
    assert (forked.status, forked.output.splitlines()[3:]) == (1, alone.output.splitlines())
    *said, last = forked.errors.splitlines()
    assert said == alone.errors.splitlines()
    assert last.startswith("The first to fail: rank 0 ")


def test_what_the_user_has_set_stays_and_a_lesson_is_found_by_its_name(tmp_path):
    env = {"MASTER_PORT": "1234", "OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"}
    lesson = ("9_torch_dist_multi_node.py", "a b")
    output = output_of(launch("--local", "2", "--dry-run", *lesson, cwd=tmp_path, env=env))
    assert "rendezvous: 127.0.0.1:1234, interface eth9\neach rank: OMP_NUM_THREADS=7 " in output
    command = shlex.split(output.splitlines()[-1])
    assert command[-2:] == [str(ROOT / "day2" / "9_torch_dist_multi_node.py"), "a b"]


# Of a task that srun has started.
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        ((), {}, "Name a lesson, for example: "),
        (("--local", "2x", "9"), {}, "--local: must be N or NxM"),
        (("--local", "1000x2", "9"), {}, "--local: more than 1000 ranks are too many for one"),
        (("--max-restarts", "-1", "9"), {}, "--max-restarts: must be 0 or more"),
        (("--local", "2", "9"), {"DIST_TIMEOUT": "abc"}, "DIST_TIMEOUT is abc, not a number"),
        (("--locale", "9"), {}, "There is no option --locale"),
        (("--local", "1", "nothing.py"), {}, "There is no lesson and no file 'nothing.py'"),
        (("9",), {"SLURM_JOB_ID": "7"}, "SLURM_JOB_ID is 7, but SLURM_JOB_NODELIST is not set, so"),
        (("9",), STEP, "srun started this script, but it calls srun itself. Start it without"),
    ],
)
def test_bad_input_gets_one_message(arguments, env, sentence, tmp_path):
    output = output_of(launch(*arguments, cwd=tmp_path, env=env), 1)
    assert len(output.splitlines()) == 1
    assert output.startswith(sentence)


def test_a_node_without_python_says_so(tmp_path):
    """Its .venv lies on a disk that this node does not see, or no module is loaded."""
    for name in ("bash", "dirname", "hostname", "head"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    command = shutil.copytree(LAUNCHER.parent, tmp_path / "scripts") / LAUNCHER.name
    env = {"PATH": str(tmp_path), "PYTHON": "python-of-a-module"}
    done = subprocess.run([command, "9"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("No Python with torch on ")


def test_the_first_to_fail_is_named_though_others_fail_later(launch_ranks):
    """And it is the first in time, not in number; its exit status is the launcher's."""
    text = """
if rank == 2:
    after("ready0", "ready1")
    os._exit(5)  # at once: the others fail half a second later
done(f"ready{rank}")
after("ready0", "ready1")
time.sleep(0.5)
print(f"rank {rank} fails because of it", file=sys.stderr)
sys.exit(3)
"""
    with launch_ranks(text, "3") as job:
        wait_without_trouble(job)
    *others, last = job.errors.splitlines()
    assert sorted(others) == [f"rank {rank} fails because of it" for rank in (0, 1)]
    assert last == "The first to fail: rank 2 on simulated node 2 ended with exit status 5."
    assert job.status == 5


@pytest.mark.parametrize("status", [os.EX_UNAVAILABLE, os.EX_TEMPFAIL])
def test_a_status_that_is_no_failure_is_handed_on_and_nobody_is_named(status, launch_ranks):
    text = f"""
if rank == 1:
    sys.exit(print("This machine has no wheels.", file=sys.stderr) or {status})
time.sleep(600)
"""
    with launch_ranks(text) as job:
        wait_without_trouble(job)
    assert (job.status, job.errors) == (status, "This machine has no wheels.\n")


@pytest.mark.parametrize(
    ("nodes", "on", "seen"),
    [
        ("1x2", "2 GPUs", ["2,3", "2,3"]),  # as on a node: each sees all
        (2, "2 GPUs", ["2", "3"]),
        (3, "the CPU, because there are fewer GPUs than ranks", ["-1"] * 3),
    ],
)
def test_simulated_nodes_divide_the_gpus_that_the_user_has_left_visible(
    nodes, on, seen, tmp_path, monkeypatch
):
    for mask in gpus.MASKS:
        monkeypatch.delenv(mask, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    text = "os.write(1, f\"sees {os.environ['CUDA_VISIBLE_DEVICES']}\\n\".encode())"
    (tmp_path / "rank.py").write_text(BEGIN + text)
    code = "from launcher import launch, simulated_nodes\n"
    code += "simulated_nodes.find_gpus = lambda: ['CUDA_VISIBLE_DEVICES', '2', '3']\n"
    code += "sys.exit(launch.main())"
    command = [sys.executable, "-c", IMPORT + code, "--local", nodes, "rank.py"]
    job = processes.run(command, 100, cwd=tmp_path)
    assert f", on {on}\n" in job.output
    assert sorted(job.output.splitlines()[3:]) == [f"sees {gpus}" for gpus in seen]
