"""Lesson 21: one Llama, every way at once. The layout changes while it trains.

Builds on: 17_transformer_pipeline.py
New here:  a grid pipeline x data x context x tensor; a checkpoint for any layout
Run:       scripts/multinode_setup_and_run.sh day2/21_llama_every_way.py
Look for:  => ... layouts: losses within ... of one process (limit ...), ...: ok
Try next:  LAYOUTS of 4 ranks: [(1, 4, 1, 1), (1, 1, 4, 1)]: what grows?
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Grid:
    """The ranks, numbered along four axes, and with whom this rank shares what."""

    def __init__(self, sizes):
        ranks = torch.arange(math.prod(sizes)).view(sizes)
        self.sizes = sizes  # pipeline, data, context, tensor
        # A row of an axis: ranks that differ in this index only. Those of a tensor row
        # are neighbors, on one node. Stages are the furthest apart.
        self.tensor = Axis("tensor", ranks.flatten(0, 2))
        self.context = Axis("context", ranks.movedim(2, 3).flatten(0, 2))
        stages = ranks.movedim(0, 3).flatten(0, 2)
        self.down = Axis("pipeline", stages)  # a group for each direction: lesson 17
        self.up = Axis("pipeline", stages)
        # Rows of data x context: other texts, or other places, but the same weights.
        self.replicas = Axis("data", ranks.movedim(3, 1).flatten(2).flatten(0, 1))
        self.axes = self.tensor, self.context, self.replicas, self.down, self.up

    def own_part(self, texts):
        """Return what this rank has of a batch, in micro-batches."""
        mine = texts.chunk(self.sizes[1])[self.replicas.at // self.context.size]
        return mine[:, places_of(self.context, self.context.at)].split(MICRO_BATCH)


class Llama(nn.Module):
    """What a rank has of the model: its stage's layers, its part of their matrices."""

    def __init__(self, grid):
        super().__init__()
        stage, stages = grid.down.at, grid.down.size
        self.first = stage == 0
        self.last = stage == stages - 1
        torch.manual_seed(0)
        if self.first:
            self.tokens = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleDict()
        for number in range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages):
            torch.manual_seed(1 + number)  # a seed a layer: the same on any rank
            self.layers[str(number)] = LlamaLayer(grid)  # so is its name
        torch.manual_seed(1 + LAYERS)
        if self.last:
            self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
            self.logits = nn.Linear(WIDTH, 128, bias=False)
        for name, parameter in self.named_parameters():
            parameter.cut = CUT.get(name.split(".")[-2])
            if parameter.cut is not None:  # the others stay whole, as copies
                parts = parameter.detach().chunk(grid.tensor.size, parameter.cut)
                parameter.data = parts[grid.tensor.at].clone()

    def forward(self, x):
        if self.first:
            x = self.tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.logits(self.norm(x)) if self.last else x


def train_step(model, grid, text, targets):
    """Do with this rank's part of a batch what 1F1B says. Return its loss."""
    texts, right = grid.own_part(text), grid.own_part(targets)
    todo = one_forward_one_backward(grid.down.at, grid.down.size, len(texts))
    shape = *texts[0].shape, WIDTH  # of what passes between stages
    loss = torch.zeros((), device=text.device)
    held = {}  # what forward leaves for backward
    sent = []
    for what, number in todo:
        if what == "forward":
            x = texts[number]
            if not model.first:
                x = grid.down.receive(shape, x.device, -1).requires_grad_()
            y = model(x)
            if model.last:
                y = F.cross_entropy(y.flatten(0, 1), right[number].flatten())
                y = y / len(texts) / grid.replicas.size  # all these will be added up
                loss += y.detach()
            else:
                sent.append(grid.down.send(y.detach(), +1))
            held[number] = x, y
        else:
            x, y = held.pop(number)
            y.backward(None if model.last else grid.up.receive(shape, y.device, +1))
            if not model.first:
                sent.append(grid.up.send(x.grad, -1))
    for message in sent:
        message.wait()
    return loss


