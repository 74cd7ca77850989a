"""Exercise 15.4: a text that is too long for one rank: ring attention by hand.

Lesson:  15
Kind:    fill in, 25 minutes
Task:    A text is so long that no rank can hold the keys and values of all of it. Each
         rank has one piece. Complete ring_attention(): pass keys and values on from
         rank to rank, until each query has met all of them. The run's scores are small:
         the check has large ones, too, and looks how many pieces a rank holds.
Run:     python day2/exercises/15.4_keys_go_round.py
Check:   python scripts/check.py 15.4
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def pass_on(tensor):
    """Send a tensor to the next rank; return the previous rank's. All call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    return received


def ring_attention(query, key, value):
    """Return the attention of this rank's queries to the whole text: float32 [n, V].

    query, key: float32 [n, K], value: float32 [n, V], of this rank's piece, contiguous.
    There is no mask: every query sees every key.
    """
    trained = query.requires_grad or key.requires_grad or value.requires_grad
    assert not trained, "no gradients come back: 15.9 is for training"
    # TODO 1: this sees one piece only. Go through the pieces of all ranks.
    # TODO 2: softmax divides by a sum over all keys, but you never have all scores
    # together. For each query, keep the largest score so far, the sum of
    # exp(score - largest), and the sum of exp(score - largest) * value.
    scores = query @ key.T / query.shape[1] ** 0.5
    return scores.softmax(1) @ value


def make_text(length):
    """Return queries, keys and values of a whole text: float32 [length, 12], 12, 20."""
    generator = torch.Generator().manual_seed(0)
    widths = (12, 12, 20)
    return [torch.randn(length, width, generator=generator) for width in widths]


def main():
    """Run on every rank: compare with the attention of one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    query, key, value = make_text(8 * world_size)
    whole = (query @ key.T / query.shape[1] ** 0.5).softmax(1) @ value
    pieces = [tensor.chunk(world_size)[rank] for tensor in (query, key, value)]
    far = (ring_attention(*pieces) - whole.chunk(world_size)[rank]).abs().max()
    dist.all_reduce(far, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"from the attention of one process: at most {far:.1e} away")


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
