"""The picture of the README, which moves: an SVG file with CSS, so that it needs no script.

Without its animation, an element is what it is at the end of the story. So whoever has asked for
less motion, or can't see any, has the complete picture. Words stay words, so it is short.
"""

import re
import textwrap

from drawing import ALARM, GREY, INK, PALE, RANKS, YELLOW
from sources import take_images, take_two_runs

LOOP = 12  # seconds
SANS, MONO = "Liberation Sans,Arial,Helvetica,sans-serif", "DejaVu Sans Mono,Menlo,monospace"
LETTER = 11.44  # the width of a letter of code
WIDE = 345  # one run
GRADIENTS = [22, 44, 27, 39]  # how long each rank's gradient is drawn: a sketch
LANES = [7, 34, 61, 88]  # a row for each rank, from above
SUM, CODE, OUTPUT = 116, 149, 183  # what is below them
TILES, OWN, RESULT = 72, 132, 196  # from the left: images, gradients, what the ranks get
LIGHT = {"back": "#ffffff", "pale": PALE, "ink": INK, "grey": GREY, "bad": ALARM, "mark": YELLOW}
LIGHT |= {f"r{rank}": color for rank, color in enumerate(RANKS)}
DARK = {"back": "#0d1117", "pale": "#21262d", "ink": "#e6edf3", "grey": "#9198a1"}
DARK |= {"bad": "#ff7b72", "mark": "#6e5200"}
DARK |= {"r0": "#58a6e0", "r1": "#f0883e", "r2": "#2fb58b", "r3": "#c98bc0"}
BOTH = {"box": "#16191d", "out": "#e6edf3", "good": "#56d364", "wrong": "#ff8078"}  # a terminal


def rect(x, y, width, height, color, more=""):
    size = f"width='{width}' height='{height}' rx='{min(5, height // 5)}'"
    return f"<rect x='{x}' y='{y}' {size} class='{color}' {more}/>"


def say(x, y, words, color, more=""):
    return f"<text x='{x}' y='{y}' class='{color}' {more}>{words}</text>"


def code(x, y, words, color):
    """Return words as code, equally wide in every font."""
    letters = len(re.sub("<.*?>", "", words).replace("&gt;", ">"))
    width = f"textLength='{letters * LETTER:.1f}' lengthAdjust='spacingAndGlyphs'"
    return say(x, y, words, f"m {color}", width)


def at(x, y, content):
    return f"<g transform='translate({x},{y})'>{content}</g>"


def moving(frames, content, *moments, more=""):
    """Return content that has styles at moments, (second, style), and can't be seen before.

    What it has at the end, it has without animation, too. Keyframes go into frames, {text: name}.
    """
    (first, _), (_, last) = moments[0], moments[-1]
    steps = [*moments, (LOOP, last)]
    text = "".join(f"{100 * second / LOOP:.4g}%{{{style}}}" for second, style in steps)
    if first and not last.startswith("opacity"):
        begin = 100 * first / LOOP
        text = f"0%,{begin - 0.01:.4g}%{{opacity:0}}{begin:.4g}%,100%{{opacity:1}}" + text
    name = frames.setdefault(text, f"k{len(frames)}")
    end = last.replace(":", "='") + "'"
    return f"<g class='a' {end} style='animation-name:{name}{more}'>{content}</g>"


def appears(frames, content, begin, takes=0.3):
    hidden = (0, "opacity:0"), (begin, "opacity:0")
    return moving(frames, content, *hidden, (begin + takes, "opacity:1"))


def grows(frames, content, begin, takes, to="transform:scale(1,1)"):
    return moving(frames, content, (begin, "transform:scale(0,1)"), (begin + takes, to))


