"""Blocks: what stands between two marks of a page or a deck, and the function that makes it.

The first mark says what belongs there, the second ends it. In pages and decks:

    <!-- begin head 4 -->           the ways to the pages before and after; minutes, script, slides
    <!-- begin foot 4 -->           the ways again, at the end. Or a file: foot day2/NODES.md
    <!-- begin code 4 train -->     a function, or a method: Class.method
    <!-- begin code 4 train "a" "b" -->  in it, from the first line that begins with a to the next
                                    that begins with b
    <!-- begin code 4 train plain -->  the same without comments and docstring
    <!-- begin output 4 -->         what the lesson printed when it was last recorded; folded in a
                                    page. In a deck, output 4 "a" "b": from line to line
    <!-- begin diff 4 6 -->         what a lesson changes above its ruler
    <!-- begin exercises 4 -->      the exercises of a lesson
    <!-- begin exercise_list day1 -->  those of a day
    <!-- begin lessons day1 -->     the pages of a day (day1, day2, beyond), from course.toml;
                                    lessons day1 short: without their exercises
    <!-- begin timetable day1 -->   when what is done in a class, from course.toml
    <!-- begin measured -->         what each lesson showed, from tests/records
    <!-- begin seconds -->          how long each lesson ran, from there
    <!-- begin faults -->           what the tests of faults saw when they were last recorded

In decks only:

    <!-- begin lines 8 "alone" "=" -->    the command of an output, and the lines that begin so
    <!-- begin answer 5 "It takes {}%." "2 .* (\\S+)%" -->  a sentence with numbers of the output.
                                    A pattern with two groups gives a quotient: how many times the
                                    first number the second one is. A page instead of the lesson:
                                    day2/LAYOUT.md. A . stays within a line; [\\s\\S] goes beyond
    <!-- begin here 4 -->           the strip with all parts of the day: you are here
    <!-- begin agenda day1 -->      the timetable as it fits on a slide
    <!-- begin exercise 4.1 -->     what to type for an exercise
    <!-- begin consequence 4.1 -->  what follows from its mistake
    <!-- end -->

Code, output and lines may end with mark "a" "b": the lines that begin so are highlighted. A mark
has no >, so the line that begins with => is found by "=".
"""

import re
import shlex
from dataclasses import dataclass

from docs import excerpts, pages, recordings, slides

BLOCK = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


KINDS = {
    "head": pages.head,
    "foot": pages.foot,
    "lessons": pages.lessons,
    "timetable": pages.timetable,
    "exercises": pages.exercises,
    "exercise_list": pages.exercise_list,
    "code": excerpts.code,
    "diff": excerpts.diff,
    "output": slides.output,
    "lines": slides.lines,
    "answer": slides.answer,
    "here": slides.here,
    "agenda": slides.agenda,
    "exercise": slides.exercise,
    "consequence": slides.consequence,
    "measured": recordings.measured,
    "seconds": recordings.seconds,
    "faults": recordings.faults,
}


@dataclass
class Course:
    """What blocks are made from. Each function above takes it, the page and the mark's words."""

    lessons: dict  # {id: table of course.toml}
    pages: list  # as course.lists.read_pages
    exercises: dict  # {id: table of exercises.toml}
    days: dict  # {id: table of course.toml}
    records: dict  # as docs.recordings.read_records
    faults: list | None = None  # as docs.recordings.read_faults; None to leave the table as it is
    faults_recorded: str = ""  # when and where

    @property
    def outputs(self):
        """What the lessons printed: {lesson id: Markdown}."""
        return recordings.outputs(self.records)


def fill(text, page, course):
    """Return a page's or a deck's text with its blocks filled in.

    Raises ValueError with a sentence if one cannot be.
    """

    def replace(match):
        begin, kind, words, old, end = match.groups()
        try:
            return begin + (make(kind, shlex.split(words), page, course) or old) + end
        except (KeyError, TypeError, StopIteration, FileNotFoundError):
            problem = "there is nothing (any more) for"
        except ValueError as error:
            problem = str(error)
        raise ValueError(f"{page}: {problem} {begin.strip()}")

    text, count = BLOCK.subn(replace, text)
    if count != text.count("<!-- begin "):
        raise ValueError(f"{page}: a mark has no end, or a > in it.")
    return text


def make(kind, words, page, course):
    """Return what belongs into a block; None to leave it as it is."""
    if kind not in KINDS:
        raise ValueError(f"there is no kind of block {kind!r}:")
    marked = []
    if "mark" in words:
        i = words.index("mark")
        words, marked = words[:i], words[i + 1 :]
    new = KINDS[kind](course, page, *words)
    if marked:
        new = slides.highlighted(new, marked)
    if page in pages.DECKS:
        slides.check_size(new)
    return new
