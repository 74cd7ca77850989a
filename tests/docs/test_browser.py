"""In a real browser: the page to play with computes as the lessons do, and the slides fit."""

import html
import json
import re
import shutil
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from catalog import load
from docs.pages import DECKS, PLAY
from formulas import Model, around, holds, operations, sends
from runner import report
from support.run import (
    ROOT,
    load_lesson,
    open_in_browser,
    output_of,
    recorded_output,
    require_browser,
    require_programs,
    run,
    seeded_rng,
    skip_or_fail_in_ci,
)

COST, FSDP, TENSOR, PIPELINE = map(load_lesson, ("18", "15", "16", "17"))
PREDICT = load("scripts/predict_step.py")
COUNT = load("day2/count_step.py")
BUBBLE = load("day2/exercises/solutions/17.3_fill_the_bubble.py")
PAGE = (ROOT / PLAY).read_text()


def in_page(text, page, function, given=None, options=()):
    """Write a page with this text; return what a function of in_page.js returns in it."""
    script = Path(__file__).with_name("in_page.js").read_text()
    script += f"addEventListener('load', () => report({function}, {json.dumps(given)}));"
    page.write_text(text.replace("</head>", f"<script>{script}</script></head>"))
    dom = open_in_browser(f"file://{page}", page.with_name("profile"), *options)
    wrong, result = json.loads(html.unescape(re.search('"report">(.*?)</pre>', dom, re.S)[1]))
    assert wrong == []
    return result


def choose(rng):
    """Return settings of all figures."""
    layers, numbers = rng.randint(1, 9), rng.randint(1, 9**7)
    return {
        "ranks": rng.randint(2, 8),
        "latency": rng.choice([1, 50, 2000]),
        "tree": rng.random() < 0.5,
        "gigabits": 10 ** rng.uniform(-1, 3),
        "within": rng.uniform(1, 900),
        "cap": rng.randint(1, 50),
        "layers": layers,
        "numbers": numbers,
        "megabytes": layers * numbers * 4 / 1e6,
        "ms": rng.uniform(1, 999),
        "width": rng.choice([64, 128]),
        "length": rng.choice([16, 64]),
        "texts": rng.randint(1, 4),
        "vocabulary": rng.choice([128, 8 * rng.randint(1, 999)]),
        "tflops": rng.uniform(1, 900),
        "gpus": rng.choice([1, 2, 4]),
        "nodes": rng.choice([1, 2]),
        "parts": rng.choice([1, 2, 3, 4, 5, 8, 12, 16, 24, 32]),
        "name": rng.choice(["GPipe", "1F1B", "interleaved", "zero bubble"]),
        "backward": rng.choice([1, 2]),
        "checkpointing": rng.random() < 0.5,
        "experts": rng.choice([1, 2, 4, 8]),
    }


def check_ring(s, states):
    sums, arrived = load("slides/figures/ideas_day1.py").ring_states(s["ranks"])
    for state, held, new in zip(states, sums, arrived, strict=True):
        assert state["sums"] == [[sum(part) for part in row] for row in held]
        assert sorted(map(tuple, state["arrived"])) == sorted(new)


def check_step(s, step):
    layers = [torch.empty(s["numbers"])] * s["layers"]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, s["cap"] * 2**20]
    buckets, _ = dist._compute_bucket_assignment_by_size(layers, limits)
    assert step["buckets"] == buckets
    sizes = [len(bucket) * s["numbers"] * 4 / 1e6 for bucket in buckets]
    end, begin = s["ms"], s["ms"] * PREDICT.FORWARD
    times = [begin + (end - begin) * (bucket[-1] + 1) / len(layers) for bucket in buckets]
    link = COST.Link(s["latency"] / 1e3, s["gigabits"] / 8, s["tree"])
    assert step["total"] == pytest.approx(
        COST.step_ms(COST.Step(s["ranks"], 1, link, sizes, [*times, end, end]))
    )