def train(frames, begin, pace, divide):
    """Return four ranks that average their gradients, or add them up, beginning at a second."""
    images, backward, reduce, divided, back = (
        begin + pace * moment for moment in (0.3, 1.0, 2.0, 3.0, 3.7)
    )
    still, parts = "", ""
    for rank, y in enumerate(LANES):
        still += rect(0, y, WIDE, 25, "pale")
        still += say(8, y + 19, f"rank {rank}", f"b r{rank}")
        tiles = "".join(f"<use href='#d{rank}{i}' x='{26 * i}'/>" for i in (0, 1))
        parts += at(TILES, y + 2, appears(frames, tiles, images + rank * 0.1 * pace))
        own = rect(0, 5, GRADIENTS[rank], 15, f"r{rank}")
        parts += at(OWN, y, grows(frames, own, backward, 0.6 * pace))
        x = RESULT + sum(GRADIENTS[:rank])  # in the sum, they stand end to end
        way = f";--x:{OWN - x}px;--y:{y - SUM}px"
        leaves = (reduce, "transform:translate(var(--x),var(--y))")
        arrives = (reduce + 0.8 * pace, "transform:translate(0,0)")
        parts += at(x, SUM, moving(frames, own, leaves, arrives, more=way))
    share = 0.25 if divide else 1
    for y in LANES:
        below = "transform:translate(0,var(--y)) "
        shrinks = [(divided, f"{below}scale(1,1)"), (divided + 0.5, f"{below}scale({share},1)")]
        leaves = (back, f"{below}scale({share},1)")
        arrives = (back + 0.7 * pace, f"transform:scale({share},1)")
        steps = [*(shrinks if divide else []), leaves, arrives]
        mean = moving(frames, "<use href='#sum'/>", *steps, more=f";--y:{SUM - y}px")
        parts += at(RESULT, y, mean)
    still += code(8, SUM + 19, "all_reduce", "grey") + rect(0, CODE, WIDE, 27, "pale")
    if divide:
        parts += appears(frames, rect(0, CODE, WIDE, 27, "mark"), divided - 0.3)
    parts += code(7, CODE + 20, "flat /= dist.get_world_size()", "ink" if divide else "grey")
    if not divide:
        parts += at(4, CODE + 13, grows(frames, rect(0, 0, 336, 3, "bad"), begin - 0.4, 0.5))
    return still, parts


def prints(frames, begin, lines, color):
    """Return a terminal in which lines are typed from a second on."""
    still, parts = rect(0, OUTPUT, WIDE, 111, "box"), ""
    for i, words in enumerate(lines):
        bold = f"<tspan class='b {color if i else 'good'}'>\\g<0></tspan>"
        words = re.sub(r"ok$|WRONG$|[\d.]+%", bold, words.replace(">", "&gt;"))
        second = begin + 0.3 * i
        line = code(12, OUTPUT + 25 + 25 * i, words, "out")
        parts += appears(frames, line, second, 0.01)
        hides = (second, "transform:scale(1,1);animation-timing-function:steps(28)")
        cover = rect(-328, 0, 328, 25, "box")
        parts += at(338, OUTPUT + 6 + 25 * i, moving(frames, cover, hides, (second + 0.3, "transform:scale(0,1)")))
    edge = f"fill='none' stroke='{BOTH[color]}' stroke-width='3'"
    parts += appears(frames, rect(1.5, OUTPUT + 1.5, WIDE - 3, 108, "", edge), begin + 1.3)
    return still, parts


def four_ranks():
    """Four ranks average their gradients; without the line that divides, the check says WRONG."""
    frames, body = {}, ""
    for x, begin, pace, divide, output in zip((10, 365), (0, 5.8), (1, 0.75), (True, False), take_two_runs()):
        accuracy, proof = output
        lines = [accuracy, *textwrap.wrap(proof, 28)]
        still, parts = train(frames, begin, pace, divide)
        terminal = prints(frames, begin + 4.5 * pace, lines, "good" if divide else "wrong")
        still += terminal[0]
        if not divide:
            dim, lit = "opacity:.35", "opacity:1"
            still = moving(frames, still, (0, dim), (begin - 0.6, dim), (begin, lit))
        body += at(x, 0, still + parts + terminal[1])
    ends = moving(frames, body, (0, "opacity:0"), (0.3, "opacity:1"), (LOOP - 0.4, "opacity:1"))
    images = take_images(4, 2)
    defs = ""
    for rank, some in enumerate(images):
        for i, path in enumerate(some):
            defs += f"<g id='d{rank}{i}'>{rect(0, 0, 21, 21, f'r{rank}')}<path d='{path}' transform='translate(.5,1)' class='digit'/></g>"
    bars = "".join(rect(sum(GRADIENTS[:r]), 5, GRADIENTS[r], 15, f"r{r}") for r in range(4))
    defs += f"<g id='sum'>{bars}</g>"

    def paint(table):
        rules = "".join(f".{name}{{fill:{color}}}" for name, color in table.items())
        return rules + f".digit{{stroke:{table['back']}}}"

    style = paint(BOTH | LIGHT) + f"@media (prefers-color-scheme:dark){{{paint(DARK)}}}"
    style += ".digit{stroke-width:1.1}" + f"text{{font:19px {SANS}}}.m{{font-family:{MONO}}}.b{{font-weight:bold}}"
    style += f".a{{animation:{LOOP}s ease-in-out infinite}}"
    style += "@media (prefers-reduced-motion:reduce){.a{animation:none}}"
    style += "".join(f"@keyframes {name}{{{text}}}" for text, name in frames.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 301" width="720" height="301" role="img">
<title>{four_ranks.__doc__}</title>
<style>{style}</style>
<defs>{defs}</defs>
<rect width="720" height="301" rx="8" class="back"/>
{ends}
</svg>
"""
