from exercises.common import Fact, Messages


def check_18_1(exercise, rank, world_size):
    """What is predicted, beside what is counted here and the solution's formulas."""
    activations = exercise.ROWS * exercise.WIDTH
    for way in exercise.WAYS:
        with Messages() as messages:
            kept = exercise.step(way)
        predicted = exercise.kept(way, exercise.NUMBERS, world_size)
        yield Fact(f"{way}: bytes kept", predicted, "kept", right=kept)
        yield Fact(f"{way}, 8 ranks: bytes kept", exercise.kept(way, 96_000, 8), "kept")
        predicted = exercise.sent(way, exercise.NUMBERS, world_size, activations)
        yield Fact(f"{way}: bytes sent", predicted, "sent", right=messages.bytes)
        yield Fact(
            f"{way}, 8 ranks: bytes sent", exercise.sent(way, 96_000, 8, 4096), "sent"
        )
