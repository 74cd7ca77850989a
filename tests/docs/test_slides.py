"""The slides can be built, and nothing is cut off."""

import shutil

import pytest
from browser import in_page
from catalog import read_days
from support.run import ROOT, require_browser, require_programs, run, skip_or_fail_in_ci

SLIDES = ROOT / "slides"


@pytest.mark.full
def test_the_slides_can_be_built_and_nothing_is_cut_off(tmp_path):
    require_programs("npm")
    require_browser("Liberation Sans", "DejaVu Sans Mono")
    folder = tmp_path / "slides"
    shutil.copytree(
        SLIDES, folder, ignore=shutil.ignore_patterns("node_modules", "*.html", "*.pdf")
    )
    (tmp_path / "day1").mkdir()
    shutil.copy(ROOT / "day1" / "CHEATSHEET.md", tmp_path / "day1")
    if (SLIDES / "node_modules" / "made-from").exists():
        (folder / "node_modules").symlink_to(SLIDES / "node_modules")
    status, said = run([folder / "build.sh", "cheatsheet"], 200, tmp_path, None)
    if not (folder / "node_modules" / "made-from").exists():
        skip_or_fail_in_ci(f"npm could not install marp: {said}")
    assert status == 0, said
    assert (folder / "cheatsheet.pdf").read_bytes().startswith(b"%PDF-")
    marp = [folder / "node_modules" / ".bin" / "marp", "--no-stdin", "--template", "bare"]
    for day in read_days():
        status, said = run([*marp, f"{day['id']}.md"], 200, folder, None)
        assert status == 0, said
        page = folder / f"{day['id']}.html"
        assert in_page(page.read_text(), page, "unseen") == []
