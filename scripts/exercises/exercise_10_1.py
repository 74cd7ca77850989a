"""Exercise 10.1: what evaluate() counts over 10, 12 and 3 images, and how many a rank looks at."""

from exercises.common import counting_model


def look(exercise, rank, world_size):
    import torch

    model, looked_at = counting_model()
    results = []
    for count in (10, 12, 3):
        images = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
        labels = (torch.arange(count) < 2).long()  # so the first two are wrong
        looked_at.clear()
        counted = exercise.evaluate(model, images, labels, rank, world_size)
        results.append((count, counted, sum(looked_at)))
    return results


def judge(seen):
    for rank, results in enumerate(seen):
        for count, (right, total), looked_at in results:
            holds, most = (right, total) == (count - 2, count), -(-count // len(seen))
            yield holds, f"rank {rank}: counts {right} of {total} (right: {count - 2} of {count})"
            if holds:
                text = f"rank {rank}: looked at {looked_at} of {count} images"
                yield looked_at <= most, f"{text} (limit {most})"
