"""Fill in the made parts of the pages: outputs, excerpts, diffs, tables, ways to the next page.

A made part stands between two lines. The first says what belongs there, the second ends it:

    <!-- begin head 4 -->           the ways to the pages before and after; minutes, script, slides
    <!-- begin foot 4 -->           the ways again, at the end. Or a file: foot day2/NODES.md
    <!-- begin code 4 train -->     a function, or a method: Class.method
    <!-- begin code 4 train "a" "b" -->  in it, from the first line that begins with a to the next
                                     that begins with b
    <!-- begin output 4 -->          what the lesson printed when it was last recorded, folded
    <!-- begin diff 4 6 -->          what a lesson changes above its ruler
    <!-- begin exercises 4 -->       the exercises of a lesson
    <!-- begin exercise_list day1 -->  those of a day
    <!-- begin lessons day1 -->      the pages of a day (day1, day2, beyond), from course.toml;
                                     lessons day1 short: without their exercises
    <!-- begin measured -->          the proof lines of the last recording, with date and machine
    <!-- begin faults -->            what the tests of tests/faults saw when they were last recorded
    <!-- begin works -->             the versions it was tested with, from tests/works_with.json
    <!-- begin gpu -->               a row for each record of tests/on_gpu.py, in tests/records
    <!-- begin devices day1 -->      which device and backend a day's lessons choose, and where
    <!-- end -->

Usage: scripts/update_docs.py              fill in tables and diffs
       scripts/update_docs.py --check      change nothing; exit status 1 if something is stale
       scripts/update_docs.py --record     run every lesson first and fill in its output too
       scripts/update_docs.py --record 8   run these lessons only, and keep the other outputs
       scripts/update_docs.py --faults     run the tests of faults and fill in what they saw
       scripts/update_docs.py --works-with take what run_tests.sh --torch has recorded in
                                           runs/works_with/ into tests/works_with.json
       scripts/update_docs.py --devices    ask the lessons, by tests/standin, and fill in the tables

In a page of a lesson, each word of the glossary is a link where it is first used: those that are
missing are put in, too.
"""

import argparse
import ast
import difflib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from pathlib import Path

import processes
from environment import numbers
from run_course import ROOT, command_of, read_course, run

FOLDERS = [
    "",
    "day1",
    "day1/exercises",
    "day2",
    "day2/exercises",
    "scripts",
    "tests",
    "tests/faults",
]
PAGES = [str(x.relative_to(ROOT)) for f in FOLDERS for x in sorted((ROOT / f).glob("*.md"))]
GLOSSARY = "day1/GLOSSARY.md"
FAULTS_LIMIT = 7200  # seconds that the tests of faults may take
WORKS_WITH = ROOT / "tests" / "works_with.json"
RECORDS = ROOT / "tests" / "records"  # of tests/on_gpu.py
RULER = "\n# ---- The same in every lesson"
PART = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def read_pages():
    """Return the lessons and the other pages of the course, in the order in which they are read.

    All have the keys file (of the page), minutes and idea; a lesson has all others of course.toml.
    """
    course = tomllib.loads((ROOT / "scripts" / "course.toml").read_text())
    pages = []
    for x in course["lesson"]:
        pages += [other for other in course["page"] if other["before"] == x["id"]]
        pages.append({**x, "script": x["file"], "file": str(Path(x["file"]).with_suffix(".md"))})
    return pages


def read_exercises():
    """Return the exercises, a list of the tables [[exercise]] in exercises.toml."""
    return tomllib.loads((ROOT / "scripts" / "exercises.toml").read_text())["exercise"]


def link_to(file, page):
    """Return the way from a page to a file, both from the root of the repository."""
    return os.path.relpath(file, Path(page).parent)


def title_of(page):
    """Return what a page is called: "Lesson 4" for a lesson, else its first heading."""
    if page.get("id", "").isdigit():
        return f"Lesson {page['id']}"
    return page.get("id") or (ROOT / page["file"]).read_text().partition("\n")[0].removeprefix("# ")


def day_of(page):
    """Return where a page belongs: day1, day2 or beyond."""
    return "beyond" if page.get("beyond") else page["file"].partition("/")[0]


