"""Lessons with their key line taken away. Each must run to its end, and its proof line must say so.

A mutant that crashes proves nothing: anything else that crashes would look the same.
"""

import re

from catalog import write_variant
from support.forked_ranks import skip_what_cannot_run
from support.run import LESSONS, proof_of


def write_mutant(folder, lesson_id, change):
    """Write a lesson with a change, (line, what is there instead). Return the file."""
    return write_variant(folder, LESSONS[lesson_id]["file"], *change)


def assert_disproved(status, output, says):
    """Assert that a mutant ran to its end, and its proof line says WRONG in words that match."""
    skip_what_cannot_run(status, output)
    assert "Traceback" not in output, f"the mutant crashes, which proves nothing:\n{output}"
    assert status == 1, output
    assert output.count("\n=> ") == 1, f"not one proof line:\n{output}"
    assert proof_of(output).endswith(": WRONG"), output
    assert re.search(says, proof_of(output)), f"the proof line does not say: {says}\n{output}"
