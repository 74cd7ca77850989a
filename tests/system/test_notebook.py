"""The notebook, from top to bottom in a real Jupyter, without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from support.run import ROOT, proves


@pytest.mark.full
def test_each_lesson_of_the_notebook_proves_its_claim_and_can_be_edited(tmp_path, monkeypatch):
    notebook = nbformat.read(ROOT / "day1" / "notebook.ipynb", 4)
    clone = ["git", "clone", "-q", "--depth=1", ROOT.as_uri(), tmp_path / "course"]
    subprocess.run(clone, check=True)
    for cell in notebook.cells:
        cell.source = cell.source.replace(
            "13_train.py 1", "13_train.py 1 --data random --max-steps 9"
        )
        cell.source = re.sub(r"(runs/\d_mnist\S+) {RANKS}", r"\1 2 --max-steps 9", cell.source)
    # Lesson 0 once more, at the end, changed as its cell asks for.
    code, start = [x.source for x in notebook.cells if "0" in x.metadata.values()]
    edited = code.replace("ReduceOp.SUM", "ReduceOp.MAX")
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (edited, start)]
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]  # of an activated environment
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=200, resources=resources).execute()
    outputs = [
        "".join(part.get("text", "") for part in x.get("outputs", ())) for x in notebook.cells
    ]
    *ran, broken = [output for output in outputs if "\n=> " in f"\n{output}"]
    assert len(ran) == 5, outputs
    assert all(map(proves, ran)), outputs
    assert "\n=> every rank holds 3; the sum 0+1+2+3 is 6: WRONG" in broken
