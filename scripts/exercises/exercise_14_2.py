"""Exercise 14.2: the mean of 48 MB of ratings, and how much the memory grows meanwhile."""

from exercises.common import shared_folder


def look(exercise, rank, world_size):
    path = shared_folder(rank) / f"rank{rank}"
    exercise.write(path)
    ratings = exercise.Ratings(path)
    before = exercise.peak_memory()
    mean = exercise.mean(ratings)
    path.unlink()
    return mean, exercise.peak_memory() - before


def judge(seen):
    for rank, (mean, grown) in enumerate(seen):
        yield mean == 2.5, f"rank {rank}: mean {mean:g} (right: 2.5)"
        text = f"rank {rank}: its memory grew by {grown:.0f} MB while it read 48 MB in parts of 4"
        yield grown < 16, f"{text} (limit 16 MB)"
