"""The notebook: its cells show the code of lessons, and what they printed when recorded.

The metadata of a cell say what belongs there: {"code": "4"} is lesson 4 above its dividing line, in
a file to be edited; {"output": "4"} is what it printed. Cells of text have blocks, as pages have.
"""

import json

from catalog import ROOT
from docs import blocks
from docs.excerpts import DIVIDING_LINE
from records import SHOWN

NOTEBOOK = "day1/notebook.ipynb"


def fill(text, page, course):
    """Return the notebook's text, filled in. Raises ValueError as blocks.fill does."""
    book = json.loads(text)
    for cell in book["cells"]:
        wanted = cell["metadata"]
        if cell["cell_type"] == "markdown":
            source = blocks.fill("".join(cell["source"]) + "\n", page, course)
            cell["source"] = source.rstrip("\n").splitlines(keepends=True)
        if "code" in wanted:
            file = ROOT / course.lessons[wanted["code"]]["file"]
            top = file.read_text().partition(DIVIDING_LINE)[0].rstrip()
            source = f"%%writefile runs/my_lesson_{wanted['code']}.py\n{top}"
            cell["source"] = source.splitlines(keepends=True)
        if "output" in wanted:
            lines = "\n".join([*course.records[SHOWN][wanted["output"]]["output"], ""])
            stream = {"output_type": "stream", "name": "stdout"}
            cell["outputs"] = [{**stream, "text": lines.splitlines(keepends=True)}]
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"
