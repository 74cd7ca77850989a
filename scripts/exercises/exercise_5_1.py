"""Exercise 5.1: the traces that record() has written, and the steps and messages in them."""

import json

from exercises.common import shared_folder


def look(exercise, rank, world_size):
    import torch.distributed as dist

    folder = shared_folder(rank)
    exercise.record(folder)
    dist.barrier()
    files = list(folder.glob(f"*rank{rank}.*"))
    events = [e for file in files for e in json.loads(file.read_text())["traceEvents"]]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
    return len(files), len(steps), sum(e.get("name") == "gloo:all_reduce" for e in events)


def judge(seen):
    for rank, (files, steps, messages) in enumerate(seen):
        yield files == 1, f"rank {rank}: traces with its name: {files} (right: 1)"
        if files:
            yield steps == 3, f"rank {rank}: steps in its trace: {steps} (right: 3)"
            text = f"rank {rank}: all_reduce calls in its trace: {messages}"
            yield messages >= 3, f"{text} (right: 3 or more)"
