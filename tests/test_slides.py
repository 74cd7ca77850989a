"""The slides: what they show is what the lessons are and print, and all of it can be seen."""

import contextlib
import hashlib
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections import Counter

import pytest
from helpers import (
    ROOT,
    agenda,
    cannot,
    copy_tree,
    need,
    need_browser,
    open_in_browser,
    recorded_output,
    slides_of,
)
from course.lists import read_days, read_pages
from docs.pages import PAGES, title_of

SLIDES = ROOT / "slides"
sys.path.insert(0, str(SLIDES))
excerpts = importlib.import_module("docs.slides")
DAYS = ["day1", "day2"]
DECKS = [*DAYS, "beyond"]
COMMENT = re.compile(r"<!--.*?-->", re.S)

# Measures each slide in the browser and leaves what does not fit in the page, as JSON.
MEASURE = """
<script>
addEventListener("load", () => {
  const wrong = [];
  document.querySelectorAll("section").forEach((slide, i) => {
    const all = slide.getBoundingClientRect();
    const scale = all.height / 720;
    for (const x of slide.querySelectorAll("*")) {
      const box = x.getBoundingClientRect();
      // The page number stands in the lowest 40 pixels.
      const bottom = x.closest("header, footer") ? all.bottom : all.bottom - 40 * scale;
      const outside = box.left < all.left + 20 * scale || box.right > all.right - 20 * scale
        || box.top < all.top || box.bottom > bottom;
      const cut = x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display === "block";
      const missing = x.tagName === "IMG" && !x.naturalWidth;
      const small = x.tagName === "PRE" && parseFloat(getComputedStyle(x).fontSize) < 24;
      if (outside || cut || missing || small)
        wrong.push(`slide ${i + 1}: ${x.tagName} ${x.textContent.slice(0, 40)}`);
    }
    if (slide.scrollHeight > slide.clientHeight + 1) wrong.push(`slide ${i + 1} is too long`);
  });
  const report = document.createElement("pre");
  report.id = "report";
  report.textContent = JSON.stringify(wrong);
  document.body.append(report);
});
</script>
"""


def run(*command, timeout=60, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words_of(markdown):
    """Return the words that a slide shows, without its notes, figures, marks and addresses."""
    text = re.sub(r"!\[.*?\]\(\S+\)|^```.*$", "", COMMENT.sub("", markdown), flags=re.M)
    text = re.sub(r"\]\(\S+\)", "]", text)
    return re.findall(r"\w+", text.replace("_", " "))


def check_pdf(path, slides):
    """Assert that a PDF has a page for each slide, with all the words of the slide."""
    pages = run("pdftotext", path, "-").split("\f")[:-1]
    assert len(pages) == len(slides)
    for number, (page, slide) in enumerate(zip(pages, slides), 1):
        seen = re.sub(r"\s", "", page)
        missing = [word for word in words_of(slide) if word not in seen]
        assert not missing, f"{path.name}, page {number} lacks {missing}"


def check_sources(path, names):
    """Assert that a PDF was made from these files of slides/ as they are now."""
    contents = b"".join((SLIDES / name).read_bytes() for name in names)
    words = f"sources {hashlib.sha256(contents).hexdigest()}"
    assert words in run("pdfinfo", path), f"{path.name} is stale: slides/build.sh"


def notes_in(path):
    """Return how many notes a viewer of a PDF would show as icons on its pages."""
    raw = path.read_bytes()
    parts = [raw]
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", raw, re.S):
        with contextlib.suppress(zlib.error):  # a font or a picture may be packed in another way
            parts.append(zlib.decompressobj().decompress(stream))
    return sum(len(re.findall(rb"/Subtype\s*/Text\b", part)) for part in parts)


def measure(page, folder):
    """Return what does not fit in a page of slides, as a list of sentences."""
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    dom, _ = open_in_browser(f"file://{page}", folder)
    report = re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)
    return json.loads(report[1])


@pytest.mark.parametrize("script", ["scripts/docs/slides.py", "slides/figures/draw.py"])
def test_excerpts_and_figures_are_current(script):
    run(sys.executable, ROOT / script, "--check")