def check_fit(s, fit):
    gpus, nodes, ways = s["gpus"], s["nodes"], fit["ways"]
    ranks = gpus * nodes
    for lesson in (FSDP, TENSOR, PIPELINE):
        lesson.LAYERS, lesson.WIDTH, lesson.LENGTH = s["layers"], s["width"], s["length"]
    model = FSDP.Net()
    model.tokens = torch.nn.Embedding(s["vocabulary"], s["width"])
    model.logits = torch.nn.Linear(s["width"], s["vocabulary"])
    size = FSDP.held(model.parameters())
    assert fit["count"]["all"] * 4 == size
    # Lesson 15's own proof judges what the page says of a rank, and of one process.
    names = ("parameters", "gradients", "states")
    sharded, one = ways["FSDP"]["bytes"], ways["DDP"]["bytes"]
    counts = [sharded[x] for x in names]
    counts += [counts[0] + sharded["layer"], ways["FSDP"]["sends"]]
    runs = [(torch.zeros(1), counts)] * 2
    with mock.patch.object(dist, "get_world_size", return_value=ranks):
        assert FSDP.compare_all_three(*runs, (torch.zeros(1), [size], model)) == 0
    assert [one[x] for x in names] == [ranks * x for x in counts[:3]]
    assert ways["ZeRO-1"]["bytes"] == one | {"states": sharded["states"]}
    # What lesson 16's layer keeps: all of it, or a tensor rank's part.
    mesh = mock.MagicMock()
    mesh.get_local_rank.return_value = 0
    for parts, kept in ((1, one), (gpus, ways["tensor"]["bytes"])):
        layer = TENSOR.Layer()
        mesh["tensor"].size.return_value = parts
        TENSOR.split_by_hand(SimpleNamespace(layers=[layer]), mesh)
        x = torch.zeros(parts * s["texts"], s["length"], s["width"], requires_grad=True)
        with mock.patch.object(dist, "all_reduce"):
            _, counted = PIPELINE.forward(layer, x)
        assert kept["activations"] == pytest.approx(s["layers"] * counted, rel=0.05)
    once = operations(size / 4, s["layers"], s["width"], s["length"])
    needed = s["texts"] * s["length"] * once
    assert fit["computing"] == pytest.approx(needed / s["tflops"] / 1e9)


