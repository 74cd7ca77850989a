"""Exercise 21.1: experts over the data axis of a grid, and no token left out.

Lesson:  21
Kind:    fill in, 40 minutes
Task:    Four ranks, data 2 x tensor 2. Four experts live on the data axis, two on each
         of its ranks, and are cut along the tensor axis. Tokens travel to their experts
         and back, however many they are: in the check, some experts get none, and the
         grid is 4 x 1, too. Complete Exchange.backward (TODO 1), ask_experts (TODO 2)
         and complete_gradients (TODO 3). The gradients and their norm must be those of
         one process.
Run:     python day2/exercises/21.1_experts_on_the_grid.py
Check:   python scripts/check.py 21.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOKENS = 12  # of each data rank
WIDTH = 8  # numbers in a token
EXPERTS = 4
DATA, TENSOR = 2, 2  # ranks along each axis
TIMEOUT = timedelta(seconds=20)


def exchange(rows, got, sent, group):
    """Return the rows that all ranks of a group send to this one: [sum(got), WIDTH].

    rows: [sum(sent), WIDTH], those for the group's first rank first. got, sent: how
    many come from each rank, and go to each, as lists.
    """
    received = rows.new_empty(sum(got), WIDTH)
    dist.all_to_all_single(received, rows.contiguous(), got, sent, group)
    return received


class Exchange(torch.autograd.Function):
    """exchange(), with gradients."""

    @staticmethod
    def forward(context, rows, got, sent, group):
        """Return the rows received, and remember the counts for backward."""
        context.way = got, sent, group
        return exchange(rows, got, sent, group)

    @staticmethod
    def backward(context, grad):
        """Return the gradient of rows; grad: of the rows that were received."""
        # TODO 1: grad is about rows that other ranks have sent. Where must it go?
        _, sent, _ = context.way
        return grad.new_zeros(sum(sent), WIDTH), None, None, None


def ask_experts(tokens, choice, experts, data):
    """Return the answers, in the order of the tokens: float64 [n, WIDTH].

    choice: int64 [n], each token's expert, 0 to EXPERTS - 1. experts: those of this
    rank; the first data rank has the first ones. data: the group of the data axis.
    """
    # TODO 2: this asks one of this rank's own experts, whatever was chosen. In which
    # order must tokens be sent? Which counts must each rank know before they travel? Of
    # what arrives, which rows are for which expert? And how do the answers come back?
    return torch.cat([experts[0](tokens[:6]), experts[1](tokens[6:])])


def complete_gradients(gate, experts, data, tensor):
    """Make the gradients those of the mean over all tokens. Return the norm of all.

    All tensor ranks have the same gate, and the same biases of experts' second layers.
    """
    # TODO 3: which gradients are sums over the data axis already? And on how many ranks
    # is each number, if each shall count once in the norm?
    parameters = [*gate.parameters(), *experts.parameters()]
    for x in parameters:
        dist.all_reduce(x.grad, group=data)
        x.grad /= DATA
    return nn.utils.get_total_norm([x.grad for x in parameters]).item()


def run(gate, experts, tokens, target, data, tensor):
    """Leave gradients in gate and experts. Return the output and the norm."""
    best, choice = gate(tokens).softmax(1).max(1)
    answers = ask_experts(tokens, choice, experts, data)
    result = tokens + best[:, None] * answers
    F.mse_loss(result, target).backward()
    return result, complete_gradients(gate, experts, data, tensor)


def main():
    """Run on every rank: one step, beside one process that has all experts."""
    groups = make_groups()
    tokens, target = make_tokens()
    place, _ = places()
    gate, experts = make_layer(groups[1])
    result, norm = run(gate, experts, tokens[place], target[place], *groups)
    right, right_gate, _, right_norm = run_alone(tokens, target)
    off = (result - right[place]).abs().max()
    far = (gate.weight.grad - right_gate.weight.grad).abs().max()
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(f"rank {rank}: output off by {off:.1g}, gate's gradient by {far:.1g}")
    if dist.get_rank() == 0:
        print(f"norm {norm:.6f}, of one process {right_norm:.6f}")


# ---- Shared helpers, identical in every exercise


def places():
    """Return this rank's place on the data axis, and on the tensor axis."""
    return divmod(dist.get_rank(), TENSOR)


def make_groups():
    """Return this rank's group along data, and that along tensor."""
    ranks = torch.arange(DATA * TENSOR).view(DATA, TENSOR)
    data, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=TIMEOUT)
    tensor, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=TIMEOUT)
    return data, tensor


class CopyTo(torch.autograd.Function):
    """Into column-wise layers, as in lesson 21."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=context.group)
        return total, None


class AddUpFrom(torch.autograd.Function):
    """Out of row-wise layers, as in lesson 21."""

    @staticmethod
    def forward(context, part, group):
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Expert(nn.Module):
    """Two layers, cut for the ranks of a group: float64 [n, WIDTH] to the same."""

    def __init__(self, number, group=None):
        super().__init__()
        self.group = group
        torch.manual_seed(1 + number)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        size, at = (TENSOR, places()[1]) if group else (1, 0)
        whole = up.weight, down.weight, down.bias
        up, down, bias = [x.detach().double() for x in whole]
        self.up = nn.Parameter(up.chunk(size)[at].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[at].clone())
        self.down_bias = nn.Parameter(bias)

    def forward(self, x):
        if self.group:
            x = CopyTo.apply(x, self.group)
        y = F.linear(F.linear(x, self.up).tanh(), self.down)
        return (AddUpFrom.apply(y, self.group) if self.group else y) + self.down_bias


def make_layer(tensor):
    """Return the gate, and this rank's parts of its experts."""
    own = EXPERTS // DATA
    first = places()[0] * own
    experts = [Expert(number, tensor) for number in range(first, first + own)]
    return make_gate(), nn.ModuleList(experts)


def make_gate():
    """Return the gate, which every rank has."""
    torch.manual_seed(0)
    gate = nn.Linear(WIDTH, EXPERTS).double()
    nn.init.constant_(gate.bias[0], 1)  # expert 0 is the favorite
    return gate


def make_tokens():
    """Return tokens and targets: float64 [DATA, TOKENS, WIDTH]."""
    generator = torch.Generator().manual_seed(0)
    tokens = 5 * torch.randn(DATA, TOKENS, WIDTH, generator=generator).double()
    return tokens, tokens.roll(1, 2).sin()


def run_alone(tokens, target):
    """Return output, gate and experts with gradients, and the norm: of one process."""
    gate = make_gate()
    experts = nn.ModuleList(map(Expert, range(EXPERTS)))
    best, choice = gate(tokens).softmax(2).max(2)
    answers = torch.stack([expert(tokens) for expert in experts], 2)
    index = choice[..., None, None].expand(-1, -1, 1, WIDTH)
    result = tokens + best[..., None] * answers.gather(2, index)[:, :, 0]
    F.mse_loss(result, target).backward()
    parameters = [*gate.parameters(), *experts.parameters()]
    norm = nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
    return result, gate, experts, norm.item()


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
