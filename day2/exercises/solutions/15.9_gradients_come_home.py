"""Solution 15.9: ring attention for training: a mask, gradients travel, equal work.

Lesson:  15
Kind:    fill in, 30 minutes
Task:    Exercise 15.4's ring attention, now for training a language model: no query
         sees a later key, and the gradients of keys and values travel with them until
         they are home. Then deal the text out so that no rank has more to compute.
Run:     python day2/exercises/solutions/15.9_gradients_come_home.py
Check:   python scripts/check.py 15.9 --solution
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F


def in_order(rank, world_size, length):
    """Return the places of the text that a rank has: int64 [length / world_size]."""
    return torch.arange(length).chunk(world_size)[rank]


def balanced(rank, world_size, length):
    """Return the places that a rank has, so that all have the same number of pairs."""
    # One part from the front, where queries see little, and its mirror image.
    parts = torch.arange(length).chunk(2 * world_size)
    return torch.cat([parts[rank], parts[-1 - rank]])


def pass_on(tensor):
    """Send a tensor to the next rank; return the previous rank's. All call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    return received


def scores_of(query, key, query_places, key_places):
    """Return the scores: float32 [n, n]; -inf where a query must not see a key."""
    scores = query @ key.T / query.shape[1] ** 0.5
    return scores.masked_fill(key_places > query_places[:, None], -torch.inf)


def seen(query_places, key_places):
    """Return which queries see one of these keys, and which keys are seen: bool [n]."""
    return query_places >= key_places.min(), key_places <= query_places.max()


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to all that comes before them in the text.

    query, key: float32 [n, K], value: float32 [n, V], of this rank's piece, contiguous.
    places: for each rank the places of its piece, int64 [n].
    """

    @staticmethod
    def forward(context, query, key, value, places):
        """Return the attention: float32 [n, V]."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = key, value
        largest = torch.full((len(query), 1), -torch.inf)
        total = torch.zeros(len(query), 1)
        result = torch.zeros(len(query), value.shape[1])
        for step in range(world_size):
            if step > 0:
                key = pass_on(key)
                value = pass_on(value)
            owner = (rank - step) % world_size  # whose keys these are
            q, k = seen(places[rank], places[owner])
            if not q.any():
                continue  # the mask hides this piece entirely
            scores = scores_of(query[q], key[k], places[rank][q], places[owner][k])
            before = largest[q]
            # Its own keys come first, so each query has seen one: itself: no inf.
            largest[q] = torch.maximum(before, scores.amax(1, keepdim=True))
            shrink = (before - largest[q]).exp()
            weights = (scores - largest[q]).exp()
            total[q] = shrink * total[q] + weights.sum(1, keepdim=True)
            result[q] = shrink * result[q] + weights @ value[k]
        result = result / total
        log_total = largest + total.log()
        context.places = places
        context.save_for_backward(query, *own, result, log_total)  # of one piece only
        return result

    @staticmethod
    def backward(context, grad):
        """Return the gradients of query, key and value; grad: of the result."""
        query, key, value, result, log_total = context.saved_tensors
        places = context.places
        rank, world_size = dist.get_rank(), dist.get_world_size()
        query_grad = torch.zeros_like(query)
        key_grad = torch.zeros_like(key)
        value_grad = torch.zeros_like(value)
        grad_sum = (grad * result).sum(1, keepdim=True)
        for step in range(world_size):
            owner = (rank - step) % world_size
            q, k = seen(places[rank], places[owner])
            scores = scores_of(query[q], key[k], places[rank][q], places[owner][k])
            weights = (scores - log_total[q]).exp()  # what softmax gives
            scores_grad = weights * (grad[q] @ value[k].T - grad_sum[q])
            scores_grad /= query.shape[1] ** 0.5
            query_grad[q] += scores_grad @ key[k]
            key_grad[k] += scores_grad.T @ query[q]
            value_grad[k] += weights.T @ grad[q]
            # After the last step, only the gradients travel: one more time, home.
            if step < world_size - 1:
                key = pass_on(key)
                value = pass_on(value)
            key_grad = pass_on(key_grad)
            value_grad = pass_on(value_grad)
        return query_grad, key_grad, value_grad, None  # none for places


def make_text(length):
    """Return queries, keys and values of a whole text: float32 [length, 12], 12, 20."""
    generator = torch.Generator().manual_seed(0)
    widths = (12, 12, 20)
    return [torch.randn(length, width, generator=generator) for width in widths]


def alone(query, key, value):
    """Return the attention of a whole text, in one process: float32 [length, V]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def results(attention, tensors, *places):
    """Return the attention, and the gradients of query, key and value.

    They are those of a loss: the sum of cosines.
    """
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    result = attention(*tensors, *places)
    result.cos().sum().backward()
    return [result.detach()] + [tensor.grad for tensor in tensors]


def count_pairs(text, places):
    """Return how many pairs have a score: a query at one of the places, and any key."""
    query, key, _ = text
    scores = scores_of(query[places], key, places, torch.arange(len(key)))
    return scores.isfinite().sum().item()


def count_scores(rank, places):
    """Return how many scores a rank computes, with those that the mask then hides."""
    parts = [seen(places[rank], other) for other in places]
    return sum(q.sum().item() * k.sum().item() for q, k in parts)


def main():
    """Run on every rank: for both orders, count pairs, and compare with one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = 8 * world_size
    text = make_text(length)
    right = results(alone, text)
    for deal in (in_order, balanced):
        places = [deal(other, world_size, length) for other in range(world_size)]
        pieces = [tensor[places[rank]] for tensor in text]
        mine = results(RingAttention.apply, pieces, places)
        pairs = count_pairs(text, places[rank])
        far = [(a - b[places[rank]]).abs().max() for a, b in zip(mine, right)]
        far = gather(max(far).item())
        pairs = gather(pairs)
        scores = gather(count_scores(rank, places))
        if rank == 0:
            print(f"{deal.__name__}: pairs of a query and a key on each rank: {pairs}")
            print(f"scores computed for them: {scores}, of {length**2 // world_size}")
            print(f"from one process's result and gradients: {max(far):.1e} away")


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
