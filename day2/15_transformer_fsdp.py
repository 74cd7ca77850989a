"""Lesson 15: when the model is the limit. Each rank keeps a part of it.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  sharding by hand, then fully_shard (FSDP2); the meta device
Run:       scripts/multinode_setup_and_run.sh day2/15_transformer_fsdp.py
Look for:  => ... ranks: losses within ... (limit ...), parameters ... (limit ...): ok
Try next:  LAYERS = 8: which numbers double? 2 ranks instead of 4: which change?
"""

import argparse
import os
import sys
import time
import warnings
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ByHand:
    """Divides a piece of the model, such as a layer: each rank keeps 1/N of it."""

    def __init__(self, piece):
        # What is frozen stays whole. What a piece inside this one has divided holds 0.
        self.whole = [x for x in piece.parameters() if x.requires_grad and held([x])]
        assert len({x.dtype for x in self.whole}) == 1, "nothing to train or two dtypes"
        self.piece = piece
        self.trained = [x.requires_grad for x in piece.parameters()]  # False: frozen
        all_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, self.trained)
        assert all(x == self.trained for x in all_ranks), "ranks froze other layers"
        self.flat = flatten(self.whole)
        part = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        self.part = nn.Parameter(part.clone())  # all that stays on this rank
        nn.utils.vector_to_parameters(self.flat, self.whole)  # views of flat from now
        self.free()
        piece.register_forward_pre_hook(self.gather)
        piece.register_forward_hook(self.free)
        piece.register_full_backward_pre_hook(self.gather)
        for parameter in self.whole:
            parameter.register_post_accumulate_grad_hook(self.scatter)

    def gather(self, *from_hook):
        """Before the piece computes, make it whole: each rank sends its part."""
        assert all(x.grad is None for x in self.whole), "freeze what the loss ignores"
        trained = [x.requires_grad for x in self.piece.parameters()]
        assert trained == self.trained, "frozen or unfrozen: divide the model again"
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_into_tensor(self.flat, self.part.detach())

    def free(self, *from_hook):
        """After the piece has computed, give its memory back."""
        self.flat.untyped_storage().resize_(0)

    def scatter(self, *from_hook):
        """After its last gradient, average them: each rank gets its part's mean."""
        gradients = [parameter.grad for parameter in self.whole]
        if None not in gradients:
            self.free()
            mean = torch.empty_like(self.part)
            dist.reduce_scatter_tensor(mean, flatten(gradients) / dist.get_world_size())
            earlier = self.part.grad  # of a backward before, if this step has several
            self.part.grad = mean if earlier is None else earlier + mean
            for parameter in self.whole:
                parameter.grad = None


