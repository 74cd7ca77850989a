"""A real Slurm for the tests that need one, and what the surroundings must not change."""

import os
import signal
import subprocess
import sys

import processes
import pytest
import torch
from support.run import BEGIN, LAUNCHER
from support.slurm_cluster import bring_up

# In the background of a script, Ctrl-C is ignored, under nohup the end of the terminal, and every
# child inherits that. With a handler that does nothing, this process goes on ignoring it, and its
# children do not.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# The tests expect what lessons do on CPUs, so they hide a machine's GPUs. TEST_WITH_GPUS=1 doesn't.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
HIDDEN["ONEAPI_DEVICE_SELECTOR"] = "opencl:cpu"
if "TEST_WITH_GPUS" not in os.environ:
    os.environ.update(HIDDEN)

# What the tests start runs with the Python that runs them, whatever comes first in PATH.
os.environ["PYTHON"] = sys.executable

# Several tests run at a time. Threads that wait for each other would take the cores from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


# How the names begin of tests that other work on this machine can make fail: what they see depends
# on seconds. A test that only gives a process a generous time is none of them.
CLOCK = (
    # Ranks that wait 6 s for others; exercises and lessons that are stopped after 4 s.
    "test_a_stopped_rank_is_seen_by_the_timeout",
    "test_no_rank_waits_for_a_data_worker_for_ever",
    "test_what_somebody_may_write_is_judged",
    "test_a_check_that_is_stopped_leaves_no_process",
    "test_every_way_to_end_has_its_verdict",
    # A training that was killed starts again, and reads its data, within the limits of the lesson.
    "test_killed_it_resumes",
    # The doctor gives the ranks 20 s to meet, and to import the packages.
    "test_all_is_well_on_simulated_nodes",
    "test_what_is_wrong_is_said_all_at_once",
    "test_a_rank_that_cannot_send",
    # A rank fails half a second after another one.
    "test_the_first_to_fail_is_named",
    # What lessons 5 and 18 prove is a share of the time; how fast a slow link is; a node's silence.
    "test_a_lesson_prints_what_its_page_shows[5]",
    "test_a_lesson_prints_what_its_page_shows[18]",
    "test_a_lesson_runs_on_other_numbers_of_ranks[5-",
    "test_a_lesson_runs_on_other_numbers_of_ranks[18-",
    "test_torchrun_on_unequal_nodes_and_a_slow_link",
    "test_a_job_that_has_lost_a_node",
    "test_a_whole_node_is_lost",
)


def pytest_collection_modifyitems(items):
    """Begin with the tests that wait longest: otherwise all wait for the last of them."""
    items.sort(key=lambda item: item.path.parent.name != "slurm")
    for item in items:
        if item.name.startswith(CLOCK):
            item.add_marker("clock")


@pytest.fixture(scope="session")
def slurm():
    """A Slurm cluster of two nodes; .run(command) runs a command on its login side."""
    with bring_up(2, "test") as cluster:
        yield cluster


@pytest.fixture
def launch_ranks(tmp_path):
    """A function that starts the launcher with ranks that run a text; it returns the Job."""

    def job(text, nodes="2", *options):
        (tmp_path / "rank.py").write_text(BEGIN + text)
        command = [LAUNCHER, "--local", nodes, *options]
        command += [tmp_path / "rank.py", "a b", "--", "-x"]
        return processes.Job(command, 100, cwd=tmp_path, stderr=subprocess.PIPE)

    return job
