"""Lesson 16: split the layers. Each rank computes a part of every large product.

Builds on: 15_transformer_fsdp.py
New here:  column-wise and row-wise by hand; parallelize_module; a mesh with two names
Run:       scripts/multinode_setup_and_run.sh day2/16_transformer_tensor_parallel.py
Look for:  => mesh ...: losses within ... of one process (limit ...), ...: ok
Try next:  --tensor 4, then 1
"""

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Copy(torch.autograd.Function):
    """Into column-wise layers: all ranks have the same x. Backward adds up."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        # x went through the columns of all ranks. This rank knows only about its own.
        return AddUp.apply(gradient, context.group), None


class AddUp(torch.autograd.Function):
    """Out of row-wise layers: add up what all ranks have. Backward copies."""

    @staticmethod
    def forward(context, part, group):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None  # of a sum: the same for each of its parts


class RowWise(nn.Module):
    """Some rows of a linear layer's matrix, for the inputs that this rank has."""

    def __init__(self, linear, mesh):
        super().__init__()
        self.group = mesh.get_group("tensor")
        self.weight = own_part(linear.weight, 1, mesh)
        self.bias = linear.bias

    def forward(self, x):
        part = F.linear(x, self.weight)  # a part of each sum
        return AddUp.apply(part, self.group) + self.bias  # once, so after adding up


def split_by_hand(model, mesh):
    """Leave this rank its part of each layer: some of the heads, some inner numbers."""

    def copy(norm, inputs, output):
        return Copy.apply(output, mesh.get_group("tensor"))

    for layer in model.layers:
        for norm in (layer.norm1, layer.norm2):
            norm.register_forward_hook(copy)  # what follows is column-wise
        for linear in (layer.query, layer.key, layer.value, layer.up):
            # PyTorch stores a matrix as [outputs, inputs], so its columns are rows.
            linear.weight = own_part(linear.weight, 0, mesh)
            linear.bias = own_part(linear.bias, 0, mesh)
        layer.out_proj = RowWise(layer.out_proj, mesh)
        layer.down = RowWise(layer.down, mesh)


def split_by_pytorch(model, mesh):
    """Do the same with PyTorch. What is split becomes a DTensor."""
    same = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
    # One copy for query, key and value. Without it, each of them adds up in backward.
    copy = tp.PrepareModuleOutput(**same, use_local_output=False)
    plan = {"norm1": copy, "norm2": copy}
    plan |= dict.fromkeys(["query", "key", "value", "up"], tp.ColwiseParallel())
    plan |= dict.fromkeys(["out_proj", "down"], tp.RowwiseParallel())
    for layer in model.layers:
        tp.parallelize_module(layer, mesh["tensor"], plan)


def train_one_epoch(model, loader, optimizer, mesh, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for text, targets in loader:
        text, targets = text.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text), targets.flatten())
        loss.backward()
        average([local(x.grad) for x in model.parameters() if x.requires_grad], mesh)
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(name, split, train_set, mesh, device, args):
    """Train a new model, alone if mesh is None. Return its losses and counts."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = Net().to(device)
    if mesh and args.tensor > 1:
        split(model, mesh)
    # foreach would not take DTensors and other tensors together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    # A tensor group needs the same texts, so the sampler takes its ranks as one.
    parts = mesh["data"].size() if mesh else 1
    part = mesh.get_local_rank("data") if mesh else 0
    sampler = DistributedSampler(train_set, parts, part)
    loader = DataLoader(train_set, args.batch_size // parts, sampler=sampler)
    begin = time.perf_counter()
    batches = islice(loader, args.max_steps)
    losses = train_one_epoch(model, batches, optimizer, mesh, device)
    average([losses], mesh)
    loss = losses.mean().item()  # waits for the device: only now read the clock
    speed = losses.numel() * args.batch_size * LENGTH / (time.perf_counter() - begin)
    with Messages() as messages:  # of one more step
        train_one_epoch(model, islice(loader, 1), optimizer, mesh, device)
    return losses, count(name, model, loss, speed, messages)


def main(device, args):
    """Run on every rank: split the layers by hand, then with PyTorch, and compare."""
    if dist.get_backend() == "gloo":  # on the CPU, too, where ranks share a GPU
        device = torch.device("cpu")
    train_set = make_text()
    # Neighboring ranks are a tensor group: on one node, where links are fast.
    ranks = torch.arange(dist.get_world_size()).view(-1, args.tensor)
    mesh = make_mesh(ranks, ("data", "tensor"), device.type, TIMEOUT)
    hand = train("by hand", split_by_hand, train_set, mesh, device, args)
    pytorch = train("PyTorch", split_by_pytorch, train_set, mesh, device, args)
    if dist.get_rank() == 0:
        alone, _ = train("one process", None, train_set, None, device, args)
        return prove_split([hand, pytorch], alone, mesh, args)


# ---- Shared helpers, identical in every lesson

LENGTH = 64  # characters in a piece of text
WIDTH = 64  # numbers per character inside the model
HEAD = 16  # of these, numbers for each head of the attention
LAYERS = 4
if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
    sys.exit("DIST_TIMEOUT is not a number of seconds")
TIMEOUT = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
ROUNDING = 1e-5  # a different order of adding changes the first 20 losses by less
warnings.filterwarnings("ignore", "DTensor random")  # torch 2.6 about itself


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def prove_split(runs, alone, mesh, args):
    """Print the proof, for losses and counts of two runs. Return the exit status."""
    data, tensor = mesh.shape
    right = by_formula(data, tensor, args.batch_size)
    holds = all(counts == right for _, counts in runs)
    gap = (torch.stack([run[0] for run in runs]) - alone)[:, :20].abs().max().item()
    claim = f"mesh {data} x {tensor}: losses within {gap:.0e} of one process"
    claim += f" (limit {ROUNDING:.0e}), {right[0]:,} parameters a rank, messages"
    claim += f" {'' if holds else 'NOT '}as the formula says"
    return prove(claim, holds and gap <= ROUNDING)


def by_formula(data, tensor, batch_size):
    """Return a rank's parameters, and the bytes that it gives to each all_reduce."""
    split = 12 * WIDTH**2 + 7 * WIDTH  # of a layer: matrices, column-wise biases
    whole = 6 * WIDTH  # norms, row-wise biases
    rest = (128 + LENGTH + 128) * WIDTH + 128  # tokens, positions, logits
    parameters = LAYERS * (split // tensor + whole) + rest
    activations = batch_size // data * LENGTH * WIDTH
    numbers = [activations] * 4 * LAYERS if tensor > 1 else []
    numbers += [parameters] if data > 1 else []  # the gradients
    return [parameters, *[4 * number for number in numbers]]


def make_mesh(ranks, names, kind, timeout):
    """Return a mesh of these ranks, int64 [rows, columns]. Every rank must call this.

    The groups of init_device_mesh would wait for 10 minutes with NCCL, 30 with gloo.
    """
    columns, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    rows, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    groups = [columns, rows]
    return dist.DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)


