"""The script on lesson 21's page, in which PyTorch's own classes do what the lesson does."""

import re
import sys

import pytest
import torch
from support.run import ROOT, output_of, run

PAGE = ROOT / "day2/21_llama_every_way.md"
# A line, and what's there instead: the norm of a stage only, a checkpoint without Adam's averages,
# gradients of gathered keys that stay away.
FAULTS = [
    ("dist.all_reduce(square,", "dict(square=square,"),
    ("dcp.load(state,", 'dcp.load({"model": state["model"]},'),
    (".full_tensor(grad_placements=[Partial()])", ".full_tensor()"),
]


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this torch cannot shard on CPUs")
@pytest.mark.parametrize(("right", "instead"), [("", ""), *FAULTS])
def test_the_library_has_one_process_s_losses_and_each_fault_is_noticed(right, instead, tmp_path):
    (script,) = re.findall(r'```python\n(""".*?)```', PAGE.read_text(), re.S)
    assert not right or script.count(right) == 1
    file = tmp_path / "library.py"
    file.write_text(script.replace(right, instead) if right else script)
    output = output_of(run([sys.executable, file], 200, tmp_path, None), bool(right))
    assert re.search(rf"^=> .*: {'WRONG' if right else 'ok'}$", output, re.M)
