"""Exercise 17.3: backward in two halves: gradients of weights fill the bubble (ZB-H1).

Lesson:  17
Kind:    fill in, 35 minutes
Task:    Backward is two passes here. B makes the gradient of a stage's input, for which
         the stage before waits. W makes those of its weights, which can wait. Complete
         zero_bubble(): when does each stage do its W? At most 12 of all slots may stay
         idle, and no stage may hold more than 4 micro-batches, as stage 0 with 1F1B.
         The run has 8 micro-batches, the check also 5.
Run:     python day2/exercises/17.3_fill_the_bubble.py
Check:   python scripts/check.py 17.3
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def one_forward_one_backward(stage, stages, micro_batches):
    """Return what a stage does in a step of lesson 17's 1F1B: F, or all of backward."""
    ahead = min(stages - 1 - stage, micro_batches)
    todo = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            todo.append(("F", ahead + number))
        todo.append(("BW", number))
    return todo


def zero_bubble(stage, stages, micro_batches):
    """Return what a stage does in a step: F, B and W, each once for a micro-batch."""
    ahead = min(stages - 1 - stage, micro_batches)
    todo = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            todo.append(("F", ahead + number))
        todo.append(("B", number))
        # TODO: a W right after each B leaves 24 slots idle. Which stage can put off how
        # many of its W, so that they are done where it would wait?
        todo.append(("W", number))
    return todo


def build_stage(number):
    """Return a stage of the model: float32 [n, 16] to float32 [n, 16]."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def train_step(stage, todo, x, y):
    """Make a stage's gradients as a list says. Return the loss (last stage), and a log.

    x, y: float32 [n, 16], on all ranks. The log says of each pass what it was, of which
    micro-batch, and how many micro-batches the stage held after it.
    """
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    micro_batches = sum(what == "F" for what, _ in todo)
    inputs = x.unflatten(0, (micro_batches, -1))  # of one size, or this is an error
    targets = y.unflatten(0, (micro_batches, -1))
    weights = [x for x in stage.parameters() if x.requires_grad]  # not frozen
    loss = 0.0
    held = {}  # what F leaves until W is done
    log, sent = [], []
    for what, number in todo:
        if what == "F":
            x = inputs[number] if rank == 0 else receive(rank - 1, inputs[number])
            out = stage(x.requires_grad_())
            if last:
                out = F.mse_loss(out, targets[number]) / micro_batches
                loss += out.item()
            else:
                sent.append(dist.isend(out.detach(), rank + 1))
            held[number] = x, out, None
        if what in ("B", "BW"):
            x, out, _ = held[number]
            gradient = None if last else receive(rank + 1, out)
            # Of the input only. What F has kept stays: W needs it again.
            (x_grad,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
            held[number] = x, out, gradient
        if what in ("W", "BW"):
            x, out, gradient = held.pop(number)
            if weights:
                out.backward(gradient, inputs=weights)  # of the weights only: adds up
        # B sends immediately. BW is one piece: nothing leaves before W is done, too.
        if what in ("B", "BW") and rank > 0:
            sent.append(dist.isend(x_grad, rank - 1))
        log.append((what, number, len(held)))
    for message in sent:
        message.wait()
    return loss, log


def main():
    """Run on every rank: a step of each schedule, drawn, and beside one process."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    y = x.flip(1).sin()
    whole = nn.Sequential(*(build_stage(number) for number in range(stages)))
    right = F.mse_loss(whole(x), y)
    right.backward()
    for name, schedule in (("1F1B", one_forward_one_backward), ("yours", zero_bubble)):
        stage = build_stage(rank)
        loss, log = train_step(stage, schedule(rank, stages, 8), x, y)
        pairs = zip(stage.parameters(), whole[rank].parameters())
        far = max((own.grad - one.grad).abs().max().item() for own, one in pairs)
        losses, logs, gaps = zip(*gather((loss, log, far)))
        if rank == 0:
            table = slots(logs)
            idle = sum(row.count("..") for row in table)
            held = [max(count for *_, count in log) for log in logs]
            share = idle / stages / len(table[0])
            print(name, *map("".join, table), sep="\n")
            print(f"idle: {idle} slots, {share:.1%}; held at most: {held}")
            print(f"loss {losses[-1]:.5f}, of one process {right:.5f}", end="; ")
            print(f"gradients at most {max(gaps):.0e} from one process's")


# ---- Shared helpers, identical in every exercise


def slots(logs):
    """Return what each stage did in each slot, such as F0, or ..: a row for each stage.

    F, B and W take a slot each: three products of matrices of the same size. A pass
    waits for the one before it; F and B also wait for the message of a neighbor.
    """
    begins, ends = {}, {}
    for _ in range(sum(map(len, logs))):  # as long as any may still move
        for stage, log in enumerate(logs):
            slot = 0
            for what, number, _ in log:
                neighbor = {"F": stage - 1, "W": None}.get(what, stage + 1)
                begin = max(slot, ends.get((what[0], number, neighbor), 0))
                slot = begin + len(what)  # BW takes two
                begins[what, number, stage] = begin
                ends[what[0], number, stage] = slot
    table = [[".."] * max(ends.values()) for _ in logs]
    for (what, number, stage), begin in begins.items():
        for i, letter in enumerate(what):
            table[stage][begin + i] = f"{letter}{number}"
    return table


def receive(source, like):
    """Return what a neighbor sends: a tensor of the same shape as like."""
    tensor = torch.empty_like(like)
    dist.recv(tensor, source)
    return tensor


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
