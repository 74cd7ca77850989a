"""The picture of the README, which moves: an SVG file with CSS, so that it needs no script.

Without its animation, an element is what it is at the end of the story. So anyone who has asked for
less motion, or can't see any, has the complete picture. Words stay words, so it is short.
"""

import re
import textwrap

from drawing import ALARM, GREY, INK, PALE, RANKS, YELLOW
from sources import take_images, take_two_runs

LOOP = 14  # seconds
DONE = 10.5  # when all is there. It begins here, so that nobody first sees an empty picture
SEEN, UNSEEN, PLACE = "opacity:1", "opacity:0", "transform:none"
SANS, MONO = "Liberation Sans,Arial,Helvetica,sans-serif", "DejaVu Sans Mono,Menlo,monospace"
LETTER = 11.44  # the width of a letter of code
WIDE = 345  # one run
GRADIENTS = [22, 44, 27, 39]  # how long each rank's gradient is drawn: a sketch
ENDS = [sum(GRADIENTS[:rank]) for rank in range(4)]  # in the sum, they are end to end
LANES = [7, 34, 61, 88]  # a row for each rank, from above
SUM, CODE, OUTPUT = 116, 149, 183  # what is below them
TILES, OWN, RESULT = 72, 132, 196  # from the left: images, gradients, what the ranks get
BOTH = {"box": "#16191d", "out": "#e6edf3", "good": "#56d364", "wrong": "#ff8078"}  # a terminal
LIGHT = {"back": "#ffffff", "pale": PALE, "ink": INK, "grey": GREY, "bad": ALARM, "mark": YELLOW}
LIGHT |= {f"r{rank}": color for rank, color in enumerate(RANKS)}
DARK = {"back": "#0d1117", "pale": "#21262d", "ink": "#e6edf3", "grey": "#9198a1"}
DARK |= {"bad": "#ff7b72", "mark": "#6e5200"}
DARK |= {"r0": "#58a6e0", "r1": "#f0883e", "r2": "#2fb58b", "r3": "#c98bc0"}
FRAMES = {}  # the keyframes of what moves, {text: name}


def rect(x, y, width, height, color):
    size = f"width='{width:g}' height='{height}' rx='{min(5, height // 5)}'"
    return f"<rect x='{x:g}' y='{y}' {size} class='{color}'/>"


def say(x, y, words, color, more=""):
    return f"<text x='{x:g}' y='{y}' class='{color}' {more}>{words}</text>"


def code(x, y, words, color):
    """Return words as code, equally wide in every font."""
    width = f"textLength='{len(words) * LETTER:.1f}'"
    return say(x, y, words.replace(">", "&gt;"), f"m {color}", width)


def at(x, y, content):
    return f"<g transform='translate({x},{y})'>{content}</g>"


def moving(content, *moments, still="", more=""):
    """Return content that has styles at moments, (second, style), and can't be seen before.

    Without animation it has the style still, or the last one.
    """
    first, last = moments[0][0], moments[-1][1]
    steps = [*moments, (LOOP, last)]
    if first:
        seen = [(second, f"{style};{SEEN}") for second, style in steps]
        steps = [(0, UNSEEN), (first - 0.01, UNSEEN), *seen]
    text = "".join(f"{100 * second / LOOP:.2f}%{{{style}}}" for second, style in steps)
    name = FRAMES.setdefault(text, f"k{len(FRAMES)}")
    still = still or last
    base = "" if still in (SEEN, PLACE) else still.replace(":", "='") + "'"
    return f"<g class='a' {base} style='animation-name:{name}{more}'>{content}</g>"


def appears(content, begin, takes=0.3):
    return moving(content, (0, UNSEEN), (begin, UNSEEN), (begin + takes, SEEN))


def grows(content, begin, takes):
    return moving(content, (begin, "transform:scale(0,1)"), (begin + takes, PLACE))


