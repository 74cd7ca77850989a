"""Tables of what was measured: what each lesson showed, and what the tests of faults saw."""

import json
import re
from pathlib import Path

from docs.pages import table
from records import stale

AREAS = ["processes", "data", "use"]


def measured(course, page):
    """Return a table with a column for each kind of machine. The lesson may have changed since."""
    notes = [x[name] for x in course.records.values() for name in course.lessons if name in x]
    recorded = {(x["recorded"], x["on"]) for x in notes}
    command = "`python scripts/update_docs.py --record`"
    lines = [f"Recorded on {date} with {command}: {on}." for date, on in sorted(recorded)]
    rows = [[name] for name in course.lessons]
    for record in course.records.values():
        older = stale(record, course.runs)
        for row in rows:
            x = record.get(row[0])
            mark = ", older code" if row[0] in older else ""
            row.append(f"`{x['showed']}` {x['seconds']:.0f} s{mark}" if x else "")
    kinds = [name.replace("-", " ").replace("cpu", "CPU") for name in course.records]
    return "\n\n".join([" ".join(lines), table(["lesson", *kinds], rows)])


def faults(course, page):
    """Return the table of the faults, or None if the tests of faults have not just run."""
    return course.faults


def table_of_faults(folder):
    """Return what the tests of faults wrote into a folder, as a table, area by area.

    Faults with the same symptom and the same advice share a row.
    """
    seen = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    rows = []
    for area in AREAS:
        rows.append([f"**{area}**", "", "", ""])
        same = {}
        for x in sorted(seen, key=lambda x: (x["order"], x["fault"])):
            if x["area"] == area:
                same.setdefault((symptom(x["seen"]), x["do"]), []).append(x)
        for (words, advice), several in same.items():
            names = "; ".join(x["fault"] for x in several)
            seconds = [x["seconds"] for x in several if x["seconds"] is not None]
            longest = f"{max(seconds):.0f}" if seconds else ""
            rows.append([names, words, longest, advice])
    return table(["fault", "what you will see", "seconds", "what to do"], rows)


def symptom(text):
    """Return the first and last line of what was seen, without the folder where the test ran."""
    lines = [re.sub(r"(?<!\S)/\S+/(?=\S)", "", line).strip() for line in text.splitlines()]
    lines = lines if len(lines) < 3 else [lines[0], "", lines[-1]]
    return " ".join(f"`{line}`" if line else "..." for line in lines) or "the prompt"
