"""Exercise 21.2: a layout's loss is 1e-2 off: three faults.

Lesson:  21
Kind:    capstone, 40 minutes
Symptom: A small Llama trains in four layouts, data x context x tensor, always with the
         same batches. In one of them the losses are those of one process. In the
         others they are a little off, nothing crashes, and all of them fall. Three
         faults are in this program, above the dividing line.
Run:     python day2/exercises/21.2_capstone_a_hundredth_off.py
Check:   python scripts/check.py 21.2
"""

import math
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

LAYOUTS = [(4, 1, 1), (2, 1, 2), (1, 4, 1), (2, 2, 1)]  # data, context, tensor


class Grid:
    """The ranks, numbered along three axes, and with whom this rank shares what."""

    def __init__(self, sizes):
        ranks = torch.arange(math.prod(sizes)).view(sizes)
        self.tensor = Axis("tensor", ranks.flatten(0, 1))
        self.context = Axis("context", ranks.movedim(1, 2).flatten(0, 1))
        # Ranks with other texts, or with other places of these, have the same weights.
        self.replicas = Axis("data", ranks.movedim(2, 0).flatten(1))
        self.data = sizes[0]

    def own_part(self, texts):
        """Return what this rank has of a batch."""
        mine = texts.chunk(self.data)[self.replicas.at % self.data]
        return mine[:, places_of(self.context, self.context.at)]


class Llama(nn.Module):
    """What a rank has of the model: a part of the layers' matrices, the rest whole."""

    def __init__(self, grid):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(128, WIDTH)
        self.layers = nn.Sequential(*(LlamaLayer(grid) for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.logits = nn.Linear(WIDTH, 128, bias=False)
        for name, parameter in self.named_parameters():
            parameter.cut = CUT.get(name.split(".")[-2])
            if parameter.cut is not None:  # the others stay whole, as copies
                parts = parameter.detach().chunk(grid.tensor.size, parameter.cut)
                parameter.data = parts[grid.tensor.at].clone()

    def forward(self, x):
        return self.logits(self.norm(self.layers(self.tokens(x))))


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
        places = torch.arange(x.shape[1])
        query = rotate(heads(self.query(y)), places)
        key = rotate(heads(self.key(y)), places)
        y = attention(query, key, heads(self.value(y)), self.context)
        x = x + AddUp.apply(self.out_proj(y.transpose(1, 2).flatten(2)), self.tensor)
        y = Copy.apply(self.norm2(x), self.tensor)
        y = F.silu(self.gate(y)) * self.up(y)  # SwiGLU
        return x + AddUp.apply(self.down(y), self.tensor)


def complete(model, grid):
    """Add up this rank's gradients with those of its replicas, and clip."""
    square = torch.zeros(())
    for x in model.parameters():
        x.grad = grid.replicas.all_reduce(x.grad)
        copies = grid.replicas.size
        square += x.grad.square().sum() / copies
    dist.all_reduce(square)  # over all ranks: each number of the model counts once
    for x in model.parameters():
        x.grad *= (CLIP / (square.sqrt() + 1e-6)).clamp(max=1)


def train(sizes):
    """Train in a layout. Return the mean loss of each step over all ranks."""
    torch.set_default_dtype(torch.float64)  # so that no fault looks like rounding
    grid = Grid(sizes)
    model = Llama(grid)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=EPS)
    losses = []
    for text, targets in make_batches():
        optimizer.zero_grad()
        logits = model(grid.own_part(text)).flatten(0, 1)
        loss = F.cross_entropy(logits, grid.own_part(targets).flatten())
        loss = loss / grid.replicas.size  # all these will be added up
        loss.backward()
        complete(model, grid)
        optimizer.step()
        losses.append(grid.replicas.all_reduce(loss.detach()).item())
    return losses


def main():
    """Run on every rank: train in each layout, and beside one process."""
    right = train_whole()
    for sizes in LAYOUTS:
        losses = train(sizes)
        off = max(abs(a - b) for a, b in zip(losses, right))
        if dist.get_rank() == 0:
            shown = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{' x '.join(map(str, sizes))}: losses {shown}, off by {off:.0e}")
    if dist.get_rank() == 0:
        print("one process: " + ", ".join(f"{loss:.4f}" for loss in right))


# ---- Shared helpers, identical in every exercise

STEPS = 3
BATCH = 8  # texts in a step, of all ranks
LENGTH = 32  # characters in a piece of text
WIDTH = 32  # numbers per character inside the model
HEAD = 8  # of these, numbers for each head of the attention
KEYS = 16  # numbers of the heads of keys, and of values: each is for two of queries
LAYERS = 2
RATE = 0.01  # of learning
EPS = 1e-3  # of Adam, which divides by gradients: 1e-8 would hide a wrong one
CLIP = 0.5  # the gradients' norm is at most this
TIMEOUT = timedelta(seconds=20)
# Which dimension of a matrix is cut for tensor ranks. PyTorch has them transposed.
CUT = {"query": 0, "key": 0, "value": 0, "gate": 0, "up": 0}  # column-wise
CUT |= {"out_proj": 1, "down": 1}  # row-wise


def make_batches():
    """Return the batches: STEPS pairs of texts and targets, int64 [BATCH, LENGTH]."""
    texts, targets = make_text()[: STEPS * BATCH]
    return list(zip(texts.split(BATCH), targets.split(BATCH)))


class Alone:
    """A grid of one process."""

    def __init__(self):
        self.tensor = self.context = self
        self.at, self.size = 0, 1

    def all_reduce(self, x):
        return x


def train_whole():
    """Train in one process, with the loop everybody knows. Return the losses."""
    torch.set_default_dtype(torch.float64)
    model = Llama(Alone())
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=EPS)
    losses = []
    for text, targets in make_batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


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


def make_text():
    """Return the training set: sums, such as "7 plus 5 is 12. ", as tokens."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(10, (6000, 2), generator=generator).tolist()
    text = "".join(f"{a} plus {b} is {a + b}. " for a, b in pairs)
    tokens = torch.tensor(list(text.encode()))
    pieces = tokens.unfold(0, LENGTH + 1, LENGTH)  # int64 [N, 65]: they overlap by 1
    return TensorDataset(pieces[:1280, :-1], pieces[:1280, 1:])


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
