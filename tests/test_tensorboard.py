"""TensorBoard: one picture with the loss curves of all lessons that train."""

import json
import sys
from urllib.parse import urlencode
from urllib.request import urlopen

from browser import browse
from helpers import LESSONS, ROOT, need_browser, server, wait_for
from ranks import run_ranks

STEPS = 20
# The runs of lessons 2, 6 and 8, and how many images lie between two of their points: 64 a rank.
# Lesson 8 gives each of its curves 20 points over the images of an epoch.
RUNS = {
    "2_mnist_training": 64,
    "6_mnist_ddp_pt": 128,
    "8_mnist_ddp_pt_lr/alone": 128,
    "8_mnist_ddp_pt_lr/linear": 128,
    "8_mnist_ddp_pt_lr/unscaled": 128,
}
# What the page shows. [[title, [run, ...]], ...] of the cards:
CARDS = r"""[...document.querySelectorAll("card-view")].map(card => [
  card.querySelector("[title]").title,
  [...card.querySelectorAll("tb-data-table-content-row")].map(
    row => row.innerText.trim().split(/\s/)[0]),
])"""
# [[red, green, blue], ...] of the runs, from the list at the left:
COLORS = r"""[...document.querySelectorAll("runs-data-table .run-color-swatch")].map(
  button => getComputedStyle(button).backgroundColor.match(/\d+/g).map(Number))"""
# Where the curves of the card are:
CHART = """(({x, y, width, height}) => [x, y, width, height])(
  document.querySelector("card-view canvas").getBoundingClientRect())"""


def test_the_loss_curves_of_all_lessons_are_in_one_chart(tmp_path):
    need_browser()
    for ranks, lesson_id in ((1, "2"), (2, "6"), (2, "8")):
        few = ("--epochs", 1, "--max-steps", STEPS)
        if lesson_id == "8":
            few = ("--images", 128 * STEPS)
        status, output = run_ranks(ranks, ROOT / LESSONS[lesson_id]["file"], *few, cwd=tmp_path)
        assert status == 0, output
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs"]
    with server(*command, "--host", "127.0.0.1", "--port", "0", cwd=tmp_path) as tensorboard:
        scalars = f"{tensorboard.url}data/plugin/scalars/"

        def get(path, **query):
            with urlopen(f"{scalars}{path}?{urlencode(query)}", timeout=20) as answer:
                return json.load(answer)

        assert wait_for(lambda: set(get("tags")) == set(RUNS), 30), get("tags")
        assert {name for names in get("tags").values() for name in names} == {"loss/train"}
        for run, images in RUNS.items():
            seen = [x for _, x, _ in get("scalars", run=run, tag="loss/train")]
            assert seen == [images * step for step in range(1, STEPS + 1)], run

        with browse(f"{tensorboard.url}#timeseries", tmp_path / "browser") as page:
            page.wait_for(f"{CARDS}.flatMap(card => card[1]).length")
            assert page.value(CARDS) == [["loss/train", sorted(RUNS)]]
            colors = page.value(COLORS)
            assert len(colors) == len(RUNS)

            def all_drawn():
                picture = 255 * page.picture(*page.value(CHART))
                return all((abs(picture - color).max(-1) < 1).sum() > 50 for color in colors)

            assert wait_for(all_drawn, 20)
        assert page.errors == []
        assert [x for x in page.asked_for if not x.startswith(tensorboard.url)] == []


def test_the_profiler_of_tensorboard_answers_for_every_rank(tmp_path):
    """Its server reads the traces of lesson 5. Its charts need the internet, so none is drawn."""
    lesson = ROOT / LESSONS["5"]["file"]
    status, output = run_ranks(4, lesson, "--max-steps", 12, cwd=tmp_path)
    assert status == 0, output
    command = [sys.executable, "-m", "tensorboard.main", "--logdir=./log_ddp"]
    with server(*command, "--host", "127.0.0.1", "--port", "0", cwd=tmp_path) as tensorboard:

        def get(path, **query):
            query = urlencode({"run": "log_ddp", "span": 1, **query})
            url = f"{tensorboard.url}data/plugin/pytorch_profiler/{path}?{query}"
            with urlopen(url, timeout=20) as answer:
                return json.load(answer)

        assert wait_for(lambda: get("runs")["runs"] == ["log_ddp"], 120), get("runs")
        assert {"Overview", "Distributed"} <= set(get("views"))
        ranks = get("workers", view="Overview")
        assert ranks == ["rank0", "rank1", "rank2", "rank3"]
        for rank in ranks:
            steps = get("overview", worker=rank)["steps"]
            names = [x.get("name") for x in steps["columns"]]
            place = names.index("Communication")
            assert len(steps["rows"]) == 12, rank
            assert all(row[place] > 0 for row in steps["rows"]), rank
        shown = get("distributed/overlap", worker="All")
        assert sorted(shown["data"]["all"]) == ranks
