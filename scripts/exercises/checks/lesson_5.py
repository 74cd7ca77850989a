import json

import torch.distributed as dist
from exercises.common import shared_folder


def check_5_1(exercise, rank, world_size, report):
    folder = shared_folder(rank)
    exercise.record(folder)
    dist.barrier()
    files = list(folder.glob(f"*rank{rank}.*"))
    events = [e for file in files for e in json.loads(file.read_text())["traceEvents"]]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
    messages = sum(e.get("name") == "gloo:all_reduce" for e in events)
    if report.equal("traces with its name:", len(files), 1):
        report.equal("steps in its trace:", len(steps), 3)
        report(messages >= 3, f"all_reduce calls in its trace: {messages} (right: 3 or more)")
