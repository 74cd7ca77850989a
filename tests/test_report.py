"""The report of a run: it shows what the lessons printed and wrote, and nothing else."""

import html
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LESSONS, ROOT, need_browser, open_in_browser, proof_of, recorded_output
from markupsafe import escape

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f86c9", "#d1690e", "#2b9a66", "#9b6fc9", "#858f9b"
BANDWIDTH = r"([\d.]+) ms \(.*?\), +([\d.,]+) MB/s \(bus +([\d.,]+)\)"

# What lessons 2, 6, 8 and 10 leave in runs/: losses, one for each 100 images.
CURVES = {
    "2_mnist_training": [2 / (1 + i) for i in range(40)],  # more steps than points: two make one
    "6_mnist_ddp_pt": [2.1 / (1 + i / 5) for i in range(20)],
}
for stem in ("8_mnist_ddp_pt_lr", "10_mnist_ddp_pt_multinode"):
    CURVES[f"{stem}/alone"] = [2.2 / (1 + i) for i in range(20)]
    CURVES[f"{stem}/linear"] = [2.3 / (1 + i / 2) for i in range(20)]
    CURVES[f"{stem}/unscaled"] = [2.4 / (1 + i / 4) for i in range(20)]

# Says in the title of the page around it what is cut off, and what lies on top of something else.
MEASURE = """
<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach((x) => (x.open = true));
  const wrong = [];
  for (const x of document.querySelectorAll("body *:not(pre *):not(.numbers *)"))
    if (x.getBoundingClientRect().right > innerWidth) wrong.push(`${x.tagName} is cut off`);
  for (const svg of document.querySelectorAll("svg")) {
    const all = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((x) => [x, x.getBoundingClientRect()]);
    texts.forEach(([x, a], i) => {
      if (a.left < all.left || a.right > all.right || a.top < all.top || a.bottom > all.bottom)
        wrong.push(`${x.textContent} leaves its figure`);
      for (const [y, b] of texts.slice(0, i))
        if (a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2)
          wrong.push(`${x.textContent} lies on ${y.textContent}`);
    });
  }
  parent.document.title = wrong.join("; ") || `all in its place, ${innerWidth} pixels`;
});
</script>
"""


def write_events(folder, losses):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(f"runs/{folder}", purge_step=0) as writer:
        for step, loss in enumerate(losses, 1):
            writer.add_scalar("loss/train", loss, 100 * step)


def write_benchmarks(folder):
    """Leave in a folder what benchmark.py does, with invented numbers. Return it: [JSON, ...]."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from benchmark import results as benchmark
        from benchmark.cases import CASES

        results = []
        for began, case in enumerate(CASES):
            names = dict.fromkeys(x for ratio in case.ratios for x in (ratio.over, ratio.under))
            names = [name for name in names if name]
            figures = {name: [1234.5 * (i + 2), 777.0, 1e4] for i, name in enumerate(names)}
            machine = {"when": "yesterday", "CPU": "one <core>", "torch": "2", "command": "it"}
            results.append(benchmark.summarise(case, figures))
            results[-1] |= {"began": began, "machine": machine}
            benchmark.write(results[-1])
        return results


def run_recorded(*arguments, folder, **changes):
    """Run run_course.main in a folder, with lessons that only give their recorded output.

    changes: what is not as recorded, lesson_1={"problem": "exit status 1"}. Return the exit status.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        import run_course

        def run(lesson):
            for place, losses in CURVES.items():
                if place.split("/")[0] == Path(lesson["file"]).stem:
                    write_events(place, losses)
            output = recorded_output(lesson["id"]) + "\n"
            result = {"output": output, "showed": proof_of(output), "seconds": 1.25}
            result |= {"problem": "", "skipped": ""}
            return result | changes.get(f"lesson_{lesson['id']}", {})

        patch.setattr(run_course, "run", run)
        patch.setattr(sys, "argv", ["run_course.py", *arguments])
        return run_course.main()


