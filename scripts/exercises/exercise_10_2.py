"""Exercise 10.2: the accuracy that evaluate() returns, and how many images each rank sees."""

from exercises.common import counting_model


def look(exercise, rank, world_size):
    import torch

    model, looked_at = counting_model()
    results = []
    for labels in ([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0, 1]):
        images = torch.tensor([[1.0, 0.0]]).repeat(len(labels), 1)
        looked_at.clear()
        share = exercise.evaluate(model, images, torch.tensor(labels), rank, world_size)
        results.append((float(share), labels.count(0), len(labels), sum(looked_at)))
    return results


def judge(seen):
    for rank, results in enumerate(seen):
        for share, right, count, looked_at in results:
            holds, most = abs(share - right / count) < 1e-4, -(-count // len(seen))
            text = f"rank {rank}: says {share:.1%} of {count} images"
            yield holds, f"{text} (right: {right / count:.1%}, limit 0.01%)"
            if holds:
                text = f"rank {rank}: looked at {looked_at} of {count} images"
                yield looked_at <= most, f"{text} (limit {most})"