class Messages(TorchDispatchMode):
    """Note how many bytes each message has. A ring of over 2 ranks sends more."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        library, name = function.name().split("::")
        if "c10d" in library and "wait" not in name and "wrap" not in name:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.sizes.append(sum(tensor.nbytes for tensor in tensors))
        return function(*args, **(kwargs or {}))


def count(name, model, loss, speed, messages):
    """Print and return what this rank has and gives in a step, as by_formula does."""
    parameters = sum(local(parameter).numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{name}: loss {loss:.4f}, {speed:,.0f} characters/s")
        parts = [f"{n} x {size:,}" for size, n in Counter(messages.sizes).items()]
        given = " + ".join(parts) or 0
        print(f"{name}: {parameters:,} parameters a rank, {given} bytes to all_reduce")
    return [parameters, *messages.sizes]


@torch.no_grad()
def average(tensors, mesh):
    """Average in place over the data group: the same parts, but different texts."""
    if mesh and mesh["data"].size() > 1:
        flat = nn.utils.parameters_to_vector(tensors)
        dist.all_reduce(flat, group=mesh.get_group("data"))
        flat /= mesh["data"].size()
        for tensor, mean in zip(tensors, flat.split([x.numel() for x in tensors])):
            tensor.copy_(mean.view_as(tensor))


def own_part(parameter, dim, mesh):
    """Return this rank's part of a parameter, cut along dim."""
    parts = parameter.detach().chunk(mesh["tensor"].size(), dim)
    part = parts[mesh.get_local_rank("tensor")].clone()
    return nn.Parameter(part, parameter.requires_grad)


def local(tensor):
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


class Net(nn.Module):
    """A small transformer: int64 [N, LENGTH] to logits, float32 [N * LENGTH, 128]."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(128, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.logits = nn.Linear(WIDTH, 128)

    def forward(self, text):
        x = self.tokens(text) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.logits(x.flatten(0, 1))


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
    add("--tensor", type=int, help="ranks of a tensor group (2; 1 if ranks are odd)")
    add("--batch-size", type=int, default=32, help="of all ranks (32)")
    add("--lr", type=float, default=0.003, help="learning rate (0.003)")
    add("--max-steps", type=int, default=20, help="end after so many steps (20)")
    args = parser.parse_args()
    for name, number in vars(args).items():
        if type(number) in (int, float) and not 0 < number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    ranks = int(os.environ["WORLD_SIZE"])
    args.tensor = args.tensor or 2 - ranks % 2
    if args.tensor not in (1, 2, 4) or ranks % args.tensor:
        parser.error(f"--tensor: 1, 2 or 4, and {ranks} ranks must be a multiple of it")
    data = ranks // args.tensor
    args.batch_size = max(1, args.batch_size // data) * data  # the same for each
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
