"""The notebook, from top to bottom in a real Jupyter, without a GPU."""

import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from support.run import ROOT, proves


@pytest.mark.full
def test_each_lesson_of_the_notebook_proves_its_claim(tmp_path, monkeypatch):
    notebook = nbformat.read(ROOT / "day1" / "notebook.ipynb", 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("<address of this repository>", ROOT.as_uri())
        cell.source = cell.source.replace(
            "13_train.py 1", "13_train.py 1 --data random --max-steps 9"
        )
        cell.source = cell.source.replace("run_course.sh 0 6", "run_course.sh 0")
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]  # of an activated environment
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=200, resources=resources).execute()
    outputs = [str(cell.get("outputs", "")) for cell in notebook.cells]
    proofs = [line for text in outputs for line in re.findall(r"=> .*?: (?:ok|WRONG)", text)]
    assert len(proofs) == 6, outputs
    assert all(map(proves, proofs)), outputs
    assert "srcdoc" in notebook.cells[-2].outputs[-1]["data"]["text/html"]
