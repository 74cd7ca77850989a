"""The slides: their notes fill the timetable, the PDFs are up to date, and nothing is cut off."""

import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter

import pytest
from course.lists import read_days, read_pages
from docs.pages import parts_of
from helpers import (
    ROOT,
    cannot,
    copy_tree,
    need,
    need_browser,
    open_in_browser,
    slides_of,
)

SLIDES = ROOT / "slides"
DAYS = {day["id"]: day for day in read_days()}
by_deck = pytest.mark.parametrize("deck", DAYS)


def run(*command, **options):
    """Run a command; return (exit status, output)."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, timeout=200, **both, **options)
    return done.returncode, done.stdout


@by_deck
def test_each_slide_has_notes_whose_minutes_are_the_timetables(deck):
    part, minutes = "Welcome", Counter()
    for number, slide in enumerate(slides_of(deck), 1):
        if header := re.search(r"<!-- header: (.*) -->", slide):
            part = header[1]
        notes = re.search(r"^<!--\n(\d+) min\b.*?-->", slide, re.M | re.S)
        assert notes, f"{deck}: slide {number} has no notes that begin with its minutes"
        minutes[part] += int(notes[1])
    planned = Counter()
    for _, number, title, *_ in parts_of(DAYS[deck], read_pages()):
        planned[title] += number
    assert minutes == planned


@by_deck
def test_the_slides_have_the_exercises_of_the_timetable(deck):
    shown = re.findall(r"<!-- begin exercise (\S+) -->", (SLIDES / f"{deck}.md").read_text())
    assert shown == [x for part in DAYS[deck]["parts"] for x in part.get("exercises", [])]


@pytest.mark.parametrize("name", [*DAYS, "cheatsheet"])
def test_the_pdfs_are_made_from_the_slides_as_they_are(name):
    need("pdfinfo")
    source = SLIDES / f"{name}.md" if name in DAYS else ROOT / "day1" / "CHEATSHEET.md"
    figures = sorted(set(re.findall(r"figures/[a-z0-9_]*\.svg", source.read_text())))
    theme = "theme.css" if name in DAYS else "cheatsheet.css"
    files = [source, *(SLIDES / x for x in (*figures, theme, "marp.config.mjs"))]
    files.append(SLIDES / "package-lock.json")
    made_from = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    for pdf in [name, f"{name}-notes"] if name in DAYS else [name]:
        _, about = run("pdfinfo", SLIDES / f"{pdf}.pdf")
        assert f"sources {made_from}" in about, f"{pdf}.pdf is stale. Run: slides/build.sh {name}"
        pages = len(slides_of(name)) if name in DAYS else 1
        assert re.search(rf"^Pages: +{pages}$", about, re.M)


# Leaves in a page of slides what cannot be seen there, as JSON.
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


def unseen(page, folder):
    """Return what does not fit in a page of slides, as a list of sentences."""
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    dom, _ = open_in_browser(f"file://{page}", folder)
    return json.loads(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1])


@pytest.mark.full
def test_the_slides_can_be_built_and_nothing_is_cut_off(tmp_path):
    need("npm", "pdfinfo")
    need_browser("Liberation Sans", "DejaVu Sans Mono")
    folder = tmp_path / "slides"
    copy_tree(SLIDES, folder, ignore=shutil.ignore_patterns("node_modules", "*.html", "*.pdf"))
    (tmp_path / "day1").mkdir()
    shutil.copy(ROOT / "day1" / "CHEATSHEET.md", tmp_path / "day1")
    if (SLIDES / "node_modules" / "made-from").exists():
        (folder / "node_modules").symlink_to(SLIDES / "node_modules")
    # A deck with what does not fit: it must be noticed.
    lines = "\n".join(f"- line {i}" for i in range(30))
    bad = ["fits", lines, f"```\n{'x' * 100}\n```", "![](figures/none.svg)"]
    front = (folder / "beyond.md").read_text().split("---\n", 2)[1]
    (folder / "day1.md").write_text(f"---\n{front}---\n\n" + "\n\n---\n\n".join(bad))
    status, said = run(folder / "build.sh", "cheatsheet")
    if not (folder / "node_modules" / "made-from").exists():
        cannot(f"npm could not install marp: {said}")
    assert status == 0, said
    assert (folder / "cheatsheet.pdf").exists()
    wrong = " ".join(unseen_in("day1", folder, tmp_path))
    assert "slide 1" not in wrong
    assert all(f"slide {number}" in wrong for number in (2, 3, 4)), wrong
    shutil.copy(SLIDES / "day1.md", folder)
    for deck in DAYS:
        assert unseen_in(deck, folder, tmp_path) == []


def unseen_in(deck, folder, browser):
    """Build a deck for the browser, and return what does not fit there."""
    marp = folder / "node_modules" / ".bin" / "marp"
    status, said = run(marp, "--no-stdin", "--template", "bare", f"{deck}.md", cwd=folder)
    assert status == 0, said
    return unseen(folder / f"{deck}.html", browser / "profile")
