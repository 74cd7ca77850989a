"""The slides can be built, and nothing is cut off."""

import json
import re
import shutil

import pytest
from catalog import read_days
from support.run import (
    ROOT,
    copy_tree,
    open_in_browser,
    require_browser,
    require_programs,
    run,
    skip_or_fail_in_ci,
)

SLIDES = ROOT / "slides"


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
      if (outside || cut)
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
    dom = open_in_browser(f"file://{page}", folder / "profile")
    return json.loads(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1])


@pytest.mark.full
def test_the_slides_can_be_built_and_nothing_is_cut_off(tmp_path):
    require_programs("npm")
    require_browser("Liberation Sans", "DejaVu Sans Mono")
    folder = tmp_path / "slides"
    copy_tree(SLIDES, folder, ignore=shutil.ignore_patterns("node_modules", "*.html", "*.pdf"))
    (tmp_path / "day1").mkdir()
    shutil.copy(ROOT / "day1" / "CHEATSHEET.md", tmp_path / "day1")
    if (SLIDES / "node_modules" / "made-from").exists():
        (folder / "node_modules").symlink_to(SLIDES / "node_modules")
    status, said = run([folder / "build.sh", "cheatsheet"], 200, tmp_path, None)
    if not (folder / "node_modules" / "made-from").exists():
        skip_or_fail_in_ci(f"npm could not install marp: {said}")
    assert status == 0, said
    assert (folder / "cheatsheet.pdf").read_bytes().startswith(b"%PDF-")
    for day in read_days():
        assert unseen(day["id"], folder) == []
