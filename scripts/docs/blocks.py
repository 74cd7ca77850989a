"""Blocks: what is between two marks of a page or a deck, and the function that makes it.

The first mark says what belongs there, the second one ends it:

    <!-- begin head 4 -->           the links to the pages before and after; minutes, script, slides
    <!-- begin foot 4 -->           the links again, at the end. Or a file: foot day2/NODES.md
    <!-- begin code 4 train -->     a function, or Class.method; in a deck without its comments
    <!-- begin code 4 train "a" "b" -->  from a line of it that begins with a to one with b
    <!-- begin output 4 -->         what the lesson printed when it was last recorded; folded in a
                                    page. With output 4 "a" "b" the lines that begin so
    <!-- begin output 4.wrong -->   what it printed with the wrong one of two lines, up to its proof
    <!-- begin variants 6 -->       two variants of a lesson, one of which is wrong (variants.toml)
    <!-- begin diff 4 6 -->         what a lesson changes above its dividing line
    <!-- begin exercises 4 -->      the exercises of a lesson, or of a day (day1, day2)
    <!-- begin lessons day1 -->     the pages of a day (day1, day2, beyond)
    <!-- begin nav day1 -->         the same in the side bar of the web site
    <!-- begin timetable day1 -->   what a class does, and when
    <!-- begin measured -->         what each lesson showed, and how long it ran
    <!-- begin faults -->           what the tests of faults saw when they were last recorded

In decks only:

    <!-- begin here 4 -->           the strip with all parts of the day: "you are here"
    <!-- begin agenda day1 -->      the timetable as it fits on a slide
    <!-- begin exercise 4.1 -->     what to type for an exercise
    <!-- begin consequence 4.1 -->  what follows from its mistake
    <!-- end -->

In a sentence, a value of the recorded run of a lesson, by its name in data/records/values.toml:

    <!-- n 4.images_per_s -->21,914<!-- /n -->

Code and output may end with mark "a" "b": the lines that begin so are highlighted. A mark has no >,
so the line that begins with => is found by "=".
"""

import re
import shlex

import records
from catalog import read_days, read_exercises, read_lessons, read_pages, read_runs, read_variants
from docs import excerpts, pages

BLOCK = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
VALUE = re.compile(r"(<!-- n (\S+) -->)([^<]*)(<!-- /n -->)")
# Each takes the course, the page, and the words of the mark.
KINDS = [pages.head, pages.foot, pages.lessons, pages.timetable, pages.exercises]
KINDS += [excerpts.code, excerpts.diff, excerpts.output, excerpts.variants]
KINDS += [pages.here, pages.agenda, pages.exercise, pages.consequence]
KINDS += [pages.measured, pages.faults, pages.nav]
KINDS = {function.__name__: function for function in KINDS}

NOTHING = (KeyError, TypeError, StopIteration, FileNotFoundError)  # what a mark names isn't there


class Course:
    """What blocks are made from: the lists of the course, {id: table}, its pages, and records."""

    def __init__(self):
        lists = read_lessons(), read_exercises(), read_days()
        self.lessons, self.exercises, self.days = ({x["id"]: x for x in some} for some in lists)
        self.pages = read_pages()
        self.variants, self.runs = read_variants(), read_runs()
        self.records, self.values = records.read_records(), records.read_values()
        self.faults = None  # the table, where the tests of faults have just been run

    def value(self, name):
        """Return a value of the record that is shown; see records.value.

        Of each lesson, recorded is the date of its note, and on its machine.
        """
        run, _, own = name.rpartition(".")
        note = self.records[records.SHOWN][run]
        return (
            note[own]
            if own in ("recorded", "on")
            else records.value(self.values, name, note["output"])
        )


def fill(text, page, course):
    """Return a page's or a deck's text with its blocks and values filled in.

    Raises ValueError with an error message if one cannot be filled in.
    """

    def replace(match):
        begin, kind, text, old, end = match.groups()
        words, _, marked = text.partition(" mark ")
        try:
            new = KINDS[kind](course, page, *shlex.split(words))
            if marked:
                new = excerpts.highlighted(new, shlex.split(marked))
            return begin + (new or old) + end
        except NOTHING as error:
            raise ValueError(f"{page}: nothing matches the mark {begin.strip()} {error}") from None

    def replace_value(match):
        begin, name, _, end = match.groups()
        try:
            return begin + course.value(name) + end
        except (*NOTHING, ValueError) as error:
            raise ValueError(f"{page}: no value for this mark: {begin} {error}") from None

    text, blocks = BLOCK.subn(replace, text)
    text, values = VALUE.subn(replace_value, text)
    for mark, count in (("begin ", blocks), ("end ", blocks), ("n ", values), ("/n ", values)):
        if text.count(f"<!-- {mark}") != count:
            raise ValueError(f"{page}: a mark is misspelt, has no end, or a > in it.")
    return text