def report_in(folder):
    return (folder / "runs" / "report.html").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of all lessons, in a folder with benchmarks and an earlier run's curve."""
    folder = tmp_path_factory.mktemp("full")
    write_benchmarks(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_events("2_mnist_training", [9] * 30)
    assert run_recorded(folder=folder) == 0
    return report_in(folder)


def figures_of(page):
    return re.findall(r'<figure class="card" id="(.*?)"', page)


def figure_of(page, name):
    return re.search(rf'<figure class="card" id="{name}">.*?</figure>', page, re.DOTALL)[0]


def table_of(page, name):
    """Return the table of a figure without its head: [(text, ...), ...]."""
    rows = re.findall(r"<tr>(<th scope=\"row\">.*?)</tr>", figure_of(page, name))
    return [tuple(re.findall(r">([^<>]+)<", row)) for row in rows]


def drawn(page, name, what, color):
    """Return the lines (what: "stroke") or bars ("fill") of a color: lists of points (x, y)."""
    pattern = rf'<path d="([^"]*)" clip-path="[^"]*" style="[^"]*\b{what}: {color}'
    paths = re.findall(pattern, figure_of(page, name))
    points = [re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path) for path in paths]
    return [[(float(x), float(y)) for x, y in path] for path in points]


def circles(page, name, color):
    """Return where the circles of a color stand: [(x, y), ...]."""
    pattern = rf'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="[^"]*stroke: {color}'
    return [(float(x), float(y)) for x, y in re.findall(pattern, figure_of(page, name))]


def length(bar, axis):
    """Return how long a bar is along x (0) or y (1)."""
    places = [point[axis] for point in bar]
    return max(places) - min(places)


def check_scale(places, values):
    """Assert that places along an axis are those of the values."""
    scale = (places[-1] - places[0]) / (values[-1] - values[0])
    assert places == pytest.approx([places[0] + scale * (v - values[0]) for v in values], abs=0.02)


def check_lines(page, name, lines, x_of=float, y_of=math.log):
    """Assert that a figure has these lines, [(color, [x], [y]), ...], those of a color together."""
    colors = dict.fromkeys(color for color, _, _ in lines)
    found = [line for color in colors for line in drawn(page, name, "stroke", color)]
    assert [len(line) for line in found] == [len(xs) for _, xs, _ in lines]
    points = [point for line in found for point in line]  # of all lines: they share their axes
    check_scale([x for x, _ in points], [x_of(x) for _, xs, _ in lines for x in xs])
    check_scale([y for _, y in points], [y_of(y) for _, _, ys in lines for y in ys])


def number(text):
    return float(text.replace(",", ""))


def test_a_run_ends_with_its_report(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "run_course.sh", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "report: runs/report.html"
    url = (tmp_path / "runs" / "report.html").as_uri()
    page, messages = open_in_browser(url, tmp_path / "browser")
    assert messages == []
    assert "1 of 1 lessons ok" in page
    assert "<code>scripts/run_course.sh 1</code>" in page
    assert figures_of(page) == ["bandwidth"]
    printed = re.findall(BANDWIDTH, done.stdout)
    assert [row[2:] for row in table_of(page, "bandwidth")] == printed
    line = (BLUE, [4e3, 1e6, 64e6], [number(bus) for _, _, bus in printed])
    check_lines(page, "bandwidth", [line], x_of=math.log)


def test_every_lesson_stands_there_with_its_output(page):
    for lesson_id in LESSONS:
        output = recorded_output(lesson_id)
        assert f"<code>{escape(proof_of(output))}</code>" in page
        assert escape(output) in page
    lessons = [name for name in figures_of(page) if not name.startswith("case-")]
    assert lessons == [
        "loss",
        "accuracy",
        "rate-loss",
        "speed-up",
        "bandwidth",
        "time-shares",
        "profile-shares",
        "throughput",
        "memory",
        "restart",
        "recommender",
        "slow-network",
        "sharded",
    ]


def test_loss_curves_come_from_the_event_files_of_the_run(page):
    seen = [100 * i for i in range(1, 21)]
    alone, linear, unscaled = (
        CURVES[f"8_mnist_ddp_pt_lr/{x}"] for x in ("alone", "linear", "unscaled")
    )
    losses = CURVES["2_mnist_training"]
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2])]
    lines = [(BLUE, [2 * x for x in seen], means), (ORANGE, seen, CURVES["6_mnist_ddp_pt"])]
    check_lines(page, "loss", lines)
    lines = [(BLUE, seen, alone), (GREEN, seen, linear), (ORANGE, seen, unscaled)]
    check_lines(page, "rate-loss", lines)
    for color in (BLUE, GREEN, ORANGE):  # lesson 10's circles lie on lesson 8's curve, as recorded
        (line,) = drawn(page, "rate-loss", "stroke", color)
        places = circles(page, "rate-loss", color)
        assert sum(places, ()) == pytest.approx(sum(line, ()), abs=0.01)
    first = table_of(page, "loss")[0]
    expected = (f"{x:.4f}" for x in (means[0], sum(means) / 20, means[-1]))
    assert first == ("lesson 2: one process", *expected)


