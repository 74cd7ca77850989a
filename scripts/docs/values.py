"""Values: the numbers of recorded runs that sentences name; scripts/values.toml lists them."""

import re
import tomllib

from catalog import SCRIPTS
from docs.records import SHOWN

LONGEST = 40  # characters of a value


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
    if not isinstance(how, str) and "measured" in how:
        return how["measured"]
    if not isinstance(how, str):
        words = re.findall(r"[a-z]\w*", how["formula"])
        texts = {word: value(course, f"{lesson}.{word}") for word in words}
        numbers = {word: float(text.replace(",", "")) for word, text in texts.items()}
        return format(eval(how["formula"], numbers), how["format"])  # noqa: S307, our own
    matches = (re.search(how, line) for line in record["output"])
    found = next(filter(None, matches), None)
    if not found or len(found[1]) > LONGEST:
        raise ValueError(f"no recorded line has a short value for {how!r}")
    return found[1]
