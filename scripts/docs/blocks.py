"""Blocks: what is between two marks of a page or a deck, and the function that makes it.

The first mark says what belongs there, the second one ends it:

    <!-- begin head 4 -->           the links to the pages before and after; minutes, script, slides
    <!-- begin foot 4 -->           the links again, at the end. Or a file: foot day2/NODES.md
    <!-- begin code 4 train -->     a function, or a method: Class.method. A deck leaves out its
                                    comments and docstring
    <!-- begin code 4 train "a" "b" -->  from its first line that begins with a to the next line
                                    that begins with b
    <!-- begin output 4 -->         what the lesson printed when it was last recorded; folded in a
                                    page. In a deck, output 4 "a" "b": the lines that begin so
    <!-- begin diff 4 6 -->         what a lesson changes above its dividing line
    <!-- begin exercises 4 -->      the exercises of a lesson, or of a day (day1, day2)
    <!-- begin lessons day1 -->     the pages of a day (day1, day2, beyond)
    <!-- begin timetable day1 -->   what a class does, and when
    <!-- begin measured -->         what each lesson showed, and how long it ran
    <!-- begin faults -->           what the tests of faults saw when they were last recorded

In decks only:

    <!-- begin answer 5 "It takes {}%." "2 .* (\\S+)%" -->  a sentence with numbers of the output.
                                    A pattern with two groups gives a quotient, the second number
                                    by the first. Instead of the lesson a page: day2/LAYOUT.md
    <!-- begin here 4 -->           the strip with all parts of the day: "you are here"
    <!-- begin agenda day1 -->      the timetable as it fits on a slide
    <!-- begin exercise 4.1 -->     what to type for an exercise
    <!-- begin consequence 4.1 -->  what follows from its mistake
    <!-- end -->

In a sentence of a page:

    <!-- n 4 "epoch 1: .* (\\S+) images" -->21,914<!-- /n -->  a number of a recorded output: what
                                    the pattern's group finds. Two groups: a quotient, as above
    <!-- n "64000 / a" ".1f" 3 "epoch 1: .* (\\S+) images" -->4.3<!-- /n -->  what a formula makes
                                    of it, in this format. More lessons and patterns: b, c, d

Code and output may end with mark "a" "b": the lines that begin so are highlighted. A mark has no >,
so the line that begins with => is found by "=".
"""

import ast
import operator
import re
import shlex

from catalog import read_course, read_days, read_exercises, read_pages
from docs import excerpts, pages, records, slides

BLOCK = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
NUMBER = re.compile(r"(<!-- n ([^>]*?) -->)([^<]*)(<!-- /n -->)")
# Each function takes the course, the page, and the words of the mark.
KINDS = {
    "head": pages.head,
    "foot": pages.foot,
    "lessons": pages.lessons,
    "timetable": pages.timetable,
    "exercises": pages.exercises,
    "code": excerpts.code,
    "diff": excerpts.diff,
    "output": slides.output,
    "answer": slides.answer,
    "here": slides.here,
    "agenda": slides.agenda,
    "exercise": slides.exercise,
    "consequence": slides.consequence,
    "measured": records.measured,
    "faults": records.faults,
}

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub}
OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.truediv}
NOTHING = (KeyError, TypeError, StopIteration, FileNotFoundError)  # what a mark names isn't there


class Course:
    """What blocks are made from: the lists of the course, {id: table}, its pages, and records."""

    def __init__(self):
        lists = read_course(), read_exercises(), read_days()
        self.lessons, self.exercises, self.days = ({x["id"]: x for x in some} for some in lists)
        self.pages = read_pages()
        self.records = records.read_records()
        self.faults = None  # the table, where the tests of faults have just been run


def fill(text, page, course):
    """Return a page's or a deck's text with its blocks and numbers filled in.

    Raises ValueError with an error message if one cannot be filled in.
    """

    def replace(match):
        begin, kind, words, old, end = match.groups()
        try:
            return begin + (make(kind, shlex.split(words), page, course) or old) + end
        except NOTHING:
            raise ValueError(f"{page}: nothing matches this mark: {begin.strip()}") from None

    def replace_number(match):
        begin, words, _, end = match.groups()
        try:
            return begin + number(course, page, *shlex.split(words)) + end
        except NOTHING:
            raise ValueError(f"{page}: nothing matches this mark: {begin}") from None

    text, count = BLOCK.subn(replace, text)
    text, numbers = NUMBER.subn(replace_number, text)
    if count != text.count("<!-- begin ") or numbers != text.count("<!-- n "):
        raise ValueError(f"{page}: a mark has no end, or a > in it.")
    return text


def number(course, page, *words):
    """Return a number of a recorded output, or what a formula makes of several: see above."""
    if words[0] in course.lessons:
        lesson, *patterns = words
        return slides.answer(course, page, lesson, "{}", *patterns).strip()
    formula, form, *words = words
    values = {}
    for name, lesson, pattern in zip("abcd", words[::2], words[1::2]):
        text = slides.answer(course, page, lesson, "{}", pattern)
        values[name] = float(text.strip().rstrip("%").replace(",", ""))
    return format(value_of(ast.parse(formula, mode="eval").body, values), form)


def value_of(node, values):
    """Return what a parsed formula is, of numbers, names and the four operators."""
    if isinstance(node, ast.BinOp):
        left, right = value_of(node.left, values), value_of(node.right, values)
        return OPERATORS[type(node.op)](left, right)
    return values[node.id] if isinstance(node, ast.Name) else node.value


def make(kind, words, page, course):
    """Return what belongs into a block; None to leave it as it is."""
    marked = []
    if "mark" in words:
        i = words.index("mark")
        words, marked = words[:i], words[i + 1 :]
    new = KINDS[kind](course, page, *words)
    return slides.highlighted(new, marked) if marked else new