def flatten(tensors):
    """Return all tensors as one vector, padded so that N equal parts make it up."""
    flat = torch.cat([x.detach().flatten() for x in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def by_pytorch(piece):
    """The same by PyTorch: each parameter becomes a DTensor, which has a part of it."""
    kind = next(piece.parameters()).device.type
    # Of all ranks, with their timeout.
    mesh = dist.DeviceMesh.from_group(dist.group.WORLD, kind)
    fully_shard(piece, mesh=mesh, reshard_after_forward=True)  # free Net after it, too
    if hasattr(piece, "set_force_sum_reduction_for_comms"):  # torch 2.8 and newer
        piece.set_force_sum_reduction_for_comms(True)  # not every backend can average


def build(divide, meter, device):
    """Return Net, and what divide makes of its pieces: one after the other is whole."""
    with torch.device("meta"):  # shapes only: they need no memory
        model = meter.model = Net()
    count = len(list(model.parameters()))
    divided = []
    with meter:
        # Net, last, has the rest: positions is never called, so it would run no hook.
        for i, piece in enumerate([*model.layers, model.tokens, model.logits, model]):
            torch.manual_seed(i)  # the same first weights on every rank
            for module in piece.modules():
                if any(x.is_meta for x in module.parameters(recurse=False)):
                    module.to_empty(device=device, recurse=False)  # memory, for it only
                    module.reset_parameters()
            divided.append(divide(piece) if divide else piece)
    assert len(list(model.parameters())) == count, "to_empty unties: tie before divide"
    return model, divided


def train_steps(model, loader, optimizer, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for text, targets in loader:
        text, targets = text.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(name, divide, train_set, device, args):
    """Build and train, alone if divide is None. Return losses, bytes, the model."""
    meter = Meter()
    model, divided = build(divide, meter, device)
    # Made after dividing, because fully_shard replaces the parameters.
    parts = [x.part for x in divided] if divide is ByHand else model.parameters()
    # Adam divides by the size of the gradients. Its eps of 1e-8 would hide a wrong one.
    optimizer = torch.optim.AdamW(parts, lr=args.lr, eps=1e-3)
    ranks = dist.get_world_size() if divide else 1
    # Rank r takes pieces of text r, r + ranks, ... of one shuffled list.
    sampler = DistributedSampler(train_set, ranks, dist.get_rank())
    loader = DataLoader(train_set, args.batch_size // ranks, sampler=sampler)
    losses = train_steps(model, islice(loader, args.max_steps), optimizer, device)
    if divide:
        dist.all_reduce(losses)  # each rank knows only its own
        losses /= ranks
    if dist.get_rank() == 0:
        print(f"{name}: loss {losses[-1].item():.4f} after {len(losses)} steps")
    return losses, count_bytes(name, meter, optimizer, train_set, device), model


def main(device, args):
    """Run on every rank: train by hand, then with PyTorch, then rank 0 on its own."""
    make_repeatable()  # only because we compare runs
    device = device_for_sharding(device)
    warnings.filterwarnings("ignore", "Full backward hook")  # tokens have no gradient
    train_set = make_text()
    by_hand = train("by hand", ByHand, train_set, device, args)
    sharded = train("fully_shard", by_pytorch, train_set, device, args)
    if dist.get_rank() == 0:
        whole = train("one process", None, train_set, device, args)
        return compare_all_three(by_hand, sharded, whole)


# ---- Shared helpers, identical in every lesson

LENGTH = 64  # characters in a piece of text
WIDTH = 64  # numbers per character inside the model
HEAD = 16  # of these, numbers for each head of the attention
LAYERS = 4
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def compare_all_three(by_hand, sharded, whole):
    """Compare losses with one process's, bytes with formulas. Print the proof."""
    ranks = dist.get_world_size()
    losses, (everything, *_), model = whole
    part = everything // ranks
    # A layer is the largest piece. positions is whole as long as Net computes.
    pieces = [*model.layers[0].parameters(), *model.positions.parameters()]
    limit = part + held(pieces)
    formula = [part, part, 2 * part, limit, 3 * (ranks - 1) * part]
    gap = (torch.stack([by_hand[0], sharded[0]]) - losses).abs().max().item()
    most = max(run[1][3] for run in (by_hand, sharded))
    claim = f"{ranks} ranks: losses within {gap:.0e} of one process"
    claim += f" (limit {ROUNDING:.0e}), parameters at most {most / 1e6:.3f} MB"
    claim += f" (limit {limit / 1e6:.3f})"
    return prove(claim, gap <= ROUNDING and by_hand[1] == sharded[1] == formula)


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def count_bytes(name, meter, optimizer, train_set, device):
    """Take one more step. Print and return the bytes that this rank holds and sends."""
    parts = meter.parts = optimizer.param_groups[0]["params"]
    meter.sent = 0  # not what dividing has sent
    with meter:
        train_steps(meter.model, [train_set[:4]], optimizer, device)
    states = [x for state in optimizer.state.values() for x in state.values()]
    kept = [parts, [x.grad for x in parts], [x for x in states if x.dim()]]
    counted = [held(kind) for kind in kept] + [meter.most, meter.sent]
    if dist.get_rank() == 0:
        row = "parameters {:.3f}, gradients {:.3f}, Adam's states {:.3f}; "
        row += "parameters at most {:.3f}; sent in a step {:.3f}"
        print(f"{name}, MB a rank:", row.format(*[x / 1e6 for x in counted]))
    return counted


class Meter(TorchDispatchMode):
    """Looks after every operation what the parameters take, and what was sent."""

    def __init__(self):
        super().__init__()
        self.parts = []
        self.most = 0  # bytes of parameters, and of their parts, at one time
        self.sent = 0  # bytes to other ranks: a collective's whole less its part

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.most = max(self.most, held([*self.parts, *self.model.parameters()]))
        if operation.name().endswith("_base_"):  # all-gather and reduce-scatter
            self.sent += abs(args[0].nbytes - args[1].nbytes)
        return result


@torch.no_grad()
def held(tensors):
    """Return how many bytes this rank holds of tensors, padding included."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    storages = [part.untyped_storage() for part in parts if not part.is_meta]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values())  # what several tensors share counts once


def device_for_sharding(device):
    """Return the device for the model. Where this torch cannot shard there, end."""
    # Before torch 2.8 the backend must average, and no error says that it did not: gloo
    # then gives the sum, NCCL with one rank may give zeros (pytorch#144045).
    sums = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    gloo = dist.get_backend() == "gloo"
    if not sums and (gloo or dist.get_world_size() == 1):
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__} cannot shard here: take 2.8 or newer")
        sys.exit(os.EX_UNAVAILABLE)  # not a fault: run_course.sh skips the lesson here
    # gloo can shard on CPUs only, so ranks that share a GPU do not use it.
    return torch.device("cpu") if gloo else device


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


def make_repeatable():
    """Have a GPU compute the same numbers in each run. Slow: only to compare runs."""
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # TF32 rounds float32's 24 bits to 11


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
    add("--batch-size", type=int, default=32, help="of all ranks together (32)")
    add("--lr", type=float, default=0.003, help="learning rate (0.003)")
    add("--max-steps", type=int, default=20, help="end after so many steps (20)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        if type(number) in (int, float) and not 0 < number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    ranks = int(os.environ["WORLD_SIZE"])
    if args.batch_size % ranks or WIDTH % ranks:
        shares = f"{args.batch_size} pieces of text and {WIDTH} rows"
        parser.error(f"{ranks} ranks cannot share {shares} evenly")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
