"""Exercise 15.5: a mixture of experts: tokens travel to their experts and back.

Lesson:  15
Kind:    fill in, 20 minutes
Task:    A layer has as many experts as there are ranks, and each rank holds one. A gate
         chooses an expert for each token. Complete ask_experts(): the tokens travel to
         their experts, and the answers back. In the run all ranks have the same number
         of tokens, in the check they have not.
Run:     python day2/exercises/15.5_one_expert_a_rank.py
Check:   python scripts/check.py 15.5
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8  # numbers in a token


def ask_experts(tokens, choice, expert):
    """Return the experts' answers in the order of the tokens, and this rank's load.

    tokens: float32 [n, WIDTH], of this rank; n may differ. choice: int64 [n], for each
    token the rank with its expert. expert: this rank's. load: how many tokens it got.
    """
    assert not torch.is_grad_enabled(), "no gradients come back: see 15.10"
    order = choice.argsort(stable=True)  # the tokens for rank 0 first, then for rank 1
    to_send = choice.bincount(minlength=dist.get_world_size())  # how many for each rank
    # TODO 1: how many does each rank send to this one? all_to_all_single of to_send.
    to_receive = to_send
    # TODO 2: send tokens[order], again with all_to_all_single, and receive.
    arrived = tokens[order]
    answers = expert(arrived)
    # TODO 3: send the answers back to where the tokens came from.
    returned = answers
    result = torch.empty_like(tokens)
    result[order] = returned
    return result, to_receive.sum().item()


def make_layer(world_size):
    """Return the gate and all experts. Every rank makes all, and takes its own."""
    torch.manual_seed(0)
    gate = nn.Linear(WIDTH, world_size)
    return gate, [nn.Linear(WIDTH, WIDTH) for _ in range(world_size)]


@torch.no_grad()
def main():
    """Run on every rank: ask the experts, and compare with one process that has all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gate, experts = make_layer(world_size)
    tokens = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
    choice = gate(tokens).argmax(1)  # top-1: the best expert only
    result, load = ask_experts(tokens, choice, experts[rank])
    right = torch.stack([experts[e](token) for e, token in zip(choice, tokens)])
    loads = gather(load)
    far = max(gather((result - right).abs().max().item()))
    if rank == 0:
        print(f"tokens of each expert: {loads}; from one process: {far:.1e} away")


# ---- Shared helpers, identical in every exercise


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
