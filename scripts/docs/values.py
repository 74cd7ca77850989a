"""Values: the numbers of recorded runs that sentences name; scripts/values.toml lists them."""

import operator
import re
import tomllib

from catalog import SCRIPTS
from docs.records import SHOWN

LONGEST = 40  # characters of a value
OPERATORS = {"*": operator.mul, "/": operator.truediv}


def read_values():
    """Return {lesson id, or all: {name of a value: its pattern, or a table}}."""
    return tomllib.loads((SCRIPTS / "values.toml").read_text())


def value(course, name):
    """Return a value as text, such as "21,914" for 4.images_per_s.

    Of each lesson, recorded is the date of its record, and on its machine. Raises KeyError if there
    is no such value, and ValueError if the record does not hold it.
    """
    lesson, _, name = name.partition(".")
    record = course.records[SHOWN][lesson]
    if name in ("recorded", "on"):
        return record[name]
    how = (course.values["all"] | course.values.get(lesson, {}))[name]
    if isinstance(how, str):
        return find(how, record["output"])
    if "measured" in how:
        return how["measured"]
    first, *rest = how["formula"].split()
    result = number(course, lesson, first)
    for sign, word in zip(rest[::2], rest[1::2]):
        result = OPERATORS[sign](result, number(course, lesson, word))
    return format(result, how["format"])


def number(course, lesson, word):
    """Return a word of a formula, a number or the name of a value of the lesson, as a number."""
    text = word if word[0].isdigit() else value(course, f"{lesson}.{word}")
    return float(text.replace(",", ""))


def find(pattern, lines):
    """Return what the group of a pattern matches in the first line that it matches."""
    for line in lines:
        found = re.search(pattern, line)
        if found and len(found[1]) > LONGEST:
            raise ValueError(f"{pattern!r} finds a value that is too long: {found[1]!r}")
        if found:
            return found[1]
    raise ValueError(f"no recorded line matches {pattern!r}")