def test_speed_up_is_that_of_lesson_7(page):
    output = recorded_output("7")
    row = r"^(one process.*?|\w+ scaling) +\d.*  ([\d.]+) \((.*) to (.*)\)$"
    printed = re.findall(row, output, re.M)
    assert len(printed) == 4
    rows = table_of(page, "speed-up")
    assert [(row[0], *row[-3:]) for row in rows] == printed
    bars = drawn(page, "speed-up", "fill", BLUE)
    check_scale([0, *(length(bar, 0) for bar in bars)], [0, *(float(x) for _, x, *_ in printed)])
    (cores,) = (gain for name, gain, *_ in printed if name.endswith("all cores"))
    assert f"one process on all cores does {cores} times <span" in page


def test_bandwidths_are_those_of_lessons_1_and_9(page):
    printed = re.findall(BANDWIDTH, recorded_output("1") + recorded_output("9"))
    rows = table_of(page, "bandwidth")
    assert [row[2:] for row in rows] == printed
    assert [row[0] for row in rows[::3]] == [
        "lesson 1: all, 4 ranks",
        "lesson 9: within a node, 2 ranks",
        "lesson 9: between nodes, 2 ranks",
    ]
    bus = [number(row[-1]) for row in rows]
    sizes = [4e3, 1e6, 64e6]
    lines = [(BLUE, sizes, bus[:3]), (GREEN, sizes, bus[3:6]), (ORANGE, sizes, bus[6:])]
    check_lines(page, "bandwidth", lines, x_of=math.log)


@pytest.mark.parametrize(
    ("name", "lesson_id"), [("time-shares", "5"), ("profile-shares", "test-profile")]
)
def test_time_shares_are_those_of_the_lesson(page, name, lesson_id):
    lines = recorded_output(lesson_id).splitlines()
    rows = table_of(page, name)
    shown = [line.split() for line in lines if line.endswith("%")]
    assert rows == [tuple(row) for row in shown if row[0].isdigit()]
    bars = [drawn(page, name, "fill", color) for color in (PURPLE, BLUE, GREEN, ORANGE, GREY)]
    for rank, row in enumerate(rows):
        data, compute, communication, overlap, idle = (float(x.rstrip("%")) for x in row[1:])
        parts = [0, data, compute - overlap, overlap, communication - overlap, idle]
        places = [bars[0][rank][0][0], *(max(x for x, _ in bar[rank]) for bar in bars)]
        check_scale(places, [sum(parts[: i + 1]) for i in range(6)])


def test_streaming_is_that_of_lesson_11(page):
    output = recorded_output("11")
    parts = zip(("streamed", "from memory"), output.split("now the same batches from memory"))
    found = [(source, re.findall(r"epoch (\d): .* ([\d,]+) images/s", x)) for source, x in parts]
    epochs = [(source, *row) for source, rows in found for row in rows]
    assert len(epochs) >= 2
    assert table_of(page, "throughput") == epochs
    row = r"^(.+): at most ([\d,]+) MB in rank 0(?:, ([\d,]+) MB more in its workers)?$"
    (_, rank, worker), (_, rank_at_the_end, none) = memory = re.findall(row, output, re.M)
    assert none == ""  # from memory there is no worker: an empty cell, which table_of leaves out
    assert table_of(page, "memory") == [memory[0], memory[1][:2]]
    for name, axis, values in (
        ("throughput", 1, [speed for _, _, speed in epochs]),
        ("memory", 0, [rank, worker, rank_at_the_end]),
    ):
        bars = drawn(page, name, "fill", BLUE) + drawn(page, name, "fill", GREEN)
        check_scale([0, *(length(bar, axis) for bar in bars)], [0, *map(number, values)])


