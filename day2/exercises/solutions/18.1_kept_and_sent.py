"""Solution 18.1: four ways to share a training: what a rank keeps, and what it sends.

Lesson:  18
Kind:    fill in, 25 minutes
Task:    Complete kept() and sent() before you run anything: a formula for each of the
         four ways. The run takes a step in each, counts, and shows your prediction
         beside it. The check also asks for other models and other numbers of ranks.
Run:     python day2/exercises/solutions/18.1_kept_and_sent.py
Check:   python scripts/check.py 18.1 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

WAYS = ["ddp", "zero1", "fsdp", "tensor"]
WIDTH = 64  # numbers in a row of x
ROWS = 128  # of x, on all ranks together


def kept(way, numbers, ranks):
    """Return the bytes of parameters, gradients and Adam's averages that a rank keeps.

    numbers: parameters of the model, 4 bytes each. zero1 divides Adam's averages only,
    fsdp divides everything, and tensor gives each rank its part of each layer.
    """
    parameters, gradients, averages = 4 * numbers, 4 * numbers, 8 * numbers
    if way == "ddp":
        return parameters + gradients + averages
    if way == "zero1":
        return parameters + gradients + averages / ranks
    return (parameters + gradients + averages) / ranks


def sent(way, numbers, ranks, activations):
    """Return the bytes that a rank sends in a step, if messages go around in a ring.

    An all_gather or a reduce_scatter of n bytes then sends n * (ranks - 1) / ranks.
    activations: numbers in what goes into the two layers, and in what comes out.
    """
    once = 4 * numbers * (ranks - 1) / ranks  # an all_gather, or a reduce_scatter
    if way == "tensor":  # an all_reduce in forward, one in backward; no parameters
        return 2 * 2 * 4 * activations * (ranks - 1) / ranks
    # An all_reduce is a reduce_scatter and an all_gather, so ZeRO-1 sends no more.
    # FSDP gathers the parameters twice, for forward and for backward.
    return {"ddp": 2 * once, "zero1": 2 * once, "fsdp": 3 * once}[way]


def main():
    """Run on every rank: take a step in each way, and compare with the prediction."""
    ranks = dist.get_world_size()
    for way in WAYS:
        predicted = kept(way, NUMBERS, ranks), sent(way, NUMBERS, ranks, ROWS * WIDTH)
        if None in predicted:
            counted = "predict first"
        else:
            messages.clear()
            counted = f"{step(way):,.0f} and {sum(messages):,.0f}"
        if dist.get_rank() == 0:
            print(f"{way}: bytes kept and sent: {counted}; predicted: {predicted}")


# ---- What is counted: a step in each of the four ways

NUMBERS = 2 * 4 * WIDTH * WIDTH  # in two matrices: up, and down again
messages = []  # bytes that this rank sends in each, if they go around in a ring


def step(way):
    """Take one step of Adam. Return the bytes of parameters, gradients and averages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    whole = torch.randn(2, 4 * WIDTH, WIDTH) / WIDTH
    if way == "tensor":  # all of x, and some columns of up with their rows of down
        own = whole.chunk(ranks, dim=1)[rank].clone()
        gradient = own.grad = gradient_of(own, x, OutOfRows.apply, IntoColumns.apply)
        whole = own
    else:  # all numbers for some of x
        x = x.chunk(ranks)[rank]
        own = whole.view(-1) if way == "ddp" else whole.view(ranks, -1)[rank].clone()
        if way == "fsdp":
            whole = all_gather(own)  # for forward, which forgets it layer by layer
            whole = all_gather(own)  # for backward
        gradient = gradient_of(whole.view(2, 4 * WIDTH, WIDTH), x).view(-1)
        own.grad = all_reduce(gradient) if way == "ddp" else reduce_scatter(gradient)
        own.grad /= ranks
        if way == "ddp":
            gradient = own.grad
        if way == "fsdp":
            whole, gradient = own, own.grad
    adam = torch.optim.Adam([own])
    adam.step()
    if way == "zero1":
        whole = all_gather(own)
    averages = [adam.state[own][name] for name in ("exp_avg", "exp_avg_sq")]
    return sum(tensor.nbytes for tensor in (whole, gradient, *averages))


def gradient_of(weights, x, add_up=torch.clone, copy=torch.clone):
    """Return the gradient of weights, float32 [2, columns, WIDTH]."""
    weights = weights.detach().requires_grad_()
    # As in the middle of a model: what comes before wants a gradient, too.
    hidden = copy(x.clone().requires_grad_()) @ weights[0].T
    add_up(hidden.tanh() @ weights[1]).square().mean().backward()
    return weights.grad


class IntoColumns(torch.autograd.Function):
    """Into column-wise layers: all ranks have the same x. Backward adds up."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return all_reduce(gradient)


class OutOfRows(torch.autograd.Function):
    """Add up what all ranks have. Backward copies."""

    @staticmethod
    def forward(context, part):
        return all_reduce(part)

    @staticmethod
    def backward(context, gradient):
        return gradient


def all_reduce(part):
    """Return the sum over all ranks."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    note(2, total)
    return total


def all_gather(own):
    """Return the parts of all ranks, one after the other."""
    whole = own.new_empty(len(own) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, own)
    note(1, whole)
    return whole


def reduce_scatter(whole):
    """Return this rank's part of the sum over all ranks."""
    own = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(own, whole)
    note(1, whole)
    return own


def note(times, whole):
    """Note what a rank sends in a ring: a message (or two) but for its own part."""
    ranks = dist.get_world_size()
    messages.append(times * whole.nbytes * (ranks - 1) / ranks)


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4"]
        options.append(__file__)
        torchrun(options)
