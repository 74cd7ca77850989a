"""Write the report of a run: what the lessons showed, in one page that opens without a network.

Called by run_course.py; the figures are made in report_figures.py. Every number was printed by a
lesson of this run, or stands in an event file that the lesson wrote for TensorBoard. Nothing is
drawn from a lesson that failed.

What benchmark.py has left in runs/benchmark/ is shown too, with its own date and machine.

A result is a dict: id and idea of the lesson; command; output, showed, seconds, problem and skipped
as run_lesson.run returns them; events, the paths of the event files that the lesson wrote.
"""

import json
import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from matplotlib import style

from course.colors import STYLE, shown
from course.machine import facts
from course.report_figures import card, draw

# What stands at the top: the lesson, where its number is, and what the number is.
HEADLINES = [
    ("2", r"^=> ([\d.]+%) of ", "of the test images right, after two epochs of one process"),
    ("6", r"^=> losses within (\S+) of ", "is how far 10 losses of DDP are from one process's"),
    ("7", r"^=> .* weak ([\d.]+) ", "times the images/s of one process, in weak scaling"),
]
# On CPUs lesson 7 also tells what one process does with the cores of all.
ALL_CORES = r"^one process, all cores .* ([\d.]+) \("


def headlines(results):
    """Return the numbers that the lessons which ended well have for the top: (number, what, id)."""
    well = {x["id"]: x for x in results if not x["problem"] and not x["skipped"]}
    found = []
    for name, pattern, what in HEADLINES:
        result = well.get(name, {"showed": "", "output": ""})
        if match := re.search(pattern, result["showed"]):
            if name == "7" and (cores := re.search(ALL_CORES, result["output"], re.M)):
                what += f"; one process on all cores does {cores[1]} times"
            found.append((match[1], what, name))
    return found


def benchmarks(folder):
    """Return the figures that benchmark.py has left in a folder, in the order of measuring."""
    cases, figures = [json.loads(path.read_text()) for path in folder.glob("*.json")], []
    for case in sorted(cases, key=lambda case: case["began"]):
        name, machine = case["name"], case["machine"]
        ratios = [
            f"{x['what']}: {shown(x['median'])}"
            + (f" ({x['target']}: {x['verdict']})" if x["target"] else "")
            for x in case["ratios"]
        ]
        where = f"{machine['when']}, {machine['CPU']}, torch {machine['torch']}"
        head = ("what", f"median, {case['unit']}", "lowest", "highest", "rounds")
        rows = [
            (what, *(shown(x[key]) for key in ("median", "lowest", "highest")), len(x["values"]))
            for what, x in case["figures"].items()
        ]
        svg, caption = (folder / f"{name}.svg").read_text(), f"{'; '.join(ratios)}. {where}."
        commands = [machine["command"]]
        figures.append(card(f"case-{name}", case["title"], caption, commands, svg, head, rows))
    return figures


def code(text):
    """Return a text with what stands between backticks as HTML code."""
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))


def write(path, results, command, began):
    """Write the page. Raise OSError if that is not possible.

    results: as above; command: what the user typed; began: when, in seconds as time.time().
    """
    path.parent.mkdir(exist_ok=True)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["code"] = code
    with style.context(["default", STYLE]):
        figures = draw(results)
    page = environment.get_template("report.html.j2").render(
        results=results,
        headlines=headlines(results),
        figures=figures,
        benchmarks=benchmarks(path.parent / "benchmark"),
        facts=facts(command, began),
    )
    path.write_text(page, encoding="utf-8")