def test_a_changed_lesson_makes_its_excerpt_stale(tmp_path):
    for folder in ("slides", "scripts", *DAYS):
        ignore = shutil.ignore_patterns("node_modules", "*.html", "figures")
        copy_tree(ROOT / folder, tmp_path / folder, ignore=ignore)
    (tmp_path / "tests" / "faults").mkdir(parents=True)
    for page in ("README.md", "tests/MEASURED.md", "tests/faults/README.md"):
        shutil.copy(ROOT / page, tmp_path / page)
    lesson = tmp_path / "day1" / "4_mnist_manual_ddp.py"
    lesson.write_text(lesson.read_text().replace("flat /= dist", "flat /= 1 * dist"))
    command = [sys.executable, tmp_path / "slides" / "excerpts.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "slides/day1.md" in done.stdout


def test_changed_data_make_the_figures_stale(tmp_path):
    figures = tmp_path / "slides" / "figures"
    shutil.copytree(SLIDES / "figures", figures)
    for day in DAYS:
        shutil.copytree(ROOT / day, tmp_path / day)
    command = [sys.executable, figures / "draw.py", "--check"]
    run(*command)  # nothing is stale yet
    data = next((figures / "data").glob("*.json"))
    page = tmp_path / "day2" / "LAYOUT.md"  # one of those whose numbers are drawn
    texts = {data: data.read_text() + "\n"}
    texts[page] = re.sub(r"(?<= whole chunks \| )(\S+ \| )", r"\g<1>9", page.read_text())
    for path, changed in texts.items():
        before = path.read_text()
        path.write_text(changed)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert all(path.name in done.stdout for path in figures.glob("*.svg"))
        path.write_text(before)
    run(*command)


def test_every_figure_is_there_and_shown():
    texts = [path.read_text() for path in (*SLIDES.glob("*.md"), *map(ROOT.joinpath, PAGES))]
    shown = {x for text in texts for x in re.findall(r"\(\S*figures/(\w+\.svg)\)", text)}
    assert shown == {path.name for path in SLIDES.glob("figures/*.svg")}


@pytest.mark.parametrize("deck", DECKS)
def test_each_slide_has_notes_and_the_minutes_add_up(deck):
    slides = slides_of(deck)
    assert 25 <= len(slides) <= 110
    part, minutes = "Welcome", Counter()
    for number, slide in enumerate(slides, 1):
        if header := re.search(r"<!-- header: (.*) -->", slide):
            part = header[1]
        notes = re.search(r"^<!--\n(\d+) min\b.*?-->", slide, re.M | re.S)
        assert notes, f"{deck}: slide {number} has no notes that begin with its minutes"
        minutes[part] += int(notes[1])
        shown = re.sub(r"<!-- begin .*?<!-- end -->|```.*?```", "", slide, flags=re.S)
        most = 120 if " min |" in slide else 70  # the agenda is a table
        assert len(words_of(shown)) <= most, f"{deck}: slide {number} is full of words"
    assert minutes == agenda(deck)


def test_the_minutes_are_those_of_the_pages():
    planned = {name.lower(): number for deck in DECKS for name, number in agenda(deck).items()}
    for page in [x for x in read_pages() if "minutes" in x]:
        name = title_of(page).lower()
        assert planned[name] == page["minutes"], name


@pytest.mark.parametrize("deck", DECKS)
def test_the_pdfs_show_the_slides_as_they_are(deck):
    need("pdftotext", "pdfinfo")
    files = [f"{deck}.md", "theme.css", "marp.config.mjs", "package-lock.json"]
    files += [f"figures/{path.name}" for path in sorted(SLIDES.glob("figures/*.svg"))]
    for name in (deck, f"{deck}-notes"):
        path = SLIDES / f"{name}.pdf"
        assert path.stat().st_size <= 5_000_000
        check_sources(path, files)
        check_pdf(path, slides_of(deck))


@pytest.mark.parametrize("deck", DECKS)
def test_only_the_instructors_pdf_has_notes(deck):
    assert notes_in(SLIDES / f"{deck}.pdf") == 0
    assert notes_in(SLIDES / f"{deck}-notes.pdf") == len(slides_of(deck))


def test_the_cheat_sheet_is_one_page_of_a4_with_all_its_words():
    need("pdftotext", "pdfinfo")
    path = SLIDES / "cheatsheet.pdf"
    check_sources(path, ["../day1/CHEATSHEET.md", "cheatsheet.css", "package-lock.json"])
    about = run("pdfinfo", path)
    assert re.search(r"^Pages: +1$", about, re.M)
    assert re.search(r"^Page size: +59\d.* x 84\d", about, re.M)
    check_pdf(path, [(ROOT / "day1" / "CHEATSHEET.md").read_text()])


def excerpt(mark):
    """Return what scripts/docs/slides.py puts into a slide for a mark."""
    return excerpts.fill(f"<!-- begin {mark} -->\n<!-- end -->\n").split("\n", 1)[1]


def test_an_excerpt_highlights_and_leaves_out_what_the_mark_says():
    whole = recorded_output("6").splitlines()
    block = excerpt('output 6 mark "="').splitlines()
    number = int(re.fullmatch(r"```console \{(\d+)\}", block[0])[1])
    assert block[number] == whole[-1]
    assert block[number].startswith("=>")
    lines = excerpt('lines 6 "test" "="').splitlines()
    assert lines[1].startswith("$ python day1/6")
    assert lines[2:4] == [x for x in whole if x.startswith(("test", "=>"))]
    with_comments = excerpt("code 4 mean_over_ranks")
    plain = excerpt("code 4 mean_over_ranks plain")
    assert "#" in with_comments
    assert '"""' in with_comments
    assert not {"#", '"'} & set(plain)
    assert all(x.partition("  #")[0] in with_comments for x in plain.splitlines())


def test_a_sentence_has_the_numbers_of_the_recorded_output():
    seconds = re.findall(r"B: +([\d.]+) ms", recorded_output("1"))
    mark = "answer 1 '{} ms: {} times' '1 MB: +(\\S+)' '4 kB: +(\\S+)[\\s\\S]*64 MB: +(\\S+)'"
    words = excerpt(mark)
    number, times = re.match(r"(\S+) ms: (\S+) times", words).groups()
    assert number == seconds[1]
    assert float(times) == pytest.approx(float(seconds[2]) / float(seconds[0]), rel=0.05)
    for pattern in ("no such line (.)", "4 kB.*64 MB: +(.)"):  # nothing, or not in one line
        with pytest.raises(ValueError, match="There is nothing"):
            excerpt(f"answer 1 '{{}}' '{pattern}'")


def test_the_strip_names_all_lessons_of_the_day_and_the_one_that_begins():
    strip = excerpt("here 4")
    assert re.findall(r"\*\*(.*?)\*\*", strip) == ["4 by hand"]
    pages = [x for x in read_pages() if x["file"].startswith("day1")]
    assert re.findall(r"(\d+) ", strip) == [x["id"] for x in pages if x["id"].isdigit()]
    assert all(x["topic"] in strip for x in pages)


@pytest.mark.parametrize("deck", DECKS)
def test_an_exercise_slide_says_what_to_type_and_how_long(deck):
    day = next(day for day in read_days() if day["id"] == deck)
    part, found, minutes = "", [], Counter()
    for slide in slides_of(deck):
        if header := re.search(r"<!-- header: (.*) -->", slide):
            part = header[1]
        if "<!-- _class: exercise" not in slide:
            continue
        found.append(re.search(r"begin exercise (\S+)", slide)[1])
        minutes[part] += int(re.search(r"\*\*(\d+) minutes\*\*", slide)[1])
    assert found == [x for entry in day["parts"] for x in entry.get("exercises", [])]
    assert {name: number for name, number in agenda(deck).items() if name in minutes} == minutes


def test_the_slides_can_be_built_and_nothing_is_cut_off(tmp_path):
    need("npm", "pdftotext")
    need_browser("Liberation Sans", "DejaVu Sans Mono")
    folder = tmp_path / "slides"
    ignore = shutil.ignore_patterns("node_modules", "*.html", "*.pdf")
    copy_tree(SLIDES, folder, ignore=ignore)
    (tmp_path / "day1").mkdir()
    shutil.copy(ROOT / "day1" / "CHEATSHEET.md", tmp_path / "day1")
    made_from = SLIDES / "node_modules" / "made-from"
    if made_from.exists() and made_from.read_text() == (SLIDES / "package-lock.json").read_text():
        (folder / "node_modules").symlink_to(SLIDES / "node_modules")
    # PDFs of one deck: all are made alike, and those in the repository are looked at above.
    whole, rest = DECKS[-1], DECKS[:-1]
    script = shlex.quote(str(folder / "build.sh"))
    both = f"{script} {whole} cheatsheet && {script} --html {' '.join(rest)}"
    done = subprocess.run(
        ["bash", "-c", both], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    if not (folder / "node_modules" / "made-from").exists():
        cannot(f"npm could not install marp: {done.stderr}")
    assert done.returncode == 0, done.stderr
    for deck in DECKS:
        assert (folder / f"{deck}.html").exists()
    check_pdf(folder / f"{whole}.pdf", slides_of(whole))
    assert notes_in(folder / f"{whole}.pdf") == 0
    assert notes_in(folder / f"{whole}-notes.pdf") == len(slides_of(whole))
    assert not [*folder.glob("day*.pdf")]
    assert (folder / "cheatsheet.pdf").exists()
    lines = "\n".join(f"- line {i}" for i in range(30))
    front = "---\ntheme: course\n---\n\n"
    bad = ["fits", lines, f"```\n{'x' * 100}\n```", "![](figures/none.svg)"]
    (folder / "bad.md").write_text(front + "\n\n---\n\n".join(bad))
    decks = [f"{name}.md" for name in (*DECKS, "bad")]
    marp = folder / "node_modules" / ".bin" / "marp"
    run(marp, "--no-stdin", "--template", "bare", *decks, cwd=folder)
    for deck in DECKS:
        assert measure(folder / f"{deck}.html", tmp_path / "browser") == []
    wrong = " ".join(measure(folder / "bad.html", tmp_path / "browser"))
    assert "slide 1" not in wrong
    assert all(f"slide {number}" in wrong for number in (2, 3, 4))
