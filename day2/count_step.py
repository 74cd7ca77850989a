"""Count what one rank of many sends and holds in a step, without ranks and memory.

Run: python day2/count_step.py 70B --shards 128 --tensor 8 --tokens 8192

PyTorch's own fully_shard and parallelize_module divide a Llama of this size, with
sequence parallel and a divided loss. Tensors have a shape and no memory, and messages
go nowhere, so one process can be rank 0 of thousands. Context ranks gather keys and
values, as Llama 3's do. Printed are GB: the table on lesson 21's page has them beside
CHOOSE's formulas. Put your own model in the place of Llama to count that.
"""

import argparse
import gc
import math
import sys
from collections import Counter
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

MADE_FOR = "2.15"
moved = None
try:  # no public interface
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._functional_collectives import all_gather_single_autograd
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as error:
    moved = error


class Model(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int  # numbers between an MLP's matrices
    vocabulary: int


MODELS = {
    "7B": Model(32, 4096, 32, 32, 11008, 32000),  # Llama 2
    "8B": Model(32, 4096, 32, 8, 14336, 128256),  # Llama 3
    "70B": Model(80, 8192, 64, 8, 28672, 128256),
}


class Layout(NamedTuple):
    """Ranks that share what. FSDP divides by shards x context; HSDP has replicas."""

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def ranks(self):
        return math.prod(self)


# In the place of RMSNorm, which is one kernel on GPUs only: it keeps the same.
Norm = partial(nn.LayerNorm, bias=False)
Linear = partial(nn.Linear, bias=False)


class Layer(nn.Module):
    """Grouped queries and SwiGLU. RoPE is left out: it sends and keeps nothing."""

    def __init__(self, model, context, again):
        super().__init__()
        self.size = model.width // model.heads
        self.context = context  # the group among which a text is divided
        self.norm1, self.norm2 = (Norm(model.width) for _ in range(2))
        self.query, self.out = (Linear(model.width, model.width) for _ in range(2))
        self.key, self.value = (
            Linear(model.width, model.kv_heads * self.size) for _ in range(2)
        )
        self.gate, self.up = (Linear(model.width, model.mlp) for _ in range(2))
        self.down = Linear(model.mlp, model.width)
        if again:
            self.forward = partial(checkpoint, self.forward, use_reentrant=False)

    def forward(self, x):
        y = self.norm1(x)
        parts = self.query(y), self.key(y), self.value(y)
        query, *others = (
            y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in parts
        )
        if self.context.size() > 1:
            others = [all_gather_single_autograd(y, 2, self.context) for y in others]
        y = F.scaled_dot_product_attention(
            query, *others, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, model, context, again):
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.layers = nn.Sequential(
            *(Layer(model, context, again) for _ in range(model.layers))
        )
        self.norm = Norm(model.width)
        self.logits = Linear(model.width, model.vocabulary)

    def forward(self, x):
        return self.logits(self.norm(self.layers(self.tokens(x))))


def divide(model, mesh):
    """Divide a Llama with sequence parallel, its vocabulary too, and then with FSDP."""
    rows = Shard(1)  # of x [texts, tokens, width]
    plan = dict.fromkeys(("query", "key", "value", "gate", "up"), tp.ColwiseParallel())
    plan |= dict.fromkeys(("out", "down"), tp.RowwiseParallel(output_layouts=rows))
    plan |= dict.fromkeys(("norm1", "norm2"), tp.SequenceParallel())
    plan = {f"layers.*.{name}": style for name, style in plan.items()}
    plan["tokens"] = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    plan["norm"] = tp.SequenceParallel()
    plan["logits"] = tp.ColwiseParallel(input_layouts=rows, use_local_output=False)
    gather = {"output_layouts": rows, "desired_output_layouts": Replicate()}
    gather = tp.PrepareModuleOutput(**gather, use_local_output=False)
    if mesh["tensor"].size() > 1:
        tp.parallelize_module(model, mesh["tensor"], plan)
        tp.parallelize_module(model, mesh["tensor"], {"layers.*.norm[12]": gather})
    mesh = mesh["replicas", "FSDP"] if mesh["replicas"].size() > 1 else mesh["FSDP"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for piece in [*model.layers, model]:
        fully_shard(piece, mesh=mesh, mp_policy=policy)
        piece.set_force_sum_reduction_for_comms(True)  # gloo cannot average


class Messages(TorchDispatchMode):
    """Count messages, and the bytes that a ring sends, by the way of their groups."""

    def __init__(self, groups):
        super().__init__()
        self.groups = {
            group.group_name: (way, group.size()) for way, group in groups.items()
        }
        self.messages, self.sent = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, with this rank's parts
        out = function(*args, **(kwargs or {}))
        name = function.name()
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            leaves = tree_leaves((args, out))
            way, ranks = next(filter(None, map(self.group, leaves)))
            longest = max(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
            times = 2 if "allreduce" in name or "all_reduce" in name else 1
            self.messages[way] += ranks > 1
            self.sent[way] += times * longest * (ranks - 1) / ranks
        return out

    def group(self, x):
        """Return (way, ranks) if an operation's argument is a group, or its name."""
        if isinstance(x, torch.ScriptObject):
            x = dist.ProcessGroup.unbox(x).group_name
        return self.groups.get(x) if isinstance(x, str) else None


def count(model, layout, tokens, again, mode):
    """Return the Messages of a step on this rank, and the most bytes that it holds.

    Every rank of the default group must call this.
    """
    replicas, shards, context, tensor = layout
    names = "replicas", "FSDP", "tensor"
    # Groups without a timeout: main's are fake, so that nobody waits.
    mesh = init_device_mesh(
        "cpu", (replicas, shards * context, tensor), mesh_dim_names=names
    )
    sizes = replicas * shards, context, tensor
    texts = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "context", "same"))
    groups = {name: mesh.get_group(name) for name in names}
    groups["context"] = texts.get_group("context")
    with mode:
        net = Llama(model, groups["context"], again)
    divide(net, mesh)  # looks into the mesh, which is real
    with mode:
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        take_step(
            net, optimizer, model.vocabulary, tokens
        )  # from now on, Adam has states
    gc.collect()
    messages, memory = Messages(groups), MemTracker()
    memory.track_external(net, optimizer)
    shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def without_counting(*args):
        # DTensors compute with whole tensors that have no memory, to know their shapes.
        with _disable_current_modes():
            return shapes(*args)

    uncounted = mock.patch.object(ShardingPropagator, shapes.__name__, without_counting)
    with uncounted, mode, memory, messages:
        take_step(net, optimizer, model.vocabulary, tokens)
    (peak,) = memory.get_tracker_snapshot("peak").values()
    return messages, peak["Total"]


def take_step(net, optimizer, vocabulary, tokens):
    inputs = torch.randint(vocabulary, (1, tokens))
    with tp.loss_parallel():  # if logits are divided
        # No variable holds the logits, so that backward can free them.
        F.cross_entropy(net(inputs).flatten(0, 1).float(), inputs.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def count_on_fake_ranks(model, layout, tokens, again):
    """Return rank 0's count: tensors have no memory, and messages go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())
    try:
        return count(
            model, layout, tokens, again, FakeTensorMode(allow_non_fake_inputs=True)
        )
    finally:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", choices=MODELS)
    for way in Layout._fields:
        add(f"--{way}", type=int, default=1, help=f"{way} (1)")
    add(
        "--tokens", type=int, default=4096, help="of a rank's piece of the texts (4096)"
    )
    add("--checkpointing", action="store_true", help="keep only what goes into a layer")
    args = parser.parse_args()
    model = MODELS[args.model]
    layout = Layout(*(getattr(args, way) for way in Layout._fields))
    if min(*layout, args.tokens) < 1 or layout.ranks > 2**16 or args.tokens > 2**24:
        parser.error("every number must be at least 1, with at most 65,536 ranks")
    if model.kv_heads % args.tensor or args.tokens % args.tensor:
        parser.error("--tensor must divide the tokens, and the key and value heads")
    try:
        if moved:
            raise moved
        found, peak = count_on_fake_ranks(
            model, layout, args.tokens, args.checkpointing
        )
    except (
        ImportError,
        AttributeError,
        TypeError,
        NotImplementedError,
        StopIteration,
    ) as error:
        differs = f"in this one, {torch.__version__}, something has moved: {error!r}"
        sys.exit(f"This was made for torch {MADE_FOR}, and {differs}")
    sizes = " x ".join(f"{way} {n}" for way, n in layout._asdict().items() if n > 1)
    print(f"{layout.ranks:,} ranks: {sizes}; GB of rank 0 in a micro-batch and a step")
    for way, size in found.sent.items():
        if size:
            number = found.messages[way]
            print(f"sent, {way}: {size / 1e9:.1f} in {number:,} messages")
    print(f"held at most: {peak / 1e9:.1f}")


if __name__ == "__main__":
    main()