def train(begin, pace, divide):
    """Return what stays and what moves: four ranks add up their gradients, and perhaps divide."""
    moments = (0.1, 1.0, 2.1, 3.1, 3.9)
    images, backward, reduce, divided, back = (begin + pace * moment for moment in moments)
    still, parts, stack = "", "", ""
    for rank, y in enumerate(LANES):
        still += rect(0, y, WIDE, 25, "pale")
        still += say(8, y + 19, f"rank {rank}", f"b r{rank}", "textLength='56'")
        tiles = "".join(f"<use href='#d{rank}{i}' x='{26 * i}'/>" for i in (0, 1))
        parts += at(TILES, y + 2, appears(tiles, images + rank * 0.1 * pace))
        own, x = rect(0, 5, GRADIENTS[rank], 15, f"r{rank}"), RESULT + ENDS[rank]
        parts += at(OWN, y, grows(own, backward, 0.6 * pace))
        leaves = (reduce, "transform:translate(var(--x),var(--y))")
        way = f";--x:{OWN - x}px;--y:{y - SUM}px"
        stack += at(x, SUM, moving(own, leaves, (reduce + 0.8 * pace, PLACE), more=way))
    steps = [(back, "transform:translate(0,var(--y))"), (back + 0.7 * pace, PLACE)]
    if divide:
        stack = moving(stack, (0, SEEN), (divided, SEEN), (divided + 0.5, "opacity:.3"))
        below, quarter = "transform:translate(0,var(--y)) scale", "(.25,1)"
        steps = [(divided, f"{below}(1,1)"), (divided + 0.5, below + quarter)]
        steps += [(back, below + quarter), (back + 0.7 * pace, "transform:scale" + quarter)]
        parts += appears(rect(0, CODE, WIDE, 27, "mark"), divided - 0.3)
        for second, y, words in ((images, 53, "own images,"), (backward, 80, "own gradients")):
            shows = (0, UNSEEN), (second, UNSEEN), (second + 0.3, SEEN)
            words = say(RESULT, y, words, "grey")
            parts += moving(words, *shows, (reduce, SEEN), (reduce + 0.2, UNSEEN))
        mean = say(240, 53, "the mean", "grey") + say(240, 80, "for each", "grey")
        parts += appears(mean, back + 0.5)
    parts += code(7, CODE + 20, "flat /= dist.get_world_size()", "ink" if divide else "grey")
    if not divide:
        parts += at(4, CODE + 13, grows(rect(0, 0, 336, 3, "bad"), begin - 0.5, 0.5))
    parts += stack
    for y in [SUM, *LANES]:
        parts += at(RESULT, y, moving("<use href='#sum'/>", *steps, more=f";--y:{SUM - y}px"))
    still += code(8, SUM + 19, "all_reduce", "grey") + rect(0, CODE, WIDE, 27, "pale")
    return still, parts


def prints(begin, lines, colors):
    """Return lines that are typed from a second on; the numbers and words that count are marked."""
    parts = ""
    for i, words in enumerate(lines):
        second, y = begin + 0.3 * i, OUTPUT + 7 + 25 * i
        label = re.search(r"ok$|WRONG$|[\d.]+%$|$", words)
        parts += appears(code(12, y + 18, words[: label.start()].strip(), "out"), second, 0.01)
        covers = (second, "transform:scale(1,1);animation-timing-function:steps(28)")
        gone = (second + 0.3, "transform:scale(0,1)")
        parts += at(338, y, moving(rect(-328, 0, 328, 25, "box"), covers, gone))
        if label[0]:
            x, width = 12 + label.start() * LETTER, len(label[0]) * LETTER
            badge = rect(x - 4, y, width + 8, 24, colors[i > 0])
            parts += appears(badge + code(x, y + 18, label[0], "b box"), second + 0.3)
    return parts


def paint(colors):
    rules = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items())
    return rules + f"path{{stroke:{colors['back']};stroke-width:1.1}}"


def four_ranks():
    """Four ranks average their gradients. Without the line that divides, lesson 4 says WRONG."""
    FRAMES.clear()
    stays, moves, runs = "", "", take_two_runs()
    for divide, (accuracy, proof) in zip((True, False), runs):
        x, begin, pace, colors = (10, 0, 0.8, ("out", "good"))
        if not divide:
            x, begin, pace, colors = (365, 5.4, 0.6, ("good", "wrong"))
        still, parts = train(begin, pace, divide)
        parts += prints(begin + 4.7 * pace, [accuracy, *textwrap.wrap(proof, 28)], colors)
        if not divide:
            dim = "opacity:.35"
            lit = (begin - 0.4, SEEN), (LOOP - 0.4, SEEN)
            still = moving(still, (0, dim), (begin - 0.7, dim), *lit, (LOOP, dim), still=SEEN)
        stays += at(x, 0, still + rect(0, OUTPUT, WIDE, 111, "box"))
        moves += at(x, 0, parts)
    moves = moving(moves, (0, SEEN), (LOOP - 0.4, SEEN), (LOOP, UNSEEN), still=SEEN)
    bars = [rect(ENDS[rank], 5, GRADIENTS[rank], 15, f"r{rank}") for rank in range(4)]
    shapes = f"<g id='sum'>{''.join(bars)}</g>"
    for rank, paths in enumerate(take_images(4, 2)):
        for i, path in enumerate(paths):
            image = rect(0, 0, 21, 21, f"r{rank}") + at(0.5, 1, f"<path d='{path}'/>")
            shapes += f"<g id='d{rank}{i}'>{image}</g>"
    with_line, without = (". ".join(run).replace("=> ", "") for run in runs)
    frames = "".join(f"@keyframes {name}{{{text}}}" for text, name in FRAMES.items())
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300" width="720" height="300" role="img">
<title>{four_ranks.__doc__}</title>
<desc>With the line: {with_line}. Without it: {without}.</desc>
<style>
{paint(BOTH | LIGHT)}text{{font:19px {SANS}}}.m{{font-family:{MONO}}}.b{{font-weight:bold}}
@media(prefers-color-scheme:dark){{{paint(DARK)}}}
.a{{animation:{LOOP}s ease-in-out -{DONE}s infinite}}{frames}
@media(prefers-reduced-motion:reduce){{.a{{animation:none!important}}}}
</style>
<defs>{shapes}</defs>
<rect width="720" height="300" rx="8" class="back"/>
{stays}
{moves}
</svg>
"""
