"""Write the report of a run: what the lessons showed, in one page that opens without a network.

Called by run_course.py. Every number was printed by a lesson of this run, or is in an event
file that the lesson wrote for TensorBoard. Nothing is drawn from a lesson that failed.

A result is a dict: id and idea of the lesson; command; output, showed, seconds, problem and skipped
as run_lesson.run returns them; events, the paths of the event files that the lesson wrote.
"""

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from runner.report_figures import draw
from runner.run_lesson import summary
from system_info import facts


def code(text):
    """Return a text as HTML, with the parts between backticks as code."""
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text))))


def write(path, results, command, began):
    """Write the page. Raise OSError if that is not possible.

    results: as above; command: what the user typed; began: when, in seconds as time.time().
    """
    template = Path(__file__).with_name("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["code"] = code
    page = environment.from_string(template).render(
        results=results,
        summary=summary(results),
        figures=draw(results),
        facts=facts(command, began),
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(page, encoding="utf-8")
