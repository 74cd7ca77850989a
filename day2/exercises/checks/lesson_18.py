from exercises.common import Fact, Messages

NUMBERS = 3 * 2**15  # of a larger model: any of the numbers of ranks divides them
SIZES = (2, 3, 8, 12, 96, 1024)


def check_18_1(exercise, rank, world_size):
    """What is predicted, beside what is counted here and the solution's formulas."""
    activations = exercise.ROWS * exercise.WIDTH
    others = f"on {', '.join(map(str, SIZES))} ranks"
    for way in exercise.WAYS:
        with Messages() as messages:
            kept = exercise.step(way)
        predicted = exercise.kept(way, exercise.NUMBERS, world_size)
        yield Fact(f"{way}: bytes kept", predicted, "kept", right=kept)
        more = [exercise.kept(way, NUMBERS, ranks) for ranks in SIZES]
        yield Fact(f"{way}: bytes kept {others}", more, "kept", close=1e-9)
        predicted = exercise.sent(way, exercise.NUMBERS, world_size, activations)
        yield Fact(f"{way}: bytes sent", predicted, "sent", right=messages.bytes)
        more = [exercise.sent(way, NUMBERS, ranks, 6144) for ranks in SIZES]
        yield Fact(f"{way}: bytes sent {others}", more, "sent", close=1e-9)
