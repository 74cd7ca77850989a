import time

import torch.distributed as dist
from exercises.common import noted, shared_folder


def check_3_1(exercise, rank, world_size, report):
    folder = shared_folder(rank)
    calls = noted(exercise, "download")
    dist.barrier()
    time.sleep(0.15 * rank)  # ranks never arrive at the same moment
    labels = exercise.load_labels(folder / "labels").tolist()
    right = sum(label == place % 10 for place, label in enumerate(labels))
    report.equal("labels that it has read as they should be:", right, 10_000)
    seen = yield len(calls)
    report.equal("all ranks: downloads:", sum(seen), 1)