class DividedAdam:
    """Adam for some rows of each parameter: those who have the same divide the work."""

    def __init__(self, model, grid):
        self.grid = grid
        self.named = dict(model.named_parameters())
        own = self.table(self.named.values())[grid.replicas.at]
        # Of each number: the weight, and the averages of its gradient and the square.
        self.numbers = torch.stack([own, torch.zeros_like(own), torch.zeros_like(own)])
        self.steps = 0
        sizes = {None: grid.tensor.size, 0: 1, 1: 1}  # what isn't cut is on them all
        copies = [torch.full_like(x, sizes[x.cut]) for x in self.named.values()]
        self.copies = self.table(copies)[grid.replicas.at]

    def table(self, tensors):
        """Return all numbers: in row r of the table, those rows that replica r has."""
        size = self.grid.replicas.size
        return torch.cat([x.detach().reshape(size, -1) for x in tensors], 1)

    def step(self):
        """Complete the gradients, clip them by the norm of the whole, and update."""
        gradients = self.table([x.grad for x in self.named.values()])
        gradient = self.grid.replicas.reduce_scatter(gradients)
        # Each number of the model counts once, wherever it is.
        square = (gradient.square() / self.copies).sum()
        dist.all_reduce(square)
        gradient *= (CLIP / (square.sqrt() + 1e-6)).clamp(max=1)
        weight, mean, variance = self.numbers
        self.steps += 1
        mean.lerp_(gradient, 1 - 0.9)
        variance.lerp_(gradient.square(), 1 - 0.999)
        size = (variance / (1 - 0.999**self.steps)).sqrt()
        weight -= RATE * mean / (1 - 0.9**self.steps) / (size + EPS)
        self.gather()

    def gather(self):
        """Make the parameters whole again, and forget their gradients."""
        table = self.grid.replicas.all_gather(self.numbers[0])
        widths = [x.numel() // len(table) for x in self.named.values()]
        for x, rows in zip(self.named.values(), table.split(widths, 1)):
            x.data = rows.reshape(x.shape)
            x.grad = None

    def boxes(self):
        """Yield name, shape of the whole, where this rank's box begins, its numbers."""
        tensor, replicas = self.grid.tensor, self.grid.replicas
        widths = [x.numel() // replicas.size for x in self.named.values()]
        views = self.numbers.split(widths, 1)
        for (name, x), view in zip(self.named.items(), views):
            view = view.view(3, -1, *x.shape[1:])  # [3, rows, columns]
            whole, begin = list(x.shape), [0] * x.dim()
            if x.cut is not None:
                begin[x.cut] = tensor.at * whole[x.cut]
                whole[x.cut] *= tensor.size
            begin[0] += replicas.at * view.shape[1]
            yield name, whole, begin, view


def save(optimizer, file):
    """Write this rank's boxes, each copy once. No ranks named: any layout can read."""
    saved = {}
    for name, _, begin, view in optimizer.boxes():
        if optimizer.named[name].cut is not None or optimizer.grid.tensor.at == 0:
            saved[name] = begin, view.clone().cpu()
    torch.save((optimizer.steps, saved), file)


def load(optimizer, files):
    """Fill this rank's boxes from all boxes that there are, one parameter at a time."""
    contents = [torch.load(file, mmap=True) for file in files]
    for name, whole, begin, view in optimizer.boxes():
        numbers = torch.full((3, *whole), torch.nan)  # what no file has stays visible
        for optimizer.steps, saved in contents:
            if name in saved:
                other, part = saved[name]
                numbers[box(other, part)] = part
        view.copy_(numbers[box(begin, view)])
    optimizer.gather()


def train(grid, batches, device, before, after):
    """Train in a layout, from a checkpoint's files, if any, to those of the next."""
    model = Llama(grid).to(device)
    optimizer = DividedAdam(model, grid)
    if before:
        load(optimizer, before)
    losses = []
    for text, targets in batches:
        for axis in grid.axes:
            axis.sent = 0
        losses.append(train_step(model, grid, text.to(device), targets.to(device)))
        optimizer.step()
    save(optimizer, after[dist.get_rank()])
    losses = torch.stack(losses) / grid.tensor.size  # which all have the same loss
    dist.all_reduce(losses)  # and from here, all have written their files
    return losses, show_layout(grid, optimizer, losses)


def main(device, args):
    """Run on every rank: train in one layout after the other, then in one process."""
    torch.set_default_dtype(torch.float64)  # so exact that no fault looks like rounding
    if dist.get_backend() == "gloo":  # it sends only what is in the CPU's memory
        device = torch.device("cpu")
    train_set = make_text()
    order = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train_set, BATCH, sampler=order, drop_last=True)
    layouts = LAYOUTS[dist.get_world_size()]
    batches = list(loader)[: STEPS * len(layouts)]
    folder = Path("runs", Path(__file__).stem)  # on a disk that all nodes share
    folder.mkdir(parents=True, exist_ok=True)
    runs, files = [], []
    for number, sizes in enumerate(layouts):
        some = batches[number * STEPS : (number + 1) * STEPS]
        before = files  # one of each rank
        files = [folder / f"{number}.{rank}.pt" for rank in range(math.prod(sizes))]
        runs.append(train(Grid(sizes), some, device, before, files))
    if dist.get_rank() == 0:
        losses, right = zip(*runs)
        gap = (torch.cat(losses) - train_alone(batches, device)).abs().max().item()
        claim = f"{len(layouts)} layouts: losses within {gap:.0e} of one process (limit"
        claim += f" {ROUNDING:.0e}), bytes {'as' if all(right) else 'NOT as'} predicted"
        return prove(claim, all(right) and gap <= ROUNDING)


# ---- Shared helpers, identical in every lesson

LENGTH = 64  # characters in a piece of text
WIDTH = 64  # numbers per character inside the model
HEAD = 16  # of these, numbers for each head of the attention
KEYS = 32  # numbers of the heads of keys, and of values: each is for two of queries
LAYERS = 4
BATCH = 16  # texts in a step, of all ranks
MICRO_BATCH = 2  # of these, texts that pass through the stages together
STEPS = 2  # in each layout
RATE = 0.01  # of learning
EPS = 1e-3  # of Adam, which divides by gradients: 1e-8 would hide a wrong one
CLIP = 0.5  # the gradients' norm is at most this
ROUNDING = 1e-12  # in float64, a different order of adding changes losses by less
TIMEOUT = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
# Which dimension of a matrix is cut for tensor ranks. PyTorch has them transposed.
CUT = {"query": 0, "key": 0, "value": 0, "gate": 0, "up": 0}  # column-wise
CUT |= {"out_proj": 1, "down": 1}  # row-wise
LAYOUTS = {  # of so many ranks: (pipeline, data, context, tensor), one after the other
    1: [(1, 1, 1, 1), (1, 1, 1, 1)],
    2: [(1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1)],
    4: [(1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2), (2, 2, 1, 1), (4, 1, 1, 1)],
    8: [(1, 4, 1, 2), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2), (4, 2, 1, 1)],
}


