"""Exercise 15.10: experts in training: gradients travel back, limited room, even loads.

Lesson:  15
Kind:    fill in, 30 minutes
Task:    Exercise 15.5's experts, one on each rank, now in training: gradients travel
         back to the tokens' ranks, an expert has room for so many tokens and no more,
         and a second loss teaches the gate to give all experts equal work. The run only
         counts tokens: the check compares gradients with one process's, too.
Run:     python day2/exercises/15.10_experts_that_learn.py
Check:   python scripts/check.py 15.10
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOKENS = 16  # of each rank
WIDTH = 8  # numbers in a token
CAPACITY = 6  # tokens that a rank may send to one expert: 1.5 times an equal share
BALANCE = 0.3  # how much the second loss counts


def exchange(rows, got, sent):
    """Return the rows that all ranks send to this one: float32 [sum(got), WIDTH].

    rows: float32 [sum(sent), WIDTH], those for rank 0 first. got, sent: how many come
    from each rank and go to each rank, as lists. All ranks call this.
    """
    received = rows.new_empty(sum(got), WIDTH)
    dist.all_to_all_single(received, rows.contiguous(), got, sent)
    return received


class Exchange(torch.autograd.Function):
    """exchange(), with gradients."""

    @staticmethod
    def forward(context, rows, got, sent):
        """Return the rows received, and remember the counts for backward."""
        context.counts = got, sent
        return exchange(rows, got, sent)

    @staticmethod
    def backward(context, grad):
        """Return the gradient of rows; grad: of the rows that were received."""
        # TODO 1: grad is about rows that other ranks have sent. Where must it go?
        _, sent = context.counts
        return grad.new_zeros(sum(sent), WIDTH), None, None  # none for got and sent


def ask_experts(tokens, choice, expert):
    """Return the experts' answers in the order of the tokens, as in exercise 15.5."""
    order = choice.argsort(stable=True)
    to_send = choice.bincount(minlength=dist.get_world_size())
    to_receive = torch.empty_like(to_send)
    dist.all_to_all_single(to_receive, to_send)
    sent = to_send.tolist()
    got = to_receive.tolist()
    arrived = Exchange.apply(tokens[order], got, sent)
    returned = Exchange.apply(expert(arrived), sent, got)
    return returned[order.argsort()]


def find_room(choice, experts):
    """Return the tokens that this rank sends: their numbers, int64 [at most n].

    choice: int64 [n], the expert of each token. Of each expert's: the first CAPACITY.
    """
    # TODO 2: F.one_hot(choice, experts).cumsum(0)[i, e] says how many of the tokens up
    # to token i have chosen expert e.
    return torch.arange(len(choice))


def balance_loss(probability, choice):
    """Return a loss: 1 if all experts are chosen equally often.

    At most, it is the number of experts: if the gate is sure that it's always the same.
    probability: float32 [n, experts], from the gate. choice: int64 [n], the largest.
    """
    # TODO 3: for each expert, multiply the fraction of the tokens that choose it, and
    # its mean probability. Add up, times the number of experts. Gradients are averaged
    # over the ranks later: which of the two factors needs the tokens of all ranks now?
    return probability.new_ones(())


def layer(tokens, gate, expert):
    """Return the output: float32 [n, WIDTH], as the tokens.

    And for each token the gate's probabilities, float32 [n, experts], and the expert of
    its choice; at last, the numbers of the tokens that were sent.
    """
    probability = gate(tokens).softmax(1)
    best, choice = probability.max(1)
    sent = find_room(choice, probability.shape[1])
    answers = ask_experts(tokens[sent], choice[sent], expert)
    # A token that isn't sent stays as it is. The gate learns because best is a factor.
    result = tokens.index_add(0, sent, best[sent, None] * answers)
    return result, probability, choice, sent


def backward(tokens, target, gate, expert):
    """Leave in all parameters the gradients of the mean loss over all ranks.

    Return the output, each token's expert, and the numbers of the tokens sent.
    """
    result, probability, choice, sent = layer(tokens, gate, expert)
    loss = F.mse_loss(result, target) + BALANCE * balance_loss(probability, choice)
    loss.backward()
    for parameter in gate.parameters():
        dist.all_reduce(parameter.grad)
    # An expert's gradient is the sum over all ranks already: their tokens came to it.
    for parameter in [*gate.parameters(), *expert.parameters()]:
        parameter.grad /= dist.get_world_size()
    return result, choice, sent


def make_layer(experts):
    """Return the gate and all experts. Every rank makes all, and takes its own."""
    torch.manual_seed(0)
    gate = nn.Linear(WIDTH, experts)
    nn.init.constant_(gate.bias[0], 1)  # at first, expert 0 is the favorite
    return gate, [nn.Linear(WIDTH, WIDTH) for _ in range(experts)]


def train(steps):
    """Train on all ranks. Return what happened to their tokens in each step.

    Of each step a list: how many chose each expert, and then how many were left out.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gate, experts = make_layer(world_size)
    expert = experts[rank]
    parameters = [*gate.parameters(), *expert.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.03)
    generator = torch.Generator().manual_seed(rank)
    counts = []
    for _ in range(steps):
        tokens = torch.randn(TOKENS, WIDTH, generator=generator)
        optimizer.zero_grad()
        _, choice, sent = backward(tokens, tokens.roll(1, 1).sin(), gate, expert)
        optimizer.step()
        load = choice.bincount(minlength=world_size)
        counts.append([*load.tolist(), TOKENS - len(sent)])
    counts = torch.tensor(counts)
    dist.all_reduce(counts)
    return counts.tolist()


def main():
    """Run on every rank: train, and show how the tokens are spread before and after."""
    counts = train(40)
    if dist.get_rank() == 0:
        for step in (0, len(counts) - 1):
            *loads, out = counts[step]
            print(f"step {step}: tokens of each expert: {loads}, left out: {out}")


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
