import math
import weakref
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exercises.common import (
    Fact,
    Messages,
    at_each_step,
    attempt,
    flat,
    gather,
    gradients,
    kept_for_backward,
    noted,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def check_15_1(exercise, rank, world_size):
    model, _, losses = exercise.train(50)
    yield Fact("numbers that it keeps, of the model's 193:", len(flat(model)), most=192)
    yield Fact("loss in the end", losses[-1], most=losses[0] / 4)


def check_15_2(exercise, rank, world_size):
    torch.manual_seed(0)
    model, x = exercise.Net(), torch.randn(256, 32)
    y, kept = kept_for_backward(model, x)
    yield Fact("numbers that are kept for backward:", kept // 4)
    y.square().mean().backward()
    mine = gradients(model)
    model.zero_grad()
    nn.Sequential(*model.layers)(x).square().mean().backward()
    yield Fact("gradients", mine, right=gradients(model))


def check_15_3(exercise, rank, world_size):
    sizes = at_each_step(lambda adam: (id(adam), numbers_of_states(adam)))
    trained, error = attempt(exercise.train, 20)
    yield Fact("training ended with error:", error, "step")
    if error:
        return
    kept = sum(dict(sizes).values())  # of all that take steps here
    most = 2 * math.ceil(193 / world_size)  # two averages of the longest part
    what = "numbers that it keeps, of the 386 of Adam's states:"
    yield Fact(what, kept, "part", most=most)
    yield Fact("parameters", trained[0], "rest")
    # Adam's steps are the same for gradients of 4 times the length, SGD's are not.
    torch.manual_seed(0)
    # It needs other numbers of zeros at the end than the model of train().
    model, whole = [torch.nn.Linear(5, 1) for _ in range(2)]
    whole.load_state_dict(model.state_dict())
    optimizer = exercise.ZeroOne(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(2 * world_size, 5)
    model(x[rank::world_size]).square().mean().backward()
    optimizer.step()
    whole(x).square().mean().backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    what = "with SGD on this check's model, after a step, parameters"
    yield Fact(what, model, "step", right=flat(whole))


def numbers_of_states(optimizer):
    """Return how many numbers a rank keeps in the states of an optimizer."""
    states = [x for state in optimizer.state.values() for x in state.values()]
    return sum(len(flat(x)) for x in states if torch.is_tensor(x) and x.dim() > 0)


def most_pieces_held(function, query, key, value, *kinds):
    """Call the function. Return its result, and how many pieces it held at a time.

    After each operation, see which pieces, of one kind or another, are in the tensors
    that exist.
    """
    # All of them are different.
    marks = [[piece[0, 0].item() for piece in pieces] for pieces in kinds]
    alive = [weakref.ref(key)]
    counts = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            if "empty" in str(operation):  # its memory holds earlier tensors
                result.zero_()
            alive.extend(
                weakref.ref(x) for x in tree_leaves(result) if torch.is_tensor(x)
            )
            tensors = [ref() for ref in alive if ref() is not None]
            numbers = {x for tensor in tensors for x in tensor.flatten().tolist()}
            counts.append(max(sum(mark in numbers for mark in part) for part in marks))
            alive[:] = map(weakref.ref, tensors)
            return result

    with Watch():
        result = function(query, key, value)
    return result, max(counts, default=1)


def check_15_4(exercise, rank, world_size):
    text = exercise.make_text(8 * world_size)
    for scores, larger in (
        ("small", 1),
        ("large", 50),
    ):  # above 100: their exp is infinite
        query, key, value = [text[0] * larger, *text[1:]]
        whole = (query @ key.T / query.shape[1] ** 0.5).softmax(1) @ value
        mine = [
            tensor.chunk(world_size)[rank].clone() for tensor in (query, key, value)
        ]
        result, held = most_pieces_held(
            exercise.ring_attention, *mine, key.chunk(world_size)
        )
        yield Fact(
            f"{scores} scores:", result, scores, right=whole.chunk(world_size)[rank]
        )
        what = f"pieces of the keys, of {world_size}, that it holds at a time:"
        yield Fact(what, held, "pieces", most=world_size - 1)


def check_15_6(exercise, rank, world_size):
    from torch.distributed.checkpoint import FileSystemWriter

    noted(FileSystemWriter, "write_data", seconds=0.5)  # a slow disk
    folder = Path.cwd()
    torch.manual_seed(0)
    model = exercise.shard()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    for checkpoint in (folder / "step-1", folder / "step-2"):
        exercise.train_step(model, optimizer)
        saved = flat(model)
        saving = exercise.begin(model, optimizer, checkpoint, group)
        waits = (checkpoint / ".metadata").exists()
        before, _ = attempt((folder / "latest").read_text)
        exercise.train_step(model, optimizer)
        with mock.patch("time.sleep"):  # takes no time: too short to wait
            exercise.finish(saving, checkpoint)
        dist.barrier()
    after, _ = attempt((folder / "latest").read_text)
    yield Fact("training waits until step-2 is written:", waits, "begin")
    yield Fact("latest, before step-2 is complete:", before, "finish")
    yield Fact("latest, after that:", after, "finish")
    loaded = exercise.load(folder)[0]
    yield Fact(
        "what is loaded, saved when begin was called:", loaded, "finish", right=saved
    )


def check_15_7(exercise, rank, world_size):
    model, losses = exercise.train(50)
    yield Fact("numbers that it holds, of the model's 258:", len(flat(model)))
    yield Fact("loss in the end", losses[-1], most=losses[0] / 2)
    yield Fact("what it holds", model)


def check_15_8(exercise, rank, world_size):
    numbers = len(flat(exercise.make_model()))
    sizes = at_each_step(numbers_of_states)
    for steps in (1, 5):
        model, losses = exercise.train(steps, dist.group.WORLD)
        start = flat(exercise.make_model())
        moved = [
            x - y
            for x, y in zip(flat([y.full_tensor() for y in model.parameters()]), start)
        ]
        yield Fact(f"way of the weights in {steps} steps", moved)
    what = f"numbers that it keeps, of the model's {numbers}:"
    yield Fact(what, len(flat(model)), most=numbers // world_size)
    yield Fact("numbers of Muon's states:", sizes[-1], most=numbers // world_size)
    yield Fact("loss in the end", losses[-1], most=losses[0])


class OfPieces(nn.Module):
    """Attention of this rank's queries: what kept_for_backward needs."""

    def __init__(self, attention, places):
        super().__init__()
        self.attention, self.places = attention, places

    def forward(self, tensors):
        return self.attention(*tensors, self.places)


def attention_of(text):
    """Return a whole text's attention, and the gradients for a sum of cosines."""
    query, key, value = tensors = [x.clone().requires_grad_() for x in text]
    later = torch.ones(len(query), len(query)).triu(1).bool()
    scores = (query @ key.T / query.shape[1] ** 0.5).masked_fill(later, -torch.inf)
    result = scores.softmax(1) @ value
    result.cos().sum().backward()
    return [result.detach()] + [x.grad for x in tensors]


def count_passes(exercise, pieces, places):
    """Return how often a rank would pass something on, forward and backward."""
    calls, pass_on = [], exercise.pass_on

    def stay(tensor):
        calls.append(tensor)
        return tensor.clone()

    exercise.pass_on = stay
    exercise.results(exercise.RingAttention.apply, pieces, places)
    exercise.pass_on = pass_on
    return len(calls)


def check_15_9(exercise, rank, world_size):
    length = 8 * world_size
    text = exercise.make_text(length)
    places = [
        exercise.balanced(other, world_size, length) for other in range(world_size)
    ]
    own = places[rank]
    grad = -attention_of(text)[0][own].sin()

    def attend(*tensors):
        tensors = [x.requires_grad_() for x in tensors]
        given = [x.detach() for x in (*tensors[1:], grad)]
        before = [x.clone() for x in given]
        result = exercise.RingAttention.apply(*tensors, places)
        result.backward(grad)
        changed = any(not x.equal(y) for x, y in zip(given, before))
        return [result.detach(), *(x.grad for x in tensors)], changed

    scores_of, computed = exercise.scores_of, []

    def counting(query, key, *others, **options):
        computed.append(len(query) * len(key))
        return scores_of(query, key, *others, **options)

    exercise.scores_of = counting
    kinds = [[x[other] for other in places] for x in text[1:]]
    with Messages() as messages:
        pieces = [x[own] for x in text]
        (mine, changed), held = most_pieces_held(attend, *pieces, *kinds)
    exercise.scores_of = scores_of
    rights = [x[own] for x in attention_of(text)]
    yield Fact("result:", mine[0], "result", right=rights[0])
    pairs = (own + 1).sum().item()  # the query at place p sees p + 1 keys
    what = "pairs of its queries and keys whose score is not -inf:"
    yield Fact(what, exercise.count_pairs(text, own), "result", right=pairs)
    for name, a, b in zip(("query", "key", "value"), mine[1:], rights[1:]):
        yield Fact(f"gradient of {name}:", a, "backward", right=b)
    what = f"pieces of the keys or values, of {world_size}, that it holds at a time:"
    yield Fact(what, held, "backward", most=world_size - 1)
    yield Fact("pairs in the new order:", pairs, "order")
    # Parts of 8 places: those of the text above have 4.
    parts = [exercise.balanced(other, 3, 48) for other in range(3)]
    pairs = [(part + 1).sum().item() for part in parts]
    yield Fact("pairs of 3 ranks:", pairs, "order")
    different = {place for part in gather(own.tolist()) for place in part}
    yield Fact("different places of all ranks:", len(different), "order")
    what = "keys, values or grad are other numbers after backward:"
    yield Fact(what, str(changed), "backward", right="False")
    ring = {"send", "alltoall", "alltoall_base"}
    others = sum(calls for name, calls in messages.calls.items() if name not in ring)
    what = "collectives, where it should pass on to the next rank:"
    yield Fact(what, others, "backward", most=0)
    what = "scores that forward and backward compute:"
    most = 2 * exercise.count_scores(rank, places)
    yield Fact(what, sum(computed), "backward", most=most)
    orders = [(exercise.balanced, "large scores"), (exercise.in_order, "in order")]
    for deal, what in orders:
        places = [deal(other, world_size, length) for other in range(world_size)]
        text = exercise.make_text(length)
        if what == "large scores":  # above 100: their exp is infinite
            text[0] *= 50
        pieces = [x[places[rank]] for x in text]
        # Where ranks send unequal numbers of messages, these get mixed up.
        passes = count_passes(exercise, pieces, places)
        most = max(gather(passes))
        yield Fact(f"{what}: tensors passed on", passes, "backward", right=most)
        if min(gather(passes)) < most:
            return
        mine = exercise.results(exercise.RingAttention.apply, pieces, places)
        rights = [x[places[rank]] for x in attention_of(text)]
        yield Fact(f"{what}: result", mine[0], "result", right=rights[0])
        yield Fact(f"{what}: gradients", mine[1:], "backward", right=rights[1:])
    length = 32 * world_size
    places = [
        exercise.balanced(other, world_size, length) for other in range(world_size)
    ]
    pieces = [x[places[rank]].requires_grad_() for x in exercise.make_text(length)]
    model = OfPieces(exercise.RingAttention.apply, places)
    result, kept = kept_for_backward(model, pieces)
    result.sum().backward()  # of all ranks: they have to meet
    need = sum(x.nbytes for x in (*pieces, result)) + sum(x.nbytes for x in places)
    what = "bytes kept for backward, of longer pieces:"
    yield Fact(what, kept, "backward", most=1.4 * need)
