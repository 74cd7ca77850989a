"""Numbers of batches and images that do not fit, and a loss that is no number."""

import pytest
from catalogue import PATIENCE, changed, local, nine_images, refused
from helpers import ALONE, ROOT


def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path):
    few = ("--images", 3198, "--save-every", 5, "--lr", 1e9)
    job = local("2", "12", *few, cwd=tmp_path)
    job.until("ranks: 2")
    output = job.check(
        "the loss becomes NaN, lesson 12",
        r"^The loss is not finite\. Take a smaller --lr\.$",
        "As it says. No snapshot has been written of it.",
    )
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("snapshot*"))


def test_a_rank_has_a_batch_less(tmp_path):
    line = "[:share].tolist()"
    file = changed(tmp_path, "12", line, "[: share - 32 * rank].tolist()")
    few = ("--images", 640, "--batch-size", 32, "--epochs", 1, "--data-dir", ROOT / "data")
    job = local("2", file, *few, cwd=tmp_path, env=PATIENCE)
    job.until("ranks: 2")
    output = job.check(
        "rank 1 has one batch less than rank 0",
        r"^The first to fail: rank \d on imitated node \d ended with .*",
        "The same number of batches on all ranks; `TORCH_DISTRIBUTED_DEBUG=DETAIL` tells who is "
        "in which collective.",
    )
    assert "=> " not in output


def test_images_that_are_no_batch_for_every_rank_are_left_out(tmp_path):
    few = ("--images", 65, "--batch-size", 32, "--epochs", 1)
    job = local("2", "12", *few, cwd=tmp_path)
    job.check(
        "one image is left for two ranks",
        r"^=> starts: 1, images once an epoch: 64 of 65 \(limit 64\), .*",
        "Nothing: it is left out, in each epoch another one.",
        status=0,
    )


@pytest.mark.parametrize("ranks", ["1", "8"])
def test_fewer_images_than_one_batch_for_each_rank(ranks, tmp_path):
    refused(
        f"lesson 11: 9 images and {ranks} ranks",
        r"\S+ has not one batch for each rank\. Take a smaller --batch-size\.",
        "As it says, or more images.",
        "11",
        "--file",
        nine_images(tmp_path),
        env=ALONE | {"WORLD_SIZE": ranks},
    )
