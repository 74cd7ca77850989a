"""Exercise 13.4: what load_folder() and make_model() do with three folders, one of them wrong."""

import tempfile
from pathlib import Path

from exercises.common import attempt


def look(exercise, rank, world_size):
    cases = []
    for number, (part, classes, others) in enumerate(
        (("val", "abc", "abc"), ("test", "abcdefghijkl", "abcdefghijkl"), ("val", "abc", "acd"))
    ):
        folder = Path(tempfile.mkdtemp(dir="."))
        exercise.draw(folder / "train", classes)
        exercise.draw(folder / part, others)
        data, error = attempt(exercise.load_folder, folder)
        if error is None:
            scores, failure = attempt(exercise.make_model(data[0]), data[1][0][0].unsqueeze(0))
            size = failure or scores.shape[-1]
            cases.append((number, part, len(classes), None, size, len(data[1])))
        else:
            cases.append((number, part, len(classes), error, None, 0))
    return cases


def judge(seen):
    for number, part, classes, error, scores, count in seen[0]:
        what = f"rank 0: train/ and {part}/ with {classes} classes"
        if number == 2:
            refused = bool(error) and "ValueError" in error
            what = f"rank 0: a class is missing in {part}/, and there is a new one"
            yield refused, f"{what}: {error or 'no error'} (right: ValueError)"
        elif error:
            yield False, f"{what}: {error} (right: no error)"
        else:
            yield count == 3 * classes, f"{what}: test pictures: {count} (right: {3 * classes})"
            yield scores == classes, f"{what}: scores for a picture: {scores} (right: {classes})"