def ways(name, pages):
    """Return the line with the links to the pages before and after, and to the day's list.

    name is the id of a lesson or a file.
    """
    i = next(i for i, x in enumerate(pages) if name in (x.get("id"), x["file"]))
    here, words = pages[i]["file"], []
    if i > 0:
        words.append(f"[← {title_of(pages[i - 1])}]({link_to(pages[i - 1]['file'], here)})")
    folder = here.partition("/")[0]
    words.append(f"[Day {folder[-1]}](README.md)")
    if i + 1 < len(pages):
        words.append(f"[{title_of(pages[i + 1])} →]({link_to(pages[i + 1]['file'], here)})")
    return " · ".join(words) + "\n"


def head(name, pages):
    """Return what stands below a page's title: the ways, then minutes, script and slides."""
    page = next(x for x in pages if name in (x.get("id"), x["file"]))
    words = [f"{page['minutes']} minutes"]
    if "script" in page:
        script = Path(page["script"]).name
        words.append(f"script [{script}]({script})")
    deck = f"{day_of(page)}.pdf"
    words.append(f"slides [{deck}](../slides/{deck})")
    return f"{ways(name, pages)}\n{' · '.join(words)}\n"


def lesson_table(day, page, pages, exercises):
    """Return a Markdown table of the pages of a day, or beyond; with exercises, if given."""
    rows = ["| page | the one idea | minutes |", "|---|---|---|"]
    if exercises:
        rows = [f"{rows[0]} exercises |", f"{rows[1]}---|"]
    for x in pages:
        if day_of(x) != day:
            continue
        link = f"[{title_of(x)}]({link_to(x['file'], page)})"
        cells = [link, x["idea"], str(x["minutes"])]
        if exercises:
            own = [e for e in exercises if e["lesson"] == x.get("id")]
            cells.append(" ".join(f"[{e['id']}]({link_to(e['file'], page)})" for e in own))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def exercise_table(chosen, page):
    """Return a Markdown table of exercises for a page."""
    rows = ["| exercise | kind | lesson | minutes | what it is about |", "|---|---|---|---|---|"]
    for x in chosen:
        cells = [x["kind"], x["lesson"], str(x["minutes"]), x["about"]]
        rows.append(f"| [{x['id']}]({link_to(x['file'], page)}) | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def exercises_of(name, page, exercises):
    """Return the exercises of a lesson as Markdown, with the command that checks the first."""
    chosen = [x for x in exercises if x["lesson"] == name]
    if not chosen:
        return "This lesson has no exercise that checks itself.\n"
    rows = ["| exercise | kind | minutes | what it is about |", "|---|---|---|---|"]
    for x in chosen:
        link = f"[{x['id']}]({link_to(x['file'], page)})"
        rows.append(f"| {link} | {x['kind']} | {x['minutes']} | {x['about']} |")
    which = "the first" if chosen[1:] else "it"
    check = f"`python scripts/check.py {chosen[0]['id']}` checks {which}; `--hint` helps."
    return "\n".join([*rows, "", check, ""])


def lines_of(source, name):
    """Return the lines of a function, a class or a method, taken from a lesson's source."""
    node = ast.parse(source)
    for part in name.split("."):
        node = next(x for x in node.body if getattr(x, "name", None) == part)
    return source.splitlines()[node.lineno - 1 : node.end_lineno]


def between(lines, first, last=None):
    """Return the lines from the one that begins with first to the next that begins with last."""
    begins = [line.strip() for line in lines]
    i = next(i for i, line in enumerate(begins) if line.startswith(first))
    if last is None:
        return lines[i:]
    j = next(j for j, line in enumerate(begins) if j >= i and line.startswith(last))
    return lines[i : j + 1]


def code(lesson, words):
    """Return an excerpt of a lesson as Markdown; words are those after the lesson's id."""
    lines = lines_of((ROOT / lesson["file"]).read_text(), words[0])
    if words[1:]:
        lines = between(lines, *words[1:])
    return f"```python\n{textwrap.dedent(chr(10).join(lines))}\n```\n"


def above_ruler(lesson):
    """Return the lines of a lesson above its ruler, without the docstring."""
    text = (ROOT / lesson["file"]).read_text().partition(RULER)[0]
    return text.rstrip().splitlines()[ast.parse(text).body[0].end_lineno :]


def diff(old, new):
    """Return a unified diff of two lessons, above their rulers and without their docstrings."""
    names = [Path(x["file"]).name for x in (old, new)]
    lines = difflib.unified_diff(above_ruler(old), above_ruler(new), *names, lineterm="", n=1)
    lines = [re.sub(r"^(@@).*", r"\1", line) for line in lines]  # the numbers help nobody here
    added = sum(line.startswith("+") for line in lines) - 1
    removed = sum(line.startswith("-") for line in lines) - 1
    files = " ".join(x["file"] for x in (old, new))
    words = (
        f"New lines: {added}. Lines that are gone: {removed}. Both files as a whole: `diff {files}`"
    )
    return "\n".join(["```diff", *lines, "```", "", words, ""])


def record(lesson, folder, old):
    """Run a lesson as run_course.sh would. Return its Markdown: command and output.

    That is the old one where the lesson cannot run on this machine.
    """
    print(f"recording lesson {lesson['id']}", flush=True)
    result = run(lesson, cwd=folder)
    if result["problem"]:
        sys.exit(f"lesson {lesson['id']} failed: {result['problem']}")
    if result["skipped"]:
        print(f"lesson {lesson['id']} keeps its old output: {result['skipped']}")
        return old
    program, arguments = command_of(lesson)
    # What another machine would print too: without where the repository lies here.
    output = result["output"].rstrip().replace(f"{ROOT}/", "").replace(sys.executable, "python")
    return f"```console\n$ {' '.join([program, *arguments])}\n{output}\n```\n"


def folded(output):
    """Return a recorded output as it stands in a page: to be unfolded after the prediction."""
    summary = "<summary>What it printed when it was recorded</summary>"
    return f"<details>\n{summary}\n\n{output}\n</details>\n"


def unfolded(text):
    """Return the output in what folded has made; "" if there is none yet."""
    found = re.search(r"```console\n.*?```\n", text, re.DOTALL)
    return found[0] if found else ""


def recorded():
    """Return the outputs that stand in the pages, {lesson id: Markdown}, as the lessons stand."""
    parts = [PART.findall((ROOT / page).read_text()) for page in PAGES]
    found = {words: old for part in parts for _, kind, words, old, _ in part if kind == "output"}
    names = [x["id"] for x in read_course()]
    return {name: unfolded(found[f" {name}"]) for name in names if f" {name}" in found}


def record_faults(file):
    """Run the tests of faults. Return what they saw, a list of dicts, in the order of the tests."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-n", "2", "tests/faults"]
    env = {**os.environ, "FAULTS_RECORD": str(file)}
    job = processes.run(command, FAULTS_LIMIT, cwd=ROOT, env=env, stdout=None)
    if job.stopped or job.status:
        sys.exit("a test of faults failed")
    return sorted(map(json.loads, file.read_text().splitlines()), key=place)


GROUPS = ["processes", "network", "data", "checkpoints", "use", "numerics"]


def place(row):
    """Return where a fault stands in the tests: group, line of the test, name."""
    file, _, test = row["test"].rpartition("::")
    group = Path(file).stem.removeprefix("test_")
    text = (ROOT / "tests" / "faults" / Path(file).name).read_text()
    return GROUPS.index(group), text.index(f"def {test}("), row["fault"]


def fault_table(seen):
    """Return the table of the faults, group by group."""
    rows = ["| fault | what you will see | seconds | what to do |", "|---|---|---|---|"]
    for number, group in enumerate(GROUPS):
        rows.append(f"| **{group}** | | | |")
        alike = {}  # {the rest of the row: faults that look so}
        for x in seen:
            if place(x)[0] == number:
                alike.setdefault(seen_in(x), {})[x["fault"]] = x["seconds"]
        for (says, do), faults in alike.items():
            longest = max((x for x in faults.values() if x is not None), default=None)
            seconds = "" if longest is None else f"{longest:.0f}"
            rows.append(f"| {'; '.join(faults)} | {says} | {seconds} | {do} |")
    return machine("--faults") + "\n" + "\n".join(rows) + "\n"


def seen_in(x):
    """Return what a fault made the job say, without the folder where the test ran, and the cure."""
    lines = [re.sub(r"(?<!\S)/\S+/(?=\S)", "", line).strip() for line in x["says"].splitlines()]
    lines = lines if len(lines) < 3 else [lines[0], "", lines[-1]]
    says = " ".join(f"`{line}`" if line else "..." for line in lines)
    return says or "the prompt", x["do"]


def machine(option="--record"):
    """Return one line on where and when a recording was made."""
    import torch

    accelerator = "no GPU"
    if torch.accelerator.is_available():
        accelerator = (
            f"{torch.accelerator.device_count()} {torch.accelerator.current_accelerator()}"
        )
    return (
        f"Recorded on {time.strftime('%Y-%m-%d')} with `python scripts/update_docs.py {option}`: "
        f"{platform.system()}, {torch.get_num_threads()} CPU cores, {accelerator}, "
        f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}.\n"
    )


def measured(outputs):
    """Return the table of the proof lines of all recorded outputs."""
    rows = ["| lesson | what it showed |", "|---|---|"]
    for name, output in outputs.items():
        proofs = [line for line in output.splitlines() if line.startswith("=>")]
        rows += [f"| {name} | `{proof}` |" for proof in proofs]
    return machine() + "\n" + "\n".join(rows) + "\n"


def setting(record):
    """Return what a record of run_tests.sh --torch is of: torch, Python such as 3.11, machine."""
    return record["torch"], record["Python"].rpartition(".")[0], record["machine"]


def take_records():
    """Put the records of runs/works_with/ into tests/works_with.json, in the place of older ones.

    Raises FileNotFoundError with a sentence if there are none.
    """
    files = sorted((ROOT / "runs" / "works_with").glob("*.json"))
    if not files:
        todo = "First: ./scripts/run_tests.sh --torch VERSION"
        raise FileNotFoundError(f"There is nothing in runs/works_with. {todo}")
    known = json.loads(WORKS_WITH.read_text()) if WORKS_WITH.exists() else []
    newest = {setting(x): x for x in [*known, *(json.loads(file.read_text()) for file in files)]}
    records = sorted(newest.values(), key=lambda x: numbers(x["torch"]) + numbers(x["Python"]))
    WORKS_WITH.write_text(json.dumps(records[::-1], indent=1) + "\n")


def works_with():
    """Return the table of the versions that the course was tested with."""
    rows = ["| torch | torchvision | Python | on | date | tests | lessons |"]
    rows.append("|---|---|---|---|---|---|---|")
    for x in json.loads(WORKS_WITH.read_text()):
        counts = [f"{x[kind]} {kind}" for kind in ("passed", "failed", "skipped") if x[kind]]
        absent = [f"{name} ({reason})" for name, reason in x["lessons"].items() if reason]
        lessons = "all" + (f" but {', '.join(absent)}" if absent else "")
        cells = [x[key] for key in ("torch", "torchvision", "Python", "machine", "date")]
        rows.append(f"| {' | '.join([*cells, ', '.join(counts), lessons])} |")
    return "\n".join(rows) + "\n"


def gpu_table():
    """Return the table of what was recorded on machines with GPUs, or that there is nothing yet."""
    rows = [
        "| recorded | GPUs | torch | as expected | different | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        machine, names = record["machine"], {"same": [], "DIFFERENT": [], "skipped": []}
        for x in record["items"]:
            names[x["verdict"]].append(f"`{x['item']}`")
        nccl = f", NCCL {machine['NCCL']}" if "NCCL" in machine else ""
        cells = [
            f"[{record['recorded']}]({path.relative_to(ROOT)})",
            f"{machine['count']} x {machine['name']}",
            f"{machine['torch']}{nccl}",
            f"{len(names['same'])} of {record['planned']}",
            ", ".join(names["DIFFERENT"]) or "nothing",
            ", ".join(names["skipped"]) or "nothing",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n" if rows[2:] else "Nothing has been recorded on a GPU yet.\n"


def device_table(day):
    """Return the table of the devices that a day's lessons choose on many kinds of machines."""
    command = [sys.executable, str(ROOT / "tests" / "standin" / "devices.py"), day]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def fill(text, page, outputs, seen, devices=False):
    """Return a page's text with its made parts filled in.

    outputs, of the lessons, and seen, of the faults, are None to leave them be. devices says
    whether the tables of devices are made again.
    """
    lessons = {x["id"]: x for x in read_course()}
    pages, exercises = read_pages(), read_exercises()

    def part(match):
        begin, kind, words, old, end = match.groups()
        try:
            return begin + made(kind, shlex.split(words), old) + end
        except (KeyError, IndexError, StopIteration):
            sys.exit(f"{page}: there is nothing (any more) for {begin.strip()}")

    def made(kind, words, old):
        if kind == "head":
            new = head(words[0], pages)
        elif kind == "foot":
            new = ways(words[0], pages)
        elif kind == "code":
            new = code(lessons[words[0]], words[1:])
        elif kind == "output":
            new = folded(outputs[words[0]]) if outputs else old
        elif kind == "diff":
            new = diff(lessons[words[0]], lessons[words[1]])
        elif kind == "exercises":
            new = exercises_of(words[0], page, exercises)
        elif kind == "exercise_list":
            chosen = [x for x in exercises if x["file"].startswith(f"{words[0]}/")]
            new = exercise_table(chosen, page)
        elif kind == "lessons":
            new = lesson_table(words[0], page, pages, [] if "short" in words else exercises)
        elif kind == "measured":
            new = measured(outputs) if outputs else old
        elif kind == "faults":
            new = fault_table(seen) if seen else old
        elif kind == "works":
            new = works_with()
        elif kind == "gpu":
            new = gpu_table()
        elif kind == "devices":
            new = device_table(words[0]) if devices else old
        else:
            sys.exit(f"{page}: there is no made part of the kind {kind!r}.")
        return new

    return PART.sub(part, text)


# Words of the glossary that whoever has trained a model knows: no page links them.
KNOWN = """accuracy activations batch CPU device epoch GPU gradient learning rate loss optimizer
parameters seed SGD step tensor thread environment core job traceback MNIST median md5 sha256 gzip
states module port checksum process interface signal account constraint partition QOS"""
# What is no prose: made parts, code, links, headings, pictures, HTML, tables.
NO_PROSE = re.compile(
    r"<!-- begin .*?<!-- end -->|^```.*?^```$|`[^`\n]*`|!?\[[^\]\n]*\]\([^)\n]*\)|^#.*?$|<[^>\n]*>"
    r"|^\|.*?$|https?://\S+",
    re.MULTILINE | re.DOTALL,
)


def glossary():
    """Return {word: anchor} of the glossary, without those that everybody knows here.

    A row that explains several words, such as bf16, fp16, fp32, has one anchor.
    """
    rows = re.findall(r'^\| <a id="([\w-]+)"></a>(.+?) \|', (ROOT / GLOSSARY).read_text(), re.M)
    known = set(re.split(r"\s+", KNOWN)) | {"learning rate"}
    words = {word: anchor for anchor, names in rows for word in names.split(", ")}
    return {word: anchor for word, anchor in words.items() if word not in known}


def link_terms(text, page):
    """Return a page's text with a link at the first use of each word of the glossary in its prose.

    A word that is a link already, anywhere in the page, is left as it is.
    """
    for word, anchor in sorted(glossary().items(), key=lambda x: -len(x[0])):
        target = f"{link_to(GLOSSARY, page)}#{anchor}"
        if f"({target})" in text:
            continue
        taken = [x.span() for x in NO_PROSE.finditer(text) if x[0] != f"`{word}`"]
        flags = 0 if word.isupper() or "_" in word else re.IGNORECASE
        pattern = rf"(?<![\w`-])(`{re.escape(word)}`|{re.escape(word)}(?:s|es)?)(?![\w`-])"
        for match in re.finditer(pattern, text, flags):
            if not any(begin <= match.start() < end for begin, end in taken):
                link = f"[{match[1]}]({target})"
                text = text[: match.start()] + link + text[match.end() :]
                break
    return text


def main():
    """Update or check all pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, report what is stale")
    parser.add_argument("--record", nargs="*", metavar="ID", help="run lessons, take their output")
    parser.add_argument("--faults", action="store_true", help="run tests/faults, take what it saw")
    parser.add_argument("--works-with", action="store_true", help="take runs/works_with/ in")
    parser.add_argument("--devices", action="store_true", help="ask which devices lessons choose")
    args = parser.parse_args()
    if args.works_with:
        try:
            take_records()
        except FileNotFoundError as error:
            sys.exit(str(error))
    lessons = read_course()
    outputs, seen, known = None, None, recorded()
    if args.faults:
        with tempfile.TemporaryDirectory() as folder:
            seen = record_faults(Path(folder, "faults"))
    if args.record is not None:
        with tempfile.TemporaryDirectory() as folder:
            outputs = {
                x["id"]: record(x, folder, known.get(x["id"], ""))
                if x["id"] in args.record or not args.record
                else known.get(x["id"], "")
                for x in lessons
            }
    stale = []
    of_lessons = {x["file"] for x in read_pages()}

    def update(file, change):
        path = ROOT / file
        old = path.read_text()
        new = change(old)
        if new != old:
            stale.append(file)
            if not args.check:
                path.write_text(new)

    for page in PAGES:

        def change(text, page=page):
            text = fill(text, page, outputs, seen, args.devices)
            return link_terms(text, page) if page in of_lessons else text

        update(page, change)
    if args.check and stale:
        print(f"Stale: {', '.join(stale)}. Run: python scripts/update_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    processes.end_on_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