def test_three_numbers_stand_at_the_top(page):
    numbers = re.findall(r"<strong>(.*?)</strong> .*\(lesson (\d+)\)", page)
    assert [lesson for _, lesson in numbers] == ["2", "6", "7"]
    assert all(number in proof_of(recorded_output(lesson)) for number, lesson in numbers)
    assert page.index("<strong>") < page.index("<figure") < page.index('id="machine"')


def test_accuracies_are_those_of_the_lessons(page):
    rows = table_of(page, "accuracy")
    assert [name for name, _ in rows] == [f"lesson {x}" for x in (2, 4, 6, 11, 12, 13)]
    for name, accuracy in rows:
        output = recorded_output(name.split()[1])
        assert accuracy == re.findall(r"^(?:=> |test accuracy: )([\d.]+)%", output, re.M)[-1]
    bars = drawn(page, "accuracy", "fill", BLUE)
    check_scale([max(x for x, _ in bar) for bar in bars], [float(x) for _, x in rows])


def test_a_restart_is_that_of_lesson_12(page):
    output = recorded_output("12")
    found = re.findall(r"^step (\d+): snapshot .* loss ([\d.]+)$", output, re.M)
    assert [row[1:] for row in table_of(page, "restart")] == found
    assert [row[0] for row in table_of(page, "restart")] == ["start 1"] + ["start 2"] * 4
    steps, losses = ([float(x) for x in column] for column in zip(*found))
    check_lines(page, "restart", [(BLUE, steps, losses)], y_of=float)


def test_errors_ways_and_parts_are_those_of_lessons_14_16_and_17(page):
    output = recorded_output("14")
    assert [x for _, x in table_of(page, "recommender")] == re.findall(r"RMSE ([\d.]+)", output)
    bars = drawn(page, "recommender", "fill", GREY) + drawn(page, "recommender", "fill", BLUE)
    values = [float(x) for _, x in table_of(page, "recommender")]
    check_scale([0, *(length(bar, 0) for bar in bars)], [0, *values])
    lines = [line.split() for line in recorded_output("16").splitlines() if line.endswith("%")]
    rows = table_of(page, "slow-network")
    assert [" ".join(row).split() for row in rows] == [x[:-2] for x in lines if x[0] != "=>"]
    bars = drawn(page, "slow-network", "fill", BLUE)
    check_scale([0, *(length(bar, 0) for bar in bars)], [0, *(float(row[3]) for row in rows)])
    pattern = r"^(\w+), MB a rank: parameters ([\d.]+), gradients ([\d.]+), Adam's states ([\d.]+)"
    rows = re.findall(pattern, recorded_output("17"), re.M)
    assert table_of(page, "sharded") == sorted(rows)
    bars = [drawn(page, "sharded", "fill", color) for color in (BLUE, ORANGE, GREEN)]
    sizes = [float(x) for row in sorted(rows) for x in row[1:]]
    check_scale([0, *(length(bar, 0) for pair in zip(*bars) for bar in pair)], [0, *sizes])


