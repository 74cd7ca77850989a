"""The end of a rank: the process group is taken down without a hang.

Before torch 2.8 the destructor of a gloo group waits for the group's threads and keeps the GIL
(pytorch#154976). One of them may need the GIL, to free the tensors of the last collective. Without
the pause in `start`, four ranks hang within a few of the groups that are made here.
"""

import contextlib
import os
from multiprocessing.connection import wait

import pytest
from helpers import LESSONS, ROOT, load_lesson
from ranks import FORKS

RANKS, GROUPS = 4, 15


def be_rank(rank, ports):
    """Be the same rank of one group after another."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    lesson = load_lesson("0")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for port in ports:
            os.environ["MASTER_PORT"] = str(port)
            lesson.start()


def test_many_groups_end_without_a_hang():
    from torch.distributed import TCPStore

    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(GROUPS)
    ]
    ports = [store.port for store in stores]
    ranks = [FORKS.Process(target=be_rank, args=(rank, ports)) for rank in range(RANKS)]
    try:
        for process in ranks:
            process.start()
        alive = list(ranks)
        while alive:
            assert wait([process.sentinel for process in alive], 120), "a rank hangs at its end"
            alive = [process for process in alive if process.is_alive()]
        assert [process.exitcode for process in ranks] == [0] * RANKS
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("file", sorted(ROOT.glob("day*/**/*.py")), ids=lambda file: file.stem)
def test_a_pause_stands_before_the_end_of_the_group(file):
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip() == "dist.destroy_process_group()":
            assert lines[number - 1].strip().startswith("time.sleep(")
    if file == ROOT / LESSONS["15"]["file"]:
        assert "    time.sleep(0.2)\n    accelerator.end_training()" in file.read_text()
