"""The script on lesson 21's page, in which PyTorch's own classes do what the lesson does."""

import re
import sys

import pytest
import torch
from support.run import ROOT, output_of, run

PAGE = ROOT / "day2/21_llama_every_way.md"
# A line, what's there instead, and what is said: the norm of a stage only, a checkpoint without
# Adam's averages, one with a single stage's options, gradients of gathered keys that stay away.
FAULTS = [
    ("dist.all_reduce(square,", "dict(square=square,", "WRONG"),
    ("dcp.load(state,", 'dcp.load({"model": state["model"]},', "WRONG"),
    ("flatten_optimizer_state_dict=True", "", "KeyError: 'betas'"),
    (".full_tensor(grad_placements=[Partial()])", ".full_tensor()", "WRONG"),
]


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this torch cannot shard on CPUs")
@pytest.mark.parametrize(("right", "instead", "says"), [("", "", "ok"), *FAULTS])
def test_it_has_one_process_s_losses_and_each_fault_is_noticed(right, instead, says, tmp_path):
    (script,) = re.findall(r'```python\n(""".*?)```', PAGE.read_text(), re.S)
    assert not right or script.count(right) == 1
    (tmp_path / "library.py").write_text(script.replace(right, instead))
    output = output_of(run([sys.executable, "library.py"], 200, tmp_path, None), bool(right))
    assert re.search(rf"^(=> .*: )?{says}$", output, re.M), output