def test_benchmarks_stand_there_with_their_own_date_and_numbers(page, tmp_path):
    results = write_benchmarks(tmp_path)
    names = [name for name in figures_of(page) if name.startswith("case-")]
    assert names == [f"case-{x['name']}" for x in results]
    for x in results:
        shown = figure_of(page, f"case-{x['name']}")
        assert f"<h3>{escape(x['title'])}</h3>" in shown
        assert "yesterday, one &lt;core&gt;, torch 2." in shown
        assert '<code class="quiet">$ it</code>' in shown
        for ratio in x["ratios"]:
            assert f"{ratio['what']}: " in shown
            assert f"({ratio['target']}: {ratio['verdict']})" in shown or not ratio["target"]
        rows = table_of(page, f"case-{x['name']}")
        assert [row[0] for row in rows] == list(x["figures"])
        for row, figure in zip(rows, x["figures"].values()):
            values = [figure[key] for key in ("median", "lowest", "highest")]
            assert list(map(number, row[1:4])) == pytest.approx(values, abs=0.5)
            assert row[4] == "3"


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_cut_off_or_covered(page, width, tmp_path):
    need_browser("Liberation Sans", "DejaVu Sans Mono")
    # The page forbids scripts. The measuring one needs that line away.
    measured = re.sub("<meta http-equiv=.*>", "", page).replace("</body>", f"{MEASURE}</body>")
    # In a frame, because the browser's window cannot be as narrow as a telephone.
    frame = (
        f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{html.escape(measured)}">'
    )
    (tmp_path / "frame.html").write_text(f"<!doctype html><title></title>{frame}</iframe>")
    dom, messages = open_in_browser((tmp_path / "frame.html").as_uri(), tmp_path / "browser")
    assert messages == []
    assert re.search("<title>(.*?)</title>", dom)[1] == f"all in its place, {width} pixels"


def test_the_page_needs_no_network_and_can_be_read_aloud(page):
    assert not re.findall(r"(?:src|href|action|data|srcset)=\"(?!#)", page)
    assert not re.findall(r"url\((?!#)|@import|<script|<link", page)
    ids = re.findall(r"<[^>]* id=\"([^\"]*)\"", page)
    assert len(ids) == len(set(ids))
    assert page.count("<svg") == len(re.findall(r'<div role="img" aria-label="[^"]+"><svg', page))
    assert not re.findall(r"<th(?![^>]* scope=)[ >]", page)


def test_what_did_not_run_is_left_out(tmp_path):
    assert run_recorded("0", "2", folder=tmp_path) == 0
    page = report_in(tmp_path)
    assert figures_of(page) == ["loss"]
    assert "8_mnist_ddp_pt_lr" not in page
    assert "benchmark" not in page


def test_a_failed_lesson_is_shown_as_failed(tmp_path):
    output = "<script>alert('1 & 2')</script>\n 4 kB:  1.0 ms,  1.0 MB/s, bus  1.0 MB/s\n"
    failed = {"output": output, "showed": "=> <b>&", "problem": "exit status 1"}
    assert run_recorded("1", "9", folder=tmp_path, lesson_1=failed) == 1
    page = report_in(tmp_path)
    assert "1 of 2 lessons ok" in page
    assert '<span class="state problem">exit status 1</span>' in page
    assert "<details open><summary>lesson 1: exit status 1</summary>" in page
    assert escape(output) in page
    assert "<code>=&gt; &lt;b&gt;&amp;</code>" in page
    assert "<script" not in page
    assert [row[0][:8] for row in table_of(page, "bandwidth")] == ["lesson 9"] * 6


def test_a_lesson_that_cannot_run_here_is_shown_as_skipped(tmp_path, capsys):
    output = "1 kB:  1.0 ms,  1.0 MB/s, bus  1.0 MB/s\nThere are <no> wheels.\n"
    skipped = {"output": output, "showed": "", "skipped": "There are <no> wheels."}
    assert run_recorded("0", "1", folder=tmp_path, lesson_1=skipped) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"^ +1 +1\.2  skipped: There are <no> wheels\.$", out, re.M)
    assert "\n1 of 1 lessons ok, 1 skipped, 2 seconds in all\n" in out
    page = report_in(tmp_path)
    assert '<span class="state ok">1 of 1 lessons ok, 1 skipped</span>' in page
    assert '<td class="wide">There are &lt;no&gt; wheels.</td>' in page
    assert '<span class="state skipped">skipped</span>' in page
    assert "<details><summary>lesson 1: skipped</summary>" in page
    assert escape(output) in page
    assert figures_of(page) == []
    assert "problem" not in page.partition("</style>")[2]


def test_a_report_that_cannot_be_written_gets_one_sentence(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file, not a folder")
    assert run_recorded("0", folder=tmp_path) == 1
    out, err = capsys.readouterr()
    assert out.endswith("\n1 of 1 lessons ok, 1 seconds in all\n")
    assert err == "There is no report: runs/report.html cannot be written (runs: File exists).\n"
