"""Exercise 10.2: the accuracy that evaluate() says, and at how many images each rank looks."""

from checks.common import counting_model


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
            own = abs(share - right / count) < 1e-4
            yield (
                own and looked_at <= -(-count // len(seen)),
                f"rank {rank}: says {share:.1%}, looked at {looked_at}; over all images "
                f"{right} of {count} are right: {right / count:.1%}",
            )
