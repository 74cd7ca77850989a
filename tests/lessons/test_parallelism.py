"""Lesson 20: what a library does is what DDP does."""

import sys

import pytest
from support.run import LESSONS, ROOT, output_of, proves, run


@pytest.mark.full
def test_accelerate_launch_starts_lesson_20_too(tmp_path):
    lesson_20 = str(ROOT / LESSONS["20"]["file"])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", lesson_20]
    output = output_of(run(launch, 200, tmp_path, None))
    assert "ranks: 1, device: cpu" in output
    assert proves(output), output