class Axis:
    """A row of ranks, and how many bytes this one sends to the others."""

    def __init__(self, name, rows):
        self.name = name
        rows = rows.tolist()
        self.ranks = next(row for row in rows if dist.get_rank() in row)
        self.at = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self.sent = 0
        if self.size > 1:  # every rank must call this
            self.group, _ = dist.new_subgroups_by_enumeration(rows, timeout=TIMEOUT)

    def all_reduce(self, x):
        """Return the sum of all. In a ring, all but one part of it is sent twice."""
        total = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
            self.sent += 2 * (total.nbytes - total.nbytes // self.size)
        return total

    def reduce_scatter(self, table):
        """Return the sum of all ranks' tables, of this rank's row only."""
        row = table[self.at].clone()
        if self.size > 1:
            dist.reduce_scatter_tensor(row, table.flatten(), group=self.group)
            self.sent += table.nbytes - row.nbytes
        return row

    def all_gather(self, row):
        """Return all ranks' rows as a table."""
        table = row.repeat(self.size, 1)
        if self.size > 1:
            dist.all_gather_into_tensor(table.view(-1), row, group=self.group)
            self.sent += table.nbytes - row.nbytes
        return table

    def send(self, x, step):
        """Send to a neighbor in the row, without waiting: step is 1 or -1."""
        self.sent += x.nbytes
        return dist.isend(x, self.ranks[self.at + step], self.group)

    def receive(self, shape, device, step):
        """Return what a neighbor in the row sends."""
        x = torch.empty(shape, device=device)
        dist.recv(x, self.ranks[self.at + step], self.group)
        return x


class Copy(torch.autograd.Function):
    """Into column-wise layers: all ranks have the same x. Backward adds up."""

    @staticmethod
    def forward(context, x, axis):
        context.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return context.axis.all_reduce(gradient), None


class AddUp(torch.autograd.Function):
    """Out of row-wise layers: add up what all ranks have. Backward copies."""

    @staticmethod
    def forward(context, part, axis):
        return axis.all_reduce(part)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class LlamaLayer(nn.Module):
    """One layer: [N, places, WIDTH] to the same shape. Its matrices will be cut."""

    def __init__(self, grid):
        super().__init__()
        self.tensor = grid.tensor
        self.context = grid.context
        self.norm1 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEYS, bias=False)
        self.value = nn.Linear(WIDTH, KEYS, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = Copy.apply(self.norm1(x), self.tensor)
        places = places_of(self.context, self.context.at)  # in the whole text
        query = rotate(heads(self.query(y)), places)
        key = rotate(heads(self.key(y)), places)
        y = attention(query, key, heads(self.value(y)), self.context)
        x = x + AddUp.apply(self.out_proj(y.transpose(1, 2).flatten(2)), self.tensor)
        y = Copy.apply(self.norm2(x), self.tensor)
        y = F.silu(self.gate(y)) * self.up(y)  # SwiGLU
        return x + AddUp.apply(self.down(y), self.tensor)


def heads(x):
    """Return x [N, LENGTH, some * HEAD] as one row a head: [N, some, LENGTH, HEAD]."""
    return x.unflatten(2, (-1, HEAD)).transpose(1, 2)


def rotate(x, places):
    """Turn each pair of numbers by an angle that grows with the place: RoPE."""
    speeds = 10000 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = (places[:, None] * speeds).to(x.device)
    a, b = x.chunk(2, -1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.cat(turned, -1)


def places_of(context, at):
    """Return a context rank's places in a text: so all see the same number of keys."""
    parts = torch.arange(LENGTH).chunk(2 * context.size)  # one, and its mirror image
    return torch.cat([parts[at], parts[-1 - at]])


class Gather(torch.autograd.Function):
    """Give each rank of an axis what all have. Backward takes the gradients home."""

    @staticmethod
    def forward(context, x, axis):
        context.axis = axis
        return axis.all_gather(x.flatten()).view(-1, *x.shape)

    @staticmethod
    def backward(context, gradient):
        home = context.axis.reduce_scatter(gradient.flatten(1))
        return home.view(gradient.shape[1:]), None


def attention(query, key, value, context):
    """Return what queries see of earlier keys: float64 [N, heads, places, HEAD]."""
    options = {"enable_gqa": True, "is_causal": context.size == 1}  # grouped queries
    if context.size > 1:
        pairs = Gather.apply(torch.stack([key, value]), context)
        key, value = torch.cat(list(pairs), 3)  # of all places, rank after rank
        places = torch.cat([places_of(context, at) for at in range(context.size)])
        seen = places <= places_of(context, context.at)[:, None]
        options["attn_mask"] = seen.to(query.device)
    return F.scaled_dot_product_attention(query, key, value, **options)


def one_forward_one_backward(stage, stages, micro_batches):
    """Return what a stage does in a step: a few forward, then one of each in turn."""
    # No further ahead than there are stages to come: more would have to be held.
    ahead = min(stages - 1 - stage, micro_batches)
    todo = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            todo.append(("forward", ahead + number))
        todo.append(("backward", number))
    return todo


def box(begin, view):
    """Return the slices of the whole that a view [3, rows, columns] is."""
    sizes = zip(begin, view.shape[1:])
    return slice(None), *(slice(first, first + size) for first, size in sizes)


def train_alone(batches, device):
    """Train in one process, with the loop everybody knows. Return the losses."""
    model = Llama(Grid((1, 1, 1, 1))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=EPS)
    losses = []
    for text, targets in batches:
        optimizer.zero_grad()
        logits = model(text.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def predict(grid):
    """Return how many numbers this rank should have, and send along each axis."""
    stages, data, context, tensor = grid.sizes
    first, last = grid.down.at == 0, grid.down.at == stages - 1
    layers = LAYERS // stages
    tokens = BATCH // data * LENGTH // context
    cut = layers * (2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * 2 * WIDTH)
    weights = cut // tensor + WIDTH * (2 * layers + 128 * first + 129 * last)
    return {
        "weights": weights,
        "Adam's": 2 * weights // (data * context),
        "tensor": 4 * layers * tokens * WIDTH * 2 * (tensor - 1) // tensor,
        "context": layers * 4 * tokens * KEYS // tensor * (context - 1),
        "data": 2 * (weights - weights // (data * context)),
        "pipeline": tokens * WIDTH * ((not first) + (not last)),
    }


def show_layout(grid, optimizer, losses):
    """Print what ranks have and send in a step. Return if it is as predicted."""
    formula = predict(grid)
    weights = sum(x.numel() for x in optimizer.named.values())
    counted = Counter({"weights": weights, "Adam's": optimizer.numbers[1:].numel()})
    for axis in grid.axes:
        counted[axis.name] += axis.sent // losses.element_size()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (counted, formula))
    if dist.get_rank() == 0:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this node
        between = [axis.name for axis in grid.axes if axis.ranks[-1] >= here]
        row = f"{' x '.join(map(str, grid.sizes))}: loss {losses[-1]:.4f};"
        for name in formula:
            most = max(counted[name] for counted, _ in ranks)
            row += f" {name} {most:,}{'*' * (name in between)}"
        print(row)
    return all(counted == formula for counted, formula in ranks)


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def make_text():
    """Return the training set: sums, such as "7 plus 5 is 12. ", as tokens."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(10, (6000, 2), generator=generator).tolist()
    text = "".join(f"{a} plus {b} is {a + b}. " for a, b in pairs)
    tokens = torch.tensor(list(text.encode()))
    pieces = tokens.unfold(0, LENGTH + 1, LENGTH)  # int64 [N, 65]: they overlap by 1
    return TensorDataset(pieces[:1280, :-1], pieces[:1280, 1:])


def choose_device(local_rank, local_world_size):
    """Return this rank's device, and the backend that connects such devices."""
    torch.set_num_threads(1)  # more would spin while they wait: slow on busy cores
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    # Where each rank sees its own GPU only, the launcher says how many the node has.
    shared = local_world_size > int(os.environ.get("GPUS_ON_NODE", gpus))
    if kind in ("cpu", "mps") or (kind == "xpu" and shared):
        return torch.device("cpu"), "gloo"  # gloo cannot use Apple's mps, Intel's xpu
    device = torch.device(kind, local_rank % gpus)
    torch.accelerator.set_device_index(device.index)
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def start(args):
    """Run as one rank: join the process group, call main, leave the group."""
    # Variables tell a process who it is. LOCAL_RANK: its number on this node. The other
    # four, RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, are for init_process_group.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    if int(os.environ["WORLD_SIZE"]) not in LAYOUTS:
        parser.error(f"start it with one of these numbers of ranks: {[*LAYOUTS]}")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
