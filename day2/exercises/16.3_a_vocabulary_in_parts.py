"""Exercise 16.3: the loss of a divided vocabulary, without gathering the logits.

Lesson:  16
Kind:    fill in, 20 minutes
Task:    Each rank has the logits of its own part of the vocabulary. Compute the loss
         without gathering them: complete loss_in_parts(), with three short messages.
         You need all_reduce and AddUp from below main().
         The run's logits are small: only the check has large ones, too.
Run:     python day2/exercises/16.3_a_vocabulary_in_parts.py
Check:   python scripts/check.py 16.3
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCABULARY = 12000  # tokens. Each of N ranks has VOCABULARY / N, rank 0 the first
POSITIONS = 32
WIDTH = 32
sent = []  # bytes that this rank sends in each message, if they go around in a ring


def loss_gathered(logits, targets):
    """Return the cross entropy, from all logits on every rank."""
    return F.cross_entropy(Gather.apply(logits), targets)


def loss_in_parts(logits, targets):
    """Return the cross entropy, the mean over the positions: the same on all ranks.

    logits: float32 [positions, VOCABULARY / N], of this rank's tokens.
    targets: int64 [positions], tokens of the whole vocabulary, the same on all ranks.
    """
    # TODO 1: largest, the largest logit at each position, from all ranks. all_reduce
    # TODO 2: total, at each position the sum of exp(logit - largest). AddUp.apply
    # TODO 3: score, at each position logit - largest of the target, which only one rank
    # has. What do the others add? AddUp.apply
    # The loss is the mean of total.log() - score.
    return loss_gathered(logits, targets)


def main():
    """Run on every rank: compare both ways with one process."""
    data = make_data()
    loss, *right = run_alone(*data)
    if dist.get_rank() == 0:
        print(f"one process: loss {loss:.4f}")
    for name, loss_of in (("gathered", loss_gathered), ("in parts", loss_in_parts)):
        loss, *gradients, bytes_sent = run(loss_of, *data)
        pairs = zip(gradients, right)
        far = torch.stack([(mine - one).abs().max() for mine, one in pairs]).max()
        dist.all_reduce(far, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            text = f"loss {loss:.4f}, gradients {far:.0e} away, {bytes_sent:,.0f} bytes"
            print(f"{name}: {text} sent in forward")


def all_reduce(own, op=dist.ReduceOp.SUM):
    """Return the sum over all ranks, or with op=dist.ReduceOp.MAX the largest."""
    result = own.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op)
    note(2, result)
    return result


def note(times, whole):
    """Note what a rank sends in a ring: a message (or two) but for its own part."""
    ranks = dist.get_world_size()
    sent.append(times * whole.nbytes * (ranks - 1) / ranks)


class Copy(torch.autograd.Function):
    """Into column-wise layers: all ranks have the same x. Backward adds up."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return all_reduce(gradient)


class AddUp(torch.autograd.Function):
    """Add up what all ranks have. Backward copies."""

    @staticmethod
    def forward(context, part):
        return all_reduce(part)

    @staticmethod
    def backward(context, gradient):
        return gradient


class Gather(torch.autograd.Function):
    """Put all logits together. Backward takes the gradient of this rank's own ones."""

    @staticmethod
    def forward(context, logits):
        ranks = dist.get_world_size()
        parts = logits.new_empty(ranks * len(logits), logits.shape[1])
        dist.all_gather_into_tensor(parts, logits.contiguous())
        note(1, parts)
        return torch.cat(parts.chunk(ranks), 1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def run(loss_of, hidden, weight, targets):
    """Return the loss, the gradients of hidden and of this rank's part of weight, and
    the bytes that forward sends.

    hidden: float32 [positions, WIDTH]. weight: float32 [VOCABULARY, WIDTH].
    """
    hidden = hidden.clone().requires_grad_()
    part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    sent.clear()
    loss = loss_of(F.linear(Copy.apply(hidden), part), targets)
    bytes_sent = sum(sent)
    loss.backward()
    return loss.item(), hidden.grad, part.grad, bytes_sent


def run_alone(hidden, weight, targets):
    """Return the loss and the gradients of one process, of weight this rank's part."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(F.linear(hidden, weight), targets)
    loss.backward()
    part = weight.grad.chunk(dist.get_world_size())[dist.get_rank()]
    return loss.item(), hidden.grad, part


def make_data():
    """Return hidden, weight and targets, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5
    targets = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    return hidden, weight, targets


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
