"""What the check of each exercise of lesson 10 does."""

import os
import socket
import time

import torch
import torch.distributed as dist
from exercises.common import attempt, counting_model, noted, sentence_of, shared_folder


def check_10_1(exercise, rank, world_size, report):
    """What evaluate() counts over 10, 12 and 3 images, and how many a rank looks at."""
    model, looked_at = counting_model()
    for count in (10, 12, 3):
        images = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
        labels = (torch.arange(count) < 2).long()  # so the first two are wrong
        looked_at.clear()
        right, total = exercise.evaluate(model, images, labels, rank, world_size)
        text = f"counts {right} of {total} (right: {count - 2} of {count})"
        if report((right, total) == (count - 2, count), text):
            report_images(report, looked_at, count, world_size)


def check_10_2(exercise, rank, world_size, report):
    """The accuracy that evaluate() returns, and how many images each rank sees."""
    model, looked_at = counting_model()
    for labels in ([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0, 1]):
        count, right = len(labels), labels.count(0) / len(labels)
        images = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
        looked_at.clear()
        share = float(exercise.evaluate(model, images, torch.tensor(labels), rank, world_size))
        text = f"says {share:.1%} of {count} images (right: {right:.1%}, limit 0.01%)"
        if report(abs(share - right) < 1e-4, text):
            report_images(report, looked_at, count, world_size)


def report_images(report, looked_at, count, world_size):
    """Report how many of the images a rank has looked at, and how many it should at most."""
    most = -(-count // world_size)
    text = f"looked at {sum(looked_at)} of {count} images"
    report(sum(looked_at) <= most, f"{text} (limit {most})")


GPUS = [4, 2, 0]  # on a node, for pick_device() of exercise 10.3


def check_10_3(exercise, rank, world_size, report):
    """The group that start() joins on two simulated nodes, its devices, and save()."""
    port = [free_port() if rank == 0 else None]
    dist.broadcast_object_list(port)
    dist.barrier()
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()  # the exercise makes its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    pick, asked, seen = exercise.pick_device, [], []
    join, joined = dist.init_process_group, []

    def pick_and_note(local_rank, gpus):
        asked.append(local_rank)
        return torch.device("cpu")

    def join_and_note(*arguments, **options):
        joined.append(options.get("timeout") == exercise.TIMEOUT)
        join(*arguments, **options)

    def pick_backend(gpus):
        joined.append("asked")
        return "gloo"

    def main(device):
        path = shared_folder(dist.get_rank()) / "model.pt"
        barrier = dist.barrier
        dist.barrier = lambda *_, **__: wait_for_all(path.parent)
        _, error = attempt(exercise.save, torch.nn.Linear(1, 1), path)
        dist.barrier = barrier
        error = error or unreadable(path)
        seen.append((dist.get_rank(), dist.get_world_size(), len(calls), error))

    calls = noted(torch, "save", 0.3)  # a large model on a slow disk
    exercise.pick_device, exercise.main = pick_and_note, main
    torch.cuda.device_count = lambda: 0
    exercise.pick_backend, dist.init_process_group = pick_backend, join_and_note
    exercise.start()
    return seen[0], asked, [str(pick(rank, gpus)) for gpus in GPUS], joined


def wait_for_all(folder):
    """Wait until all ranks have called this; 5 s, then say who did not."""
    (folder / str(dist.get_rank())).touch()
    end = time.monotonic() + 5
    while missing := [x for x in range(dist.get_world_size()) if not (folder / str(x)).exists()]:
        if time.monotonic() > end:
            who = ", ".join(map(str, missing))
            raise RuntimeError(f"this barrier is never called on rank {who}")
        time.sleep(0.01)


def unreadable(path):
    """Return what goes wrong when a file of parameters is read, None if nothing does."""
    try:
        torch.load(path, weights_only=True)
    except Exception as error:
        return sentence_of(error, None)


def free_port():
    """Return a port that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def compare_10_3(seen, report):
    for rank, ((found, size, _, _), asked, devices, _) in enumerate(seen):
        text = f"rank {rank}: is rank {found} of {size} in its group"
        report((found, size) == (rank, 4), f"{text} (right: {rank} of 4)")
        text = f"rank {rank}: its local rank is {', '.join(map(repr, asked)) or 'never used'}"
        report(asked == [rank % 2], f"{text} (right: {rank % 2})")
        right = [f"cuda:{rank % gpus}" if gpus else "cpu" for gpus in GPUS]
        text = f"local rank {rank} of nodes with {', '.join(map(str, GPUS))} GPUs: "
        report(devices == right, f"{text}{', '.join(devices)} (right: {', '.join(right)})")
    joined = seen[0][-1]
    backend = "asked" if "asked" in joined else "not asked"
    timeout = "passed on" if True in joined else "not passed on"
    text = f"all ranks: pick_backend() is {backend}, TIMEOUT is {timeout}"
    report({"asked", True} <= set(joined), f"{text} (right: asked, passed on)")
    calls = sum(calls for (_, _, calls, _), *_ in seen)
    report.equal("all ranks: times that the file was written:", calls, 1)
    errors = [error for (*_, error), *_ in seen if error]
    report.no_error("all ranks: save(), then read the file:", errors[0] if errors else None)
