"""Run a script with the stand-in at work, in a process that may have imported torch before.

    python tests/standin/run.py day1/0_torch_dist.py 2

For tests/ranks.py, whose processes are forks of one that has torch already.
"""

import importlib.util
import runpy
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed

FILE = Path(__file__).with_name("sitecustomize.py")

if __name__ == "__main__":
    # By its file: the system may have a sitecustomize of its own.
    spec = importlib.util.spec_from_file_location("standin", FILE)
    standin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    standin.stand_in(torch)
    standin.stand_in_distributed(torch.distributed)
    for category in (FutureWarning, UserWarning):  # on every rank, and in a loader's workers
        warnings.simplefilter("error", category)
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
