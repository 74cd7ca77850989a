"""Numbers of ranks and images that do not fit, and a loss that is no number."""

from faults import local, nine_images, refused
from support.run import ALONE


def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path):
    few = ("--images", 3198, "--save-every", 5, "--lr", 1e9)
    job = local("2", "12", *few, cwd=tmp_path)
    job.until("ranks: 2")
    says = r"^The loss is not finite\. Take a smaller --lr\.$"
    do = "As it says. No snapshot has been written of it."
    output = job.check("the loss becomes NaN, lesson 12", says, do)
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("snapshot*"))


def test_three_ranks_cannot_share_lesson_15(tmp_path):
    says = r"15_\S+: error: 3 ranks cannot share 32 pieces of text and 64 rows evenly$"
    env = ALONE | {"WORLD_SIZE": "3"}
    refused("lesson 15: 3 ranks", says, "1, 2 or 4 ranks.", "15", env=env)


def test_fewer_images_than_one_batch_for_each_rank(tmp_path):
    says = r"\S+ has not one batch for each worker of each rank$"
    file = ("--file", nine_images(tmp_path))
    env = ALONE | {"WORLD_SIZE": "8"}
    refused("lesson 11: 9 images, 8 ranks", says, "Or more images.", "11", *file, env=env)
