"""The slides: their notes fill the timetable, the PDFs are up to date, and nothing is cut off."""

import json
import re
import shutil
from collections import Counter

import pytest
from course.lists import read_days, read_pages
from docs.pages import parts_of
from helpers import ROOT, cannot, copy_tree, need, need_browser, open_in_browser, run

SLIDES = ROOT / "slides"
DAYS = {day["id"]: day for day in read_days()}


def slides_of(deck):
    """Return the Markdown of each slide of a deck: day1, day2 or beyond."""
    text = (ROOT / "slides" / f"{deck}.md").read_text()
    return text.split("---\n", 2)[2].split("\n---\n")


@pytest.mark.parametrize("deck", DAYS)
def test_the_slides_are_those_of_the_timetable(deck):
    """The notes of each slide begin with its minutes, which add up to those of each part."""
    part, minutes, exercises = "Welcome", Counter(), []
    for number, slide in enumerate(slides_of(deck), 1):
        if header := re.search(r"<!-- header: (.*) -->", slide):
            part = header[1]
        notes = re.search(r"^<!--\n(\d+) min\b.*?-->", slide, re.M | re.S)
        assert notes, f"{deck}: slide {number} has no notes that begin with its minutes"
        minutes[part] += int(notes[1])
        exercises += re.findall(r"<!-- begin exercise (\S+) -->", slide)
    planned = Counter()
    for _, number, title, *_ in parts_of(DAYS[deck], read_pages()):
        planned[title] += number
    assert minutes == planned
    assert exercises == [x for part in DAYS[deck]["parts"] for x in part.get("exercises", [])]


@pytest.mark.parametrize("day", ["day1", "day2"])
def test_people_type_for_150_minutes_and_rest_every_90(day):
    parts = parts_of(DAYS[day], read_pages())
    assert sum(minutes for _, minutes, *_, part in parts if "exercises" in part) >= 150
    stretch = 0
    for _, minutes, title, *_ in parts:
        stretch = 0 if title in ("Break", "Lunch") else stretch + minutes
        assert stretch <= 90, f"{stretch} minutes without a break, at the end of {title}"
    if day == "day2":
        assert [part[1:3] for part in parts[-2:]] == [(30, "Your own script"), (10, "Summary")]


def test_the_pdfs_are_made_from_the_slides_as_they_are():
    need("pdfinfo")
    status, said = run([SLIDES / "build.sh", "--check"], 60, ROOT, None)
    assert status == 0, said


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
      // The page number is in the lowest 40 pixels.
      const bottom = x.closest("header, footer") ? all.bottom : all.bottom - 40 * scale;
      const outside = box.left < all.left + 20 * scale || box.right > all.right - 20 * scale
        || box.top < all.top || box.bottom > bottom;
      const cut = x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display === "block";
      const missing = x.tagName === "IMG" && !x.naturalWidth;
      if (outside || cut || missing)
        wrong.push(`slide ${i + 1}: ${x.tagName} ${x.textContent.slice(0, 40)}`);
    }
  });
  const report = document.createElement("pre");
  report.id = "report";
  report.textContent = JSON.stringify(wrong);
  document.body.append(report);
});
</script>
"""


def unseen(deck, folder):
    """Build a deck for the browser; return what does not fit there, as a list of sentences."""
    marp = folder / "node_modules" / ".bin" / "marp"
    status, said = run([marp, "--no-stdin", "--template", "bare", f"{deck}.md"], 200, folder, None)
    assert status == 0, said
    page = folder / f"{deck}.html"
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    dom, _ = open_in_browser(f"file://{page}", folder / "profile")
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
    status, said = run([folder / "build.sh", "cheatsheet"], 200, tmp_path, None)
    if not (folder / "node_modules" / "made-from").exists():
        cannot(f"npm could not install marp: {said}")
    assert status == 0, said
    status, said = run([folder / "build.sh", "--check", "cheatsheet"], 60, tmp_path, None)
    assert status == 0, said
    for deck in DAYS:
        assert unseen(deck, folder) == []
