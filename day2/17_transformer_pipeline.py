"""Lesson 17: split the depth. Each rank has some of the layers: a pipeline.

Builds on: 15_transformer_fsdp.py
New here:  stages, micro-batches, GPipe and 1F1B by hand, with isend and recv
Run:       scripts/multinode_setup_and_run.sh day2/17_transformer_pipeline.py
Look for:  => GPipe and 1F1B: losses within ... of one process (limit ...), idle ...: ok
Try next:  --micro-batches 2, then 32: what gets better, what gets worse?
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def gpipe(stage, stages, micro_batches):
    """Return what a stage does in a step: all forward passes, then all backward."""
    forward = [("forward", number) for number in range(micro_batches)]
    return forward + [("backward", number) for number in range(micro_batches)]


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


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


class Stage(nn.Module):
    """What one rank has of the model: some layers, and what comes before or after."""

    def __init__(self, stage, stages):
        super().__init__()
        self.first = stage == 0
        self.last = stage == stages - 1
        torch.manual_seed(0)
        if self.first:
            self.tokens = nn.Embedding(128, WIDTH)
            self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList()
        for number in range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages):
            torch.manual_seed(1 + number)  # a seed a layer: the same on any rank
            self.layers.append(Layer())
        if self.last:
            self.logits = nn.Linear(WIDTH, 128)

    def forward(self, x):
        if self.first:
            x = self.tokens(x) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.logits(x.flatten(0, 1)) if self.last else x


def train_step(model, todo, text, targets, groups):
    """Do with a batch what a schedule says. Return loss, log, bytes sent."""
    rank = dist.get_rank()
    micro_batches = len(todo) // 2
    texts = text.unflatten(0, (micro_batches, -1))  # of one size, or this is an error
    targets = targets.unflatten(0, (micro_batches, -1))
    down, up = groups  # activations go down the stages, gradients come up again
    loss = torch.zeros((), device=text.device)
    held = {}  # what forward leaves for backward, and how many bytes that is
    sent = []
    log = []  # of each pass: what, which, the bytes of each micro-batch that is held
    for what, number in todo:
        if what == "forward":
            x = texts[number]
            if not model.first:
                x = receive(rank - 1, down, x).requires_grad_()
            y, size = forward(model, x)
            if model.last:
                # The gradients of the micro-batches add up, so each counts less.
                y = F.cross_entropy(y, targets[number].flatten()) / micro_batches
                loss += y.detach()
            else:
                # isend does not wait: this neighbor may be sending to us right now.
                sent.append((dist.isend(y.detach(), rank + 1, down), y.nbytes))
            held[number] = x, y, size
        else:
            x, y, size = held.pop(number)
            gradient = None if model.last else receive(rank + 1, up, texts[number])
            if y.requires_grad:  # not where all is frozen, from the first stage to here
                y.backward(gradient)  # adds to the parameters' gradients, makes x's
            if not model.first:
                sent.append((dist.isend(x.grad, rank - 1, up), x.nbytes))
        log.append((what, number, [size for _, _, size in held.values()]))
    for message, _ in sent:
        message.wait()
    return loss, log, [size for _, size in sent]


def train(name, model, todo, train_set, groups, device, args):
    """Train a stage, or the whole model. Return losses and a step's records."""
    order = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train_set, args.batch_size, sampler=order, drop_last=True)
    # Adam divides by the size of the gradients. Its eps of 1e-8 would hide a wrong one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-3)
    losses = []
    model.train()
    for text, targets in islice(loader, args.max_steps):  # the same on all ranks
        text, targets = text.to(device), targets.to(device)
        optimizer.zero_grad()
        loss, log, sent = train_step(model, todo, text, targets, groups)
        optimizer.step()  # each stage its own parameters
        losses.append(loss)
    losses = torch.stack(losses)
    dist.broadcast(losses, dist.get_world_size() - 1)  # the last stage knows them
    if dist.get_rank() == 0:
        print(f"{name}, {len(losses)} steps: mean loss {losses.mean():.4f}")
    return losses, log, sent


def main(device, args):
    """Run on every rank: train with each schedule, then without stages."""
    if dist.get_backend() == "gloo":  # it sends only what is in the CPU's memory
        device = torch.device("cpu")
    train_set = make_text()
    # A group for each direction: in one, NCCL sends in order, and they would get stuck.
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    groups = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    runs = {}
    for name, schedule in SCHEDULES.items():
        model = Stage(rank, ranks).to(device)
        todo = schedule(rank, ranks, args.micro_batches)
        losses, log, sent = train(name, model, todo, train_set, groups, device, args)
        runs[name] = losses, *report_step(name, log, sent, args)
    whole = Stage(0, 1).to(device)  # on each rank, so nothing is sent
    todo = [("forward", 0), ("backward", 0)]  # the whole batch: the loop you know
    losses, *_ = train("one process", whole, todo, train_set, groups, device, args)
    if rank == 0:
        return prove_schedules(runs, losses)


# ---- Shared helpers, identical in every lesson

