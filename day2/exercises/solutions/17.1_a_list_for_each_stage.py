"""Solution 17.1: 1F1B, as a list.

Lesson:  17
Kind:    fill in, 20 minutes
Task:    A schedule is a list of what a stage does in a step, and the rest of the
         program only obeys it. GPipe's is given: each stage holds all 8 micro-batches.
         Complete one_forward_one_backward(), so that stage s of p holds at most p - s,
         and no slot more is idle than with GPipe. The run has 4 stages and 8
         micro-batches, the check also others.
Run:     python day2/exercises/solutions/17.1_a_list_for_each_stage.py
Check:   python scripts/check.py 17.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LAYERS = 4  # of the model. Every stage has the same number of them


def gpipe(rank, ranks, micro_batches):
    """Return what a stage does in a step: all forward passes, then all backward.

    A pass is ("F" or "B", the stage, the number of the micro-batch).
    """
    todo = [("F", rank, number) for number in range(micro_batches)]
    return todo + [("B", rank, number) for number in range(micro_batches)]


def one_forward_one_backward(rank, ranks, micro_batches):
    """Return what a stage does in a step: a few forward, then one of each in turn."""
    # No further ahead than there are stages to come: more would have to be held.
    ahead = min(ranks - 1 - rank, micro_batches)
    todo = [("F", rank, number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            todo.append(("F", rank, ahead + number))
        todo.append(("B", rank, number))
    return todo


def build_stage(number, stages=LAYERS):
    """Return a stage of the model: float32 [n, 16] to float32 [n, 16]."""
    layers = []
    for layer in range(LAYERS * number // stages, LAYERS * (number + 1) // stages):
        torch.manual_seed(layer)
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers)


def train_step(own, todo, x, y):
    """Make this rank's gradients as a list says. Return the last rank's loss, a log.

    own: the stages of this rank. x, y: float32 [n, 16], on all ranks. The log says of
    each pass what it was, its stage, of which micro-batch, and how many this rank's
    stages held after it.
    """
    ranks = dist.get_world_size()
    last = len(own) * ranks - 1
    micro_batches = len(todo) // 2 // len(own)
    inputs = x.unflatten(0, (micro_batches, -1))  # of one size, or this is an error
    targets = y.unflatten(0, (micro_batches, -1))
    loss = 0.0
    held = {}  # what F leaves for B
    log, sent = [], []

    def send(tensor, stage, what, number):
        tag = (stage * micro_batches + number) * 2 + (what == "B")
        sent.append(dist.isend(tensor, stage % ranks, tag=tag))

    def receive(stage, what, number):
        neighbor = stage - 1 if what == "F" else stage + 1
        tensor = torch.empty_like(inputs[number])
        tag = (stage * micro_batches + number) * 2 + (what == "B")
        dist.recv(tensor, neighbor % ranks, tag=tag)
        return tensor

    for what, stage, number in todo:
        if what == "F":
            x = receive(stage, what, number) if stage > 0 else inputs[number]
            out = own[stage // ranks](x.requires_grad_())
            if stage == last:
                out = F.mse_loss(out, targets[number]) / micro_batches
                loss += out.item()
            else:
                send(out.detach(), stage + 1, what, number)
            held[stage, number] = x, out
        else:
            x, out = held.pop((stage, number))
            out.backward(receive(stage, what, number) if stage < last else None)
            if stage > 0:
                send(x.grad, stage - 1, what, number)
        log.append((what, stage, number, len(held)))
    for message in sent:
        message.wait()
    return loss, log


def main():
    """Run on every rank: a step of each schedule, drawn, and beside one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    y = x.flip(1).sin()
    whole = build_stage(0, 1)
    right = F.mse_loss(whole(x), y)
    for name, schedule in (("GPipe", gpipe), ("yours", one_forward_one_backward)):
        own = nn.ModuleList([build_stage(rank)])
        loss, log = train_step(own, schedule(rank, ranks, 8), x, y)
        losses, logs = zip(*gather((loss, log)))
        if rank == 0:
            table = slots(logs)
            idle = sum(row.count("..") for row in table)
            held = [max(count for *_, count in log) for log in logs]
            print(name, *map("".join, table), sep="\n")
            print(f"idle: {idle} slots; held: {held} micro-batches")
            print(f"loss {losses[-1]:.5f}, of one process {right:.5f}")


# ---- Shared helpers, identical in every exercise


def slots(logs):
    """Return what each rank did in each slot, such as F0, or ..: a row for each rank.

    f and b are passes of the second half of the model. A pass takes a slot for each of
    its layers. It waits for the one before it, and for the message of a neighbor.
    """
    ends = {}
    stages = 1 + max(stage for log in logs for _, stage, _, _ in log)
    long = LAYERS // stages
    for _ in range(sum(map(len, logs))):  # as long as any may still move
        for log in logs:
            slot = 0
            for what, stage, number, _ in log:
                source = stage - 1 if what == "F" else stage + 1
                slot = long + max(slot, ends.get((what, source, number), 0))
                ends[what, stage, number] = slot
    table = [[".."] * max(ends.values()) for _ in logs]
    for (what, stage, number), slot in ends.items():
        name = f"{what if stage < len(logs) else what.lower()}{number}"
        table[stage % len(logs)][slot - long : slot] = [name] * long
    return table


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
