"""Solution 16.2: each rank keeps its share of the positions: sequence parallel by hand.

Lesson:  16
Kind:    fill in, 40 minutes
Task:    Between its split layers, tensor parallel keeps all positions of a text on each
         rank. Let each rank keep only its share of them there: sequence parallel.
         Complete GatherColumns and RowsScatter (TODO 1 to 4), and finish() (TODO 5).
         You need all_reduce, all_gather and reduce_scatter from below main().
Run:     python day2/exercises/solutions/16.2_a_share_of_the_positions.py
Check:   python scripts/check.py 16.2 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH = 192  # numbers for each position
POSITIONS = 48  # in the text. With N ranks, a rank's share is POSITIONS / N
sent = []  # bytes that this rank sends in each message, if they go around in a ring


class Columns(torch.autograd.Function):
    """Lesson 16's Copy and a column-wise layer: float32 [POSITIONS, WIDTH] goes in."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return all_reduce(gradient @ weight), gradient.T @ x


class Rows(torch.autograd.Function):
    """A row-wise layer and lesson 16's AddUp: float32 [POSITIONS, WIDTH] comes out."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return all_reduce(x @ weight.T)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.T @ x


class GatherColumns(torch.autograd.Function):
    """As Columns, but a share goes in: float32 [POSITIONS / N, WIDTH].

    again: keep nothing but this share, and gather again in backward.
    """

    @staticmethod
    def forward(context, x, weight, again):
        whole = all_gather(x)
        context.again = again
        context.save_for_backward(x if again else whole, weight)
        return whole @ weight.T

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        whole = all_gather(x) if context.again else x
        # Each rank knows its columns' part of it, for all positions: add up, and share.
        return reduce_scatter(gradient @ weight), gradient.T @ whole, None


class RowsScatter(torch.autograd.Function):
    """As Rows, but a share comes out: float32 [POSITIONS / N, WIDTH]."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return reduce_scatter(x @ weight.T)

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        gradient = all_gather(gradient)  # for all positions, as forward had them
        return gradient @ weight, gradient.T @ x


def finish(block):
    """After backward in a block of shares, complete the gradients of what is whole."""
    for parameter in block.norm.parameters():  # they have seen a share of the positions
        parameter.grad = all_reduce(parameter.grad)


class Block(nn.Module):
    """Norm, two layers, residual. way: alone, tensor, sequence, or again."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5)
        if way != "alone":
            self.up = nn.Parameter(own_part(self.up, 0))
            self.down = nn.Parameter(own_part(self.down, 1))

    def forward(self, x):
        y = self.norm(x)
        if self.way == "alone":
            return x + F.gelu(y @ self.up.T) @ self.down.T
        if self.way == "tensor":
            return x + Rows.apply(F.gelu(Columns.apply(y, self.up)), self.down)
        y = F.gelu(GatherColumns.apply(y, self.up, self.way == "again"))
        return x + RowsScatter.apply(y, self.down)


def main():
    """Run on every rank: compare with one process, and count."""
    ranks = dist.get_world_size()
    x = torch.randn(POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1))
    formulas = {"tensor": 8 + 32 / ranks, "sequence": 4 + 36 / ranks}
    formulas["again"] = 40 / ranks
    if dist.get_rank() == 0:
        print(f"alone: keeps {run('alone', x)[1]:.2f} bytes for each number of x")
    for way, formula in formulas.items():
        results, kept, bytes_sent = run(way, x)
        pairs = zip(results, right_for(way, x))
        far = torch.stack([(mine - right).abs().max() for mine, right in pairs])
        dist.all_reduce(far, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            text = f"keeps {kept:.2f} (formula {formula:.2f}), sends {bytes_sent:.2f}"
            gaps = f"output {far[0]:.0e}, gradients {far[1:].max():.0e}"
            print(f"{way}: {text}; from one process: {gaps} away")


def all_reduce(part):
    """Return the sum over all ranks."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    note(2, total)
    return total


def all_gather(share):
    """Return the positions of all ranks: [POSITIONS / N, n] to [POSITIONS, n]."""
    whole = share.new_empty(len(share) * dist.get_world_size(), share.shape[1])
    dist.all_gather_into_tensor(whole, share.contiguous())
    note(1, whole)
    return whole


def reduce_scatter(part):
    """Return this rank's positions of the sum: [POSITIONS, n] to [POSITIONS / N, n]."""
    share = part.new_empty(len(part) // dist.get_world_size(), part.shape[1])
    dist.reduce_scatter_tensor(share, part.contiguous())
    note(1, part)
    return share


def note(times, whole):
    """Note what a rank sends in a ring: a message (or two) but for its own part."""
    ranks = dist.get_world_size()
    sent.append(times * whole.nbytes * (ranks - 1) / ranks)


def own_part(tensor, dim):
    """Return this rank's part of a tensor, cut along dim."""
    parts = tensor.detach().chunk(dist.get_world_size(), dim)
    return parts[dist.get_rank()].clone()


def run(way, x):
    """Return the results, and for each number of x the bytes kept and the bytes sent.

    x: float32 [POSITIONS, WIDTH]. Results: output, gradients of x, up, down, norm.
    """
    block = Block(way)
    shares = way in ("sequence", "again")
    x = own_part(x, 0) if shares else x.clone()
    x.requires_grad_()
    sent.clear()
    output, kept = count_kept(block, x)
    # A sum. With a mean, each rank would divide by the positions of its share only.
    output.square().sum().div(POSITIONS).backward()
    bytes_sent = sum(sent)
    if shares:
        finish(block)
    results = [output.detach(), x.grad, block.up.grad, block.down.grad]
    results += [block.norm.weight.grad, block.norm.bias.grad]
    numbers = POSITIONS * WIDTH
    return results, kept / numbers, bytes_sent / numbers


def right_for(way, x):
    """Return what run() should give, from one process: this rank's parts."""
    (output, of_x, of_up, of_down, *of_norm), _, _ = run("alone", x)
    if way in ("sequence", "again"):
        output, of_x = own_part(output, 0), own_part(of_x, 0)
    return [output, of_x, own_part(of_up, 0), own_part(of_down, 1), *of_norm]


def count_kept(model, x):
    """Return model(x), and how many bytes it keeps for backward, besides parameters."""
    storages = {}

    def keep(tensor):
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    return y, sum(storages.values())


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
