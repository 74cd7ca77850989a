"""Exercise 17.6: which parts of a checkpoint exist at each moment, and what load reads."""

import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock


def look(exercise, rank, world_size):
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter

    write = FileSystemWriter.write_data

    def slowly(*arguments):
        time.sleep(1)
        return write(*arguments)

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    folder = Path(folder[0])
    latest = folder / "latest"
    torch.manual_seed(0)
    model = exercise.shard()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = dist.new_group(backend="gloo")
    with mock.patch.object(FileSystemWriter, "write_data", slowly):
        for step in (1, 2):
            exercise.train_step(model, optimizer)
            saved = [x.to_local().clone() for x in model.parameters()]
            saving = exercise.begin(model, optimizer, folder / f"step-{step}", group)
            waits = (folder / f"step-{step}" / ".metadata").exists()
            before = latest.read_text() if latest.exists() else None
            exercise.train_step(model, optimizer)
            exercise.finish(saving, folder / f"step-{step}")
            dist.barrier()
    after = latest.read_text() if latest.exists() else None
    folders = sorted(path.name for path in folder.glob("step-*"))
    same = after is not None
    if same:
        loaded = exercise.load(folder)[0].parameters()
        same = all(torch.equal(x.to_local(), y) for x, y in zip(loaded, saved))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return waits, before, after, folders, same


def judge(seen):
    for rank, (waits, before, after, folders, same) in enumerate(seen):
        what = "waits until step-2 is written" if waits else "continues meanwhile"
        yield not waits, f"rank {rank}: training {what} (right: it continues)"
        text = f"rank {rank}: latest is {before} before step-2 is complete, then {after}"
        yield (before, after) == ("step-1", "step-2"), f"{text} (right: step-1, then step-2)"
        yield folders == ["step-2"], f"rank {rank}: folders: {', '.join(folders)} (right: step-2)"
        text = f"rank {rank}: what is loaded is {'' if same else 'not '}what was saved"
        yield same, f"{text} (right: as it was when begin was called)"
