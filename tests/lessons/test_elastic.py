"""Lesson 12: stopped and started again, it ends where it would have ended."""

import os
import re
import signal
import subprocess

import processes
import pytest
from support.forked_ranks import run_ranks
from support.run import LAUNCHER, LESSONS, ROOT, output_of, proof_of, rank_of

LESSON = ROOT / LESSONS["12"]["file"]
# 3,198 images: 50 steps in an epoch of 2 ranks, and each of 3 ranks has as many images.
FEW = ("--images", 3198, "--batch-size", 32, "--save-every", 10, "--epochs", 3)
SHORT = ("--images", 1280, "--save-every", 4)


@pytest.mark.full
def test_stopped_by_a_signal_it_goes_on_with_another_number_of_ranks(tmp_path):
    command = [LAUNCHER, "--local", 2, LESSON, *FEW]
    with processes.Job(command, 200, cwd=tmp_path, stderr=subprocess.STDOUT) as job:
        next(line for line in job.lines() if line.startswith("step "))
        os.kill(rank_of(job, 1), signal.SIGTERM)
        assert job.wait() == 0, job.output
    assert job.output.count("\nStopped as told. The same command resumes from here.\n") == 1
    output = output_of(run_ranks(3, LESSON, *FEW, cwd=tmp_path))
    assert re.search(r"^start 2: resumes in epoch \d after [\d,]+ images$", output, re.M)
    # Another number of ranks makes another global batch: other parameters, but the same images.
    assert re.fullmatch(
        r"=> starts: 2, images once an epoch: 3,19\d of 3,198 \(limit 3,1\d\d\), "
        r"parameters not compared \(2, 3 ranks\): ok",
        proof_of(output),
    )


def test_a_snapshot_of_another_job_is_not_used(tmp_path):
    output_of(run_ranks(1, LESSON, *SHORT, "--crash-at-step", 10, cwd=tmp_path), 1)
    output = output_of(run_ranks(1, LESSON, *SHORT, "--lr", 1, cwd=tmp_path), 1)
    assert "snapshot.pt is from a job with different arguments. Use those, or rename " in output
    assert "Traceback" not in output
