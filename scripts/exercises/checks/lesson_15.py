import math
import weakref

import torch
import torch.distributed as dist
from exercises.common import attempt, gradients, noted, shared_folder, train_alone
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def check_15_1(exercise, rank, world_size, report):
    model, _, losses = exercise.train(50)
    numbers = sum(parameter.to_local().numel() for parameter in model.parameters())
    report.at_most("numbers that it keeps, of the model's 193:", numbers, 192)
    report.learned(losses, 0.25)


def check_15_2(exercise, rank, world_size, report):
    torch.manual_seed(0)
    model, x = exercise.Net(), torch.randn(256, 32)
    numbers = exercise.kept(model, x)
    mine = gradients(model)
    model.zero_grad()
    nn.Sequential(*model.layers)(x).square().mean().backward()
    into = 8 * 256 * 32  # what goes into the layers
    report.equal("numbers that are kept for backward:", numbers, into)
    report.numbers("gradients", mine, gradients(model), 1e-8)


def check_15_3(exercise, rank, world_size, report):
    model, optimizer = exercise.train(20)
    most = 2 * math.ceil(193 / world_size)  # two averages of the longest part
    text = "numbers that it keeps, of the 386 of Adam's states:"
    report.at_most(text, exercise.states(optimizer.inner), most)
    # One process with all points and the whole of Adam.
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.linspace(-2, 2, 32)[:, None]
    train_alone(alone, [(x, x.sin())] * 20, optimizer=torch.optim.Adam, lr=0.01)
    report.like_one_process(model, alone)


def most_pieces_held(function, query, key, value, pieces):
    """Call the function. Return its result, and how many of the pieces it held at a time.

    After each operation, see which pieces are in the tensors that exist.
    """
    marks = [piece[0, 0].item() for piece in pieces]  # all of them are different
    alive = [weakref.ref(key)]
    counts = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            if "empty" in str(operation):  # its memory holds earlier tensors
                result.zero_()
            alive.extend(weakref.ref(x) for x in tree_leaves(result) if torch.is_tensor(x))
            tensors = [ref() for ref in alive if ref() is not None]
            numbers = {x for tensor in tensors for x in tensor.flatten().tolist()}
            counts.append(sum(mark in numbers for mark in marks))
            alive[:] = map(weakref.ref, tensors)
            return result

    with Watch():
        result = function(query, key, value)
    return result, max(counts, default=1)


def check_15_4(exercise, rank, world_size, report):
    text = exercise.make_text(8 * world_size)
    for scores, larger in (("small", 1), ("large", 50)):  # above 100: their exp is infinite
        query, key, value = [text[0] * larger, *text[1:]]
        whole = (query @ key.T / query.shape[1] ** 0.5).softmax(1) @ value
        mine = [tensor.chunk(world_size)[rank].clone() for tensor in (query, key, value)]
        result, held = most_pieces_held(exercise.ring_attention, *mine, key.chunk(world_size))
        report.numbers(f"{scores} scores:", result, whole.chunk(world_size)[rank])
        what = f"pieces of the keys, of {world_size}, that it holds at a time:"
        report.at_most(what, held, world_size - 1)


def check_15_6(exercise, rank, world_size, report):
    from torch.distributed.checkpoint import FileSystemWriter

    noted(FileSystemWriter, "write_data", seconds=1)  # a slow disk
    folder = shared_folder(rank)
    torch.manual_seed(0)
    model = exercise.shard()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = dist.new_group(backend="gloo")
    for checkpoint in (folder / "step-1", folder / "step-2"):
        exercise.train_step(model, optimizer)
        saved = [x.to_local().clone() for x in model.parameters()]
        saving = exercise.begin(model, optimizer, checkpoint, group)
        waits = (checkpoint / ".metadata").exists()
        before, _ = attempt((folder / "latest").read_text)
        exercise.train_step(model, optimizer)
        exercise.finish(saving, checkpoint)
        dist.barrier()
    after, _ = attempt((folder / "latest").read_text)
    words = "waits until step-2 is written" if waits else "continues meanwhile"
    report.equal("training", words, "continues meanwhile")
    report.equal("latest, before step-2 is complete:", before, "step-1")
    report.equal("latest, after that:", after, "step-2")
    if after:
        loaded = exercise.load(folder)[0].parameters()
        same = all(torch.equal(x.to_local(), y) for x, y in zip(loaded, saved))
        text = f"what is loaded is {'' if same else 'not '}what was saved"
        report(same, f"{text} (right: as it was when begin was called)")


def check_15_7(exercise, rank, world_size, report):
    model, losses = exercise.train(50)
    parts = [parameter.to_local().flatten().tolist() for parameter in model.parameters()]
    report.equal("numbers that it holds, of the model's 258:", sum(map(len, parts)), 129)
    report.learned(losses, 0.5)
    seen = yield parts
    words = "the same" if seen[:2] == seen[2:] else "different"
    report.equal("numbers that the two nodes hold:", words, "the same")


def check_15_8(exercise, rank, world_size, report):
    alone, x = exercise.make_model(), exercise.make_data()
    start, momenta = [y.detach().clone() for y in alone.parameters()], [0, 0]
    for step in range(20):
        alone.zero_grad()
        exercise.loss_of(alone, x).backward()
        momenta = [0.9 * old + y.grad for old, y in zip(momenta, alone.parameters())]
        with torch.no_grad():
            for y, momentum in zip(alone.parameters(), momenta):
                y -= exercise.LR * exercise.orthogonal(momentum)
        if step in (0, 19):
            model, losses = exercise.train(step + 1, dist.group.WORLD)
            mine = [y.full_tensor() for y in model.parameters()]
            gaps = zip(mine, alone.parameters(), start)
            far = max(((a - b).norm() / (b - c).norm()).item() for a, b, c in gaps)
            report.at_most(f"steps: {step + 1}, off by this share of one process's way:", far, 1e-3)
    report.learned(losses)


def check_15_9(exercise, rank, world_size, report):
    length = 8 * world_size
    text = exercise.make_text(length)
    query, key, value = [tensor.clone().requires_grad_() for tensor in text]
    later = torch.ones(length, length).triu(1).bool()
    scores = (query @ key.T / query.shape[1] ** 0.5).masked_fill(later, -torch.inf)
    result = scores.softmax(1) @ value
    result.cos().sum().backward()
    places = [exercise.balanced(other, world_size, length) for other in range(world_size)]
    own = places[rank]

    def attend(*tensors):
        return exercise.results(exercise.RingAttention.apply, tensors, places)

    pieces = [text[1][other] for other in places]
    mine, held = most_pieces_held(attend, *[tensor[own] for tensor in text], pieces)
    names = ("result:", "gradient of query:", "gradient of key:", "gradient of value:")
    right = (result, query.grad, key.grad, value.grad)
    for name, a, b in zip(names, mine, right):
        report.numbers(name, a, b[own])
    what = f"pieces of the keys, of {world_size}, that it holds at a time:"
    report.at_most(what, held, world_size - 1)
    pairs = exercise.count_pairs(text, own)
    report.equal("pairs in the new order:", pairs, length * (length + 1) // 2 // world_size)
    seen = yield own.tolist()
    places = [place for own in seen for place in own]
    report.equal("all ranks: different places:", len(set(places)), len(places))
