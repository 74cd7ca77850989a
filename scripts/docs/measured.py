"""The table of what each lesson showed."""

from docs.pages import table
from records import stale


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