LENGTH = 64  # characters in a piece of text
WIDTH = 64  # numbers per character inside the model
HEAD = 16  # of these, numbers for each head of the attention
LAYERS = 4
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def prove_schedules(runs, expected):
    """Print the proof: losses as those expected, and counts as the formulas say."""
    losses, idle, held, messages, right = zip(*runs.values())
    gap = (torch.stack(losses) - expected)[:, :20].abs().max().item()
    claim = f"{' and '.join(runs)}: losses within {gap:.0e} of one process"
    claim += f" (limit {ROUNDING:.0e}), idle {idle[0]} of slots, at most"
    claim += f" {' and '.join(held)} micro-batches held, {messages[0]} messages"
    words = "as" if all(right) else "NOT as"
    return prove(f"{claim}, {words} the formulas say", all(right) and gap <= ROUNDING)


def report_step(name, log, sent, args):
    """Print what all stages did in a step. Every rank must call this.

    Return, for the proof: idle slots, micro-batches held, messages, if all are right.
    """
    ranks = dist.get_world_size()
    parts = args.micro_batches
    records = [None] * ranks
    dist.all_gather_object(records, (log, sent))
    logs = [log for log, _ in records]
    sent = [size for _, sizes in records for size in sizes]
    held = [max(len(sizes) for *_, sizes in log) for log in logs]
    kept = [f"{max(sum(sizes) for *_, sizes in log) / 1e6:.2f}" for log in logs]
    table = slots(logs)
    idle = sum(row.count("..") for row in table)
    share = f"{idle / ranks / len(table[0]):.1%}"
    if dist.get_rank() == 0:
        for stage, row in enumerate(table[: 0 if parts > 10 else None]):  # if it fits
            print(f"stage {stage}  {' '.join(row)}")
        print(f"idle: {share} of slots; messages: {len(sent)}, {sum(sent):,} bytes")
        print(f"held at most: {held} micro-batches, {', '.join(kept)} MB")
    most = [parts] * ranks
    if name == "1F1B":
        most = [min(parts, ranks - stage) for stage in range(ranks)]
    # Idle: 2 slots for each other stage. Sent: activations down, gradients up again.
    size = 4 * args.batch_size // parts * LENGTH * WIDTH  # float32
    formulas = [most, 2 * ranks * (ranks - 1), [size] * 2 * parts * (ranks - 1)]
    return share, str(held[0]), len(sent), [held, idle, sent] == formulas


def slots(logs):
    """Return what each stage did in each slot, such as F0, or ..: a row for each stage.

    A pass takes a slot. It waits for the one before it, and for its neighbor's message.
    """
    ends = {}
    for _ in range(len(logs) * len(logs[0])):  # as long as any may still move
        for stage, log in enumerate(logs):
            slot = 0
            for what, number, _ in log:
                source = stage - 1 if what == "forward" else stage + 1
                slot = 1 + max(slot, ends.get((what, number, source), 0))
                ends[what, number, stage] = slot
    table = [[".."] * max(ends.values()) for _ in logs]
    for (what, number, stage), slot in ends.items():
        table[stage][slot - 1] = f"{what[0].upper()}{number}"
    return table


def forward(model, x):
    """Return what a stage computes, and how many bytes it keeps for backward."""
    sizes = {}

    def note(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x)
    for parameter in model.parameters():
        sizes.pop(parameter.data_ptr(), None)
    return y, sum(sizes.values())


def receive(source, group, text):
    """Return what a neighbor sends for a text: float32 [N, LENGTH, WIDTH]."""
    tensor = torch.empty(*text.shape, WIDTH, device=text.device)
    dist.recv(tensor, source, group)
    return tensor


def make_text():
    """Return the training set: sums, such as "7 plus 5 is 12. ", as tokens."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(10, (6000, 2), generator=generator).tolist()
    text = "".join(f"{a} plus {b} is {a + b}. " for a, b in pairs)
    tokens = torch.tensor(list(text.encode()))
    pieces = tokens.unfold(0, LENGTH + 1, LENGTH)  # int64 [N, 65]: they overlap by 1
    return TensorDataset(pieces[:1280, :-1], pieces[:1280, 1:])


class Layer(nn.Module):
    """One layer of a transformer: float32 [N, LENGTH, WIDTH] to the same shape."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)  # the heads
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        query = heads(self.query(y))
        key = heads(self.key(y))
        value = heads(self.value(y))
        # Causal: no character may see those after it, which the model must guess.
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def heads(x):
    """Return x [N, LENGTH, some * HEAD] as one row a head: [N, some, LENGTH, HEAD]."""
    return x.unflatten(2, (-1, HEAD)).transpose(1, 2)


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
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--batch-size", type=int, default=32, help="of all stages (32)")
    add("--micro-batches", type=int, default=8, help="parts of a batch (8)")
    add("--lr", type=float, default=0.003, help="learning rate (0.003)")
    add("--max-steps", type=int, default=40, help="end after so many steps (40)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        if type(number) in (int, float) and not 0 < number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if args.batch_size % args.micro_batches or args.batch_size > 1280:
        parser.error("the micro-batches must divide the batch evenly, up to 1280")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    if int(os.environ["WORLD_SIZE"]) > LAYERS:
        parser.error(f"at most {LAYERS} ranks: each needs a layer of its own")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
