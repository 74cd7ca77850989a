"""The table of cases.toml, how the tests run each lesson: short, its proof line must still say ok.

Without its key line (a mutant) it must say WRONG. More may be tested in a file of tests/lessons.
"""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from catalog import read_variants
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, cached_across_workers, load_lesson, output_of, proves

CASE = {"short": "", "ranks": 2, "others": [1, 3], "cold": False, "chain": 0, "mutants": []}
MUTANT = {"options": "", "ranks": 2, "starts": 1, "quick": False}
APART = r"losses within \de(-0[1-4]|\+\d\d) of {} \(limit 1e-(05|12)\)"
SAYS = {"FROM_ONE": APART.format("one process"), "FROM_MEMORY": APART.format("those from memory")}
SAYS["OFF"] = r"losses within \de(-0|\+0)\d of one process \(limit 1e-12\), .*as predicted: WRONG$"


# What a lesson must show beyond its proof line: its output, ranks, and the folder where it ran.


def check_bandwidth(output, ranks, folder):
    """MB/s is the size by the time. The bus carries 2 (n - 1) / n of it."""
    row = r"([\d,.]+) ms \([\d.]+-[\d.]+\), +([\d,.]+) MB/s \(bus +([\d,.]+)\)"
    rows = re.findall(row, output)
    assert len(rows) == 3
    for size, row in zip((4e3, 1e6, 64e6), rows, strict=True):
        milliseconds, algorithm, bus = (float(text.replace(",", "")) for text in row)
        # The printed numbers are rounded, the short times most.
        assert algorithm == pytest.approx(size / milliseconds / 1e3, rel=0.05, abs=0.1)
        assert bus == pytest.approx(algorithm * 2 * (ranks - 1) / ranks, rel=0.01, abs=0.2)


def check_saved_model(output, ranks, folder):
    """The file can be loaded as the page says."""
    saved = re.search(r"^saved: (.*)$", output, re.M)[1]
    load_lesson("6").Net().load_state_dict(torch.load(folder / saved))


def read_cases():
    """Return the tables of cases.toml, {lesson id: Namespace}, its mutants too."""
    cases = {}
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        case = cases[name] = SimpleNamespace(**CASE | table)
        case.check = globals()[table["check"]] if "check" in table else None
        case.mutants = [SimpleNamespace(**MUTANT | mutant) for mutant in case.mutants]
        for mutant in case.mutants:
            mutant.says = SAYS.get(mutant.says, mutant.says)
    for name in LESSONS.keys() - cases.keys():
        raise LookupError(f"tests/support/cases.toml lacks lesson {name}: add a table [{name}]")
    return cases


CASES = read_cases()


def variants_of(lesson_id):
    """Return the variants that a lesson's page shows, as mutants. The right one says ok: ""."""
    x = read_variants().get(lesson_id, {})
    says = {"right": "", "wrong": f"(?=.*{SAYS['FROM_ONE']}).*{x.get('says', '')}"}
    changes = [(*x[kind], says[kind]) for kind in says if len(x.get(kind, ())) > 1]
    how = MUTANT | {"ranks": 4, "quick": lesson_id == "4"}
    return [SimpleNamespace(line=a, wrong=b, says=c, **how) for a, b, c in changes]


def arguments_of(lesson_id, tmp_path_factory, more="", ranks=2, folder=None):
    """Return what makes a lesson short, and more options, as a list. It reads what is written."""
    text = f"{CASES[lesson_id].short} {more}"
    writer = LESSONS[lesson_id].get("reads")
    if writer and "{folder}" in text:
        folder = written_by(writer, tmp_path_factory)
    return text.format(folder=folder, share=84 // ranks).split()


def written_by(lesson_id, tmp_path_factory):
    """Return the folder in which a lesson has run as one process, once for all tests."""

    def write():
        folder = tmp_path_factory.mktemp(lesson_id)
        arguments = arguments_of(lesson_id, tmp_path_factory, folder=folder)
        output = output_of(run_ranks(1, ROOT / LESSONS[lesson_id]["file"], *arguments, cwd=folder))
        assert proves(output), output
        return str(folder)

    return Path(cached_across_workers(tmp_path_factory, lesson_id, write))