def check_together(s, page):
    """FSDP with tensor and context ranks, or with experts on different ranks."""
    again, ranks, tokens = s["checkpointing"], s["gpus"] * s["nodes"], s["texts"] * s["length"]
    sizes = s["layers"], s["width"], 1, 1, 4 * s["width"], s["vocabulary"], False, 2
    model = Model(*sizes, s["experts"], min(2, s["experts"]))

    def ms(sent, size, apart, share=1):
        rings = min(apart, s["gpus"]) * share * (size * apart > s["gpus"])  # that leave a node
        return sent / 125e3 * (rings / s["gigabits"] if rings else 1 / s["within"])

    for name, way in page["ways"].items():
        parts = dict(re.findall(r"(tensor|context|on) (\d+)", name))
        tensor, context, on = (int(parts.get(x, 1)) for x in ("tensor", "context", "on"))
        case = COUNT.Layout(1, ranks / context / tensor, context, tensor), tokens / context, again
        # FSDP divides what is not an expert between all ranks; others have the same experts.
        own = model._replace(experts=model.experts / on)
        rest = model._replace(experts=0) if on > 1 else own
        held = holds(model, *case) | {"whole": holds(own, *case)["whole"]}
        assert sum(way["bytes"].values()) == pytest.approx(sum(held.values()))
        sent = sends(rest, *case)
        apart = 6 * around(ranks / on) * model.layers * (own.layer - rest.layer)
        hides = ms(sent["FSDP"], ranks // tensor, tensor) + ms(apart, ranks // on, on)
        x = (12 if again else 8) * around(on) * model.layers * tokens * model.width * model.active
        far = s["gpus"] * (on - s["gpus"]) / max(1, on - 1)  # all send to all
        waits = ms(sent["tensor"], tensor, 1) + ms(sent["context"], context, tensor)
        waits += ms(x, on, 1, far)
        found = [way[x] / tensor / context for x in ("hides", "waits")]  # of a micro-batch
        assert found == pytest.approx([hides, waits])


def check_schedule(s, found):
    name, ranks, parts = s["name"], s["ranks"], s["parts"]
    if name == "interleaved":
        assert (found is None) == bool(parts % ranks)  # no full rounds
        if found:
            assert found["idle"] == pytest.approx((ranks - 1) / (2 * parts + ranks - 1))
        return
    short = {"forward": "F", "backward": "BW"}
    make = PIPELINE.SCHEDULES.get(name, BUBBLE.zero_bubble)
    lists = [make(stage, ranks, parts) for stage in range(ranks)]
    todo = [[[short.get(x, x), i, stage] for x, i in row] for stage, row in enumerate(lists)]
    if name == "zero bubble" or s["backward"] == 2:
        table = BUBBLE.slots(todo)
    else:
        table = PIPELINE.slots([[(*x, 0) for x in row] for row in lists])
    assert found["table"] == [" ".join(row) for row in table]
    idle = sum(row.count("..") for row in table)
    assert found["idle"] == pytest.approx(idle / ranks / len(table[0]))
    change = {"F": 1, "B": 0, "BW": -1, "W": -1}
    assert found["held"] == [max(accumulate(change[x] for x, *_ in row)) for row in todo]


def test_the_page_computes_what_the_lessons_compute(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "slides" / "figures")
    rng = seeded_rng()
    chosen = [choose(rng) for _ in range(60)]
    computed = in_page(PAGE, tmp_path / "play.html", "compute", chosen)
    for s, found in zip(chosen, computed, strict=True):
        print(s)
        check_ring(s, found["ring"])
        check_step(s, found["step"])
        check_fit(s, found["fit"])
        check_together(s, found["together"])
        check_schedule(s, found["schedule"])


def test_the_page_reads_links_from_a_report_and_from_lesson_18(tmp_path):
    own = recorded_output("9")
    known = dict.fromkeys(("idea", "figure", "showed", "problem", "skipped"), "")
    known |= {"id": "9", "output": own, "seconds": 1, "files": []}
    report.write(tmp_path / "runs" / "report.html", [known], "")
    files = [(tmp_path / "runs" / "report.html").read_text(), recorded_output("18")]
    links = in_page(PAGE, tmp_path / "play.html", "links", files)
    bus = re.findall(r"64 MB: .*\(bus +(.*)\)", own)[-1].replace(",", "")
    hop = re.search(r"size / (\S+) Gbit", files[1])[1]
    assert [link["gigabits"] for link in links] == pytest.approx([float(bus) * 8e-3, float(hop)])


LONG_WORDS = """
machine = login.supercomputer.university.edu
activate = module load pytorch && source /shared/course/.venv/bin/activate
place = --account=ml_course_2026 --partition=shared --reservation=course
nodes = --account=ml_course_2026_g --partition=gpu --constraint=gpu --qos=interactive
"""


@pytest.mark.full
def test_the_slides_can_be_built_and_nothing_is_cut_off(tmp_path):
    require_browser("Liberation Sans", "DejaVu Sans Mono")
    require_programs("npm")
    slides, folder = ROOT / "slides", tmp_path / "slides"
    shutil.copytree(slides, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "day1", tmp_path / "day1")
    if (slides / "node_modules" / "made-from").exists():
        (folder / "node_modules").symlink_to(slides / "node_modules")
    status, said = run([folder / "build.sh", "cheatsheet"], 200, tmp_path, None)
    if not (folder / "node_modules" / "made-from").exists():
        skip_or_fail_in_ci(f"npm could not install marp: {said}")
    assert status == 0, said
    assert (folder / "cheatsheet.pdf").read_bytes().startswith(b"%PDF-")
    (folder / "site.txt").write_text("place = --account=a\nnodes =\n")
    said = output_of(run([folder / "build.sh", "--for", "cluster"], 200, tmp_path, None), 1)
    assert said.startswith("slides/site.txt has no word for: nodes.")
    marp = [folder / "node_modules" / ".bin" / "marp", "--no-stdin", "--template", "bare"]
    (folder / "site.txt").write_text(LONG_WORDS)
    write, page = load(folder / "deck.py").write, folder / "deck.html"
    for name, setting in product(DECKS, ["laptop", "cluster"]):
        (folder / "deck.md").write_text(write(Path(name).stem, setting))
        output_of(run([*marp, "deck.md"], 200, folder, None))
        assert in_page(page.read_text(), page, "unseen") == []


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("moves", [True, False])
def test_one_guesses_and_moves_every_slider_with_the_figure_in_sight(tmp_path, width, moves):
    options = [f"--window-size={width},844"]
    options += [] if moves else ["--force-prefers-reduced-motion"]
    found, passes, label = in_page(PAGE, tmp_path / "play.html", "use", options=options)
    assert found == []
    assert passes == 2 * 8 * 32  # stages, micro-batches
    assert label == ("pause" if moves else "play")
