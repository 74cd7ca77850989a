"""Exercise 11.2: a rank's batches, of 10 and of 12 chunks, and the steps that train() takes."""

from checks.common import short


def look(exercise, rank, world_size):
    import torch.distributed as dist

    plans = {}
    for chunks in (10, 12):
        plans[chunks] = [part.tolist() for part in exercise.batches(chunks, rank, world_size)]
    counts = [None] * world_size
    dist.all_gather_object(counts, len(plans[10]))
    alike = len(set(counts)) == 1  # otherwise the training would hang
    return plans, exercise.train(10, rank, world_size) if alike else None


def judge(seen):
    for chunks in (10, 12):
        counts = [len(plans[chunks]) for plans, _ in seen]
        other, fewest = counts.index(min(counts)), min(counts)
        fair = chunks // len(seen)
        for rank, count in enumerate(counts):
            text = f"rank {rank}: {count} batches of {chunks} chunks; all ranks can have {fair}"
            if count > fewest:
                text += f": it waits in backward for rank {other}, which has {fewest}"
            yield count == fair, text
        numbers = [number for plans, _ in seen for batch in plans[chunks] for number in batch]
        twice = len(numbers) - len(set(numbers))
        yield twice == 0, f"all ranks: numbers that came twice from {chunks} chunks: {twice}"
    if seen[0][1] is not None:
        steps = [steps for _, steps in seen]
        yield min(steps) == 10 // len(seen), f"all ranks: steps of training: {short(steps)}"
