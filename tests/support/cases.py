"""The table of cases.toml, how the tests run each lesson: short, its proof line must still say ok.

Without its key line (a mutant) it must say WRONG. More may be tested in a file of tests/lessons.
"""

import tomllib
from pathlib import Path
from types import SimpleNamespace

from catalog import read_variants
from support import output_checks
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, cached_across_workers, output_of, proves

CASE = {"short": "", "ranks": 2, "others": [1, 3], "cold": False, "chain": 0, "mutants": []}
MUTANT = {"options": "", "ranks": 2, "starts": 1, "quick": False}
APART = r"losses within \de(-0[1-4]|\+\d\d) of {} \(limit 1e-05\)"
SAYS = {"FROM_ONE": APART.format("one process"), "FROM_MEMORY": APART.format("those from memory")}
SAYS["OFF"] = r"losses within \de(-0|\+0)\d of one process \(limit 1e-12\), .*as predicted: WRONG$"


def read_cases():
    """Return the tables of cases.toml, {lesson id: Namespace}, its mutants too."""
    cases = {}
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        case = cases[name] = SimpleNamespace(**CASE | table)
        case.check = getattr(output_checks, table["check"]) if "check" in table else None
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
