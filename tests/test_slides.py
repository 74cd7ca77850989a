"""The slides: what they show is what the lessons are and print, and all of it can be seen."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from helpers import ROOT, cannot, copy_tree, need, need_browser, open_in_browser
from lib.course import read_pages
from lib.pages import PAGES, title_of

SLIDES = ROOT / "slides"
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
      const bottom = x.closest("header") ? all.bottom : all.bottom - 40 * scale;
      const outside = box.left < all.left + 20 * scale || box.right > all.right - 20 * scale
        || box.top < all.top || box.bottom > bottom;
      const cut = x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display === "block";
      const missing = x.tagName === "IMG" && !x.naturalWidth;
      if (outside || cut || missing)
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


def slides_of(deck):
    """Return the Markdown of each slide of a deck."""
    return (SLIDES / f"{deck}.md").read_text().split("---\n", 2)[2].split("\n---\n")


def run(*command, timeout=60, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words_of(markdown):
    """Return the words that a slide shows, without its notes, figures and marks."""
    text = re.sub(r"!\[.*?\]\(\S+\)|^```\w*$", "", COMMENT.sub("", markdown), flags=re.M)
    return re.findall(r"\w+", text.replace("_", " "))


def check_pdf(path, slides):
    """Assert that a PDF has a page for each slide, with all the words of the slide."""
    pages = run("pdftotext", path, "-").split("\f")[:-1]
    assert len(pages) == len(slides)
    for number, (page, slide) in enumerate(zip(pages, slides), 1):
        seen = re.sub(r"\s", "", page)
        missing = [word for word in words_of(slide) if word not in seen]
        assert not missing, f"{path.name}, page {number} lacks {missing}"


def measure(page, folder):
    """Return what does not fit in a page of slides, as a list of sentences."""
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    dom, _ = open_in_browser(f"file://{page}", folder)
    report = re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)
    return json.loads(report[1])


@pytest.mark.parametrize("script", ["slides/excerpts.py", "slides/figures/draw.py"])
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
    command = [sys.executable, figures / "draw.py", "--check"]
    run(*command)  # nothing is stale yet
    data = next((figures / "data").glob("*.json"))
    data.write_text(data.read_text() + "\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert all(path.name in done.stdout for path in figures.glob("*.svg"))


def test_every_figure_is_there_and_shown():
    texts = [path.read_text() for path in (*SLIDES.glob("*.md"), *map(ROOT.joinpath, PAGES))]
    shown = {x for text in texts for x in re.findall(r"\(\S*figures/(\w+\.svg)\)", text)}
    assert shown == {path.name for path in SLIDES.glob("figures/*.svg")}


def agenda(deck):
    """Return the minutes that the second slide of a deck gives to each part, as a Counter."""
    planned = Counter()
    for name, minutes in re.findall(r"\| (\w[\w -]*) \| (\d+)(?= \|)", slides_of(deck)[1]):
        planned[name] += int(minutes)
    return planned


@pytest.mark.parametrize("deck", DECKS)
def test_each_slide_has_notes_and_the_minutes_add_up(deck):
    slides = slides_of(deck)
    assert 25 <= len(slides) <= 45
    part, minutes = "Welcome", Counter()
    for number, slide in enumerate(slides, 1):
        if header := re.search(r"<!-- header: (.*) -->", slide):
            part = header[1]
        notes = re.search(r"^<!--\n(\d+) min\b.*?-->", slide, re.M | re.S)
        assert notes, f"{deck}: slide {number} has no notes that begin with its minutes"
        minutes[part] += int(notes[1])
        shown = re.sub(r"<!-- begin .*?<!-- end -->|```.*?```", "", slide, flags=re.S)
        assert len(words_of(shown)) <= 70, f"{deck}: slide {number} is full of words"
    assert minutes == agenda(deck)


def test_the_minutes_are_those_of_the_pages():
    planned = {name.lower(): number for deck in DECKS for name, number in agenda(deck).items()}
    for page in read_pages():
        name = title_of(page).lower()
        assert planned[name] == page["minutes"], name


@pytest.mark.parametrize("deck", DECKS)
def test_the_pdf_shows_the_slides_as_they_are(deck):
    need("pdftotext", "pdfinfo")
    path = SLIDES / f"{deck}.pdf"
    assert path.stat().st_size <= 5_000_000
    files = [f"{deck}.md", "theme.css", "package-lock.json"]
    sources = [*(SLIDES / name for name in files), *sorted(SLIDES.glob("figures/*.svg"))]
    checksum = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    assert f"sources {checksum}" in run("pdfinfo", path), f"{path.name} is stale: slides/build.sh"
    check_pdf(path, slides_of(deck))


def test_the_slides_can_be_built_and_nothing_is_cut_off(tmp_path):
    need("npm", "pdftotext")
    need_browser("Liberation Sans", "DejaVu Sans Mono")
    folder = tmp_path / "slides"
    ignore = shutil.ignore_patterns("node_modules", "*.html", "*.pdf")
    copy_tree(SLIDES, folder, ignore=ignore)
    made_from = SLIDES / "node_modules" / "made-from"
    if made_from.exists() and made_from.read_text() == (SLIDES / "package-lock.json").read_text():
        (folder / "node_modules").symlink_to(SLIDES / "node_modules")
    build = [folder / "build.sh"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    if not (folder / "node_modules" / "made-from").exists():
        cannot(f"npm could not install marp: {done.stderr}")
    assert done.returncode == 0, done.stderr
    for deck in DECKS:
        assert (folder / f"{deck}.html").exists()
        check_pdf(folder / f"{deck}.pdf", slides_of(deck))
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
