"""Exercise 15.6: a checkpoint that is written while training continues.

Lesson:  15
Kind:    fill in, 20 minutes
Task:    Training waits until each checkpoint is written. Let it continue meanwhile, but
         let "latest" name a checkpoint only once that is complete. The run does not
         look when latest is written: only the check does.
Run:     python day2/exercises/15.6_written_meanwhile.py
Check:   python scripts/check.py 15.6
"""

import os
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def begin(model, optimizer, folder, group):
    """Save the model in a folder, step-N. Return what finish needs."""
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    # TODO: return immediately, while a thread writes a copy and sends its own messages.
    dcp.save(state, checkpoint_id=folder)
    name_latest(folder)


def finish(saving, folder):
    """Wait until the checkpoint is complete, if need be. Then it is the latest."""
    # TODO


def name_latest(folder):
    """Write which folder is the latest checkpoint, and remove the others."""
    if dist.get_rank() == 0:
        latest = folder.parent / "latest"
        latest.with_suffix(".new").write_text(folder.name)
        latest.with_suffix(".new").replace(latest)  # never half a name
        for other in folder.parent.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)


def load(folder):
    """Return a model with the weights of the latest checkpoint, and its optimizer."""
    with torch.device("meta"):  # shapes only
        model = shard()
    model.to_empty(device="cpu")  # memory, only for this rank's parts
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    weights, states = get_state_dict(model, optimizer)  # they say which parts to read
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder / Path(folder, "latest").read_text())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return model, optimizer


def shard():
    """Return a model, divided among the ranks."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    mesh = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu")  # all ranks
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return model


def train_step(model, optimizer):
    """Take one step. Return the loss before it."""
    x = torch.linspace(-2, 2, 32)[:, None]
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x.sin())
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    """Run on every rank: save after 10 steps, train on, and load."""
    torch.manual_seed(0)
    model = shard()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    folder = Path(folder[0])
    for _ in range(10):
        train_step(model, optimizer)
    saving = begin(model, optimizer, folder / "step-10", group)
    written = Path(folder, "step-10", ".metadata").exists()
    loss = train_step(model, optimizer)
    finish(saving, folder / "step-10")
    again = train_step(*load(folder))
    if dist.get_rank() == 0:
        print(f"complete when begin returns: {written}")
        print(f"loss after 10 steps: {loss:.6f}, of the checkpoint: {again:.6f}")
        shutil.rmtree(folder)


# ---- Shared helpers, identical in every exercise


def start():
    """Be one rank: join the process group, run main, leave the group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    main()
    dist.barrier()  # leave together
    time.sleep(0.2)  # let gloo's threads end: torch before 2.8 can hang here
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        start()
    else:  # started with python: let torchrun start the ranks
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
