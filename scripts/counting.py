"""Count what a rank sends and holds: a Llama, divided by PyTorch, and a mode that sees all of it.

Some of what it imports is no public interface; count_step.py says for which torch it was made.
"""

import gc
import weakref
from collections import Counter
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

# In the place of RMSNorm, which is one kernel on GPUs only: it keeps the same.
Norm = partial(nn.LayerNorm, bias=False)


class Attention(nn.Module):
    """Grouped queries. RoPE is left out: it neither sends nor keeps anything."""

    def __init__(self, model, context):
        super().__init__()
        self.size = model.width // model.heads
        self.context = context  # the group among which a text is divided
        linear = partial(nn.Linear, model.width, bias=False)
        self.query, self.out = linear(model.width), linear(model.width)
        self.key, self.value = (linear(model.kv_heads * self.size) for _ in range(2))

    def forward(self, x):
        parts = self.query(x), self.key(x), self.value(x)
        query, *others = (x.unflatten(-1, (-1, self.size)).transpose(1, 2) for x in parts)
        if self.context.size() > 1:
            others = [all_gather_single_autograd(x, 2, self.context) for x in others]
        x = F.scaled_dot_product_attention(query, *others, is_causal=True, enable_gqa=True)
        return self.out(x.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, model):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.gate, self.up = (linear(model.width, model.mlp) for _ in range(2))
        self.down = linear(model.mlp, model.width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, model, context, again):
        super().__init__()
        self.norm1, self.norm2 = (Norm(model.width) for _ in range(2))
        self.attention, self.mlp = Attention(model, context), MLP(model)
        if again:
            self.forward = partial(checkpoint, self.forward, use_reentrant=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, model, context, again):
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleList(Layer(model, context, again) for _ in range(model.layers))
        self.norm = Norm(model.width)
        self.logits = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, x):
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))


def divide(model, mesh):
    """Divide a Llama with sequence parallel, its vocabulary too, and then with FSDP."""
    rows = Shard(1)  # of x [texts, tokens, width]
    whole = tp.PrepareModuleInput(input_layouts=rows, desired_input_layouts=Replicate())
    plan = {"norm1": tp.SequenceParallel(), "norm2": tp.SequenceParallel()}
    plan |= {"attention": whole, "mlp": whole}
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        plan[name] = tp.ColwiseParallel()
    for name in ("attention.out", "mlp.down"):
        plan[name] = tp.RowwiseParallel(output_layouts=rows)
    plan = {f"layers.*.{name}": style for name, style in plan.items()}
    plan["tokens"] = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    plan["norm"] = tp.SequenceParallel()
    plan["logits"] = tp.ColwiseParallel(input_layouts=rows, use_local_output=False)
    if mesh["tensor"].size() > 1:
        tp.parallelize_module(model, mesh["tensor"], plan)
    mesh = mesh["replicas", "FSDP"] if mesh["replicas"].size() > 1 else mesh["FSDP"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for piece in [*model.layers, model]:
        fully_shard(piece, mesh=mesh, mp_policy=policy)
        piece.set_force_sum_reduction_for_comms(True)  # gloo cannot average


class Count(TorchDispatchMode):
    """Count messages, the bytes that a ring sends, and the bytes that tensors have at a time."""

    def __init__(self, ways):
        super().__init__()
        self.ways = ways  # {name of a group: (way, ranks)}
        self.messages, self.sent = Counter(), Counter()
        self.live = self.peak = 0
        self.sizes = {}
        self.paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, with this rank's parts
        out = function(*args, **(kwargs or {}))
        if self.paused:
            return out
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x.untyped_storage())
        name = function.name()
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            leaves = tree_leaves((args, out))
            group = next(filter(None, map(self.way, leaves)))
            longest = max(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
            way, ranks = self.ways[group]
            times = 2 if "allreduce" in name or "all_reduce" in name else 1
            self.messages[way] += ranks > 1
            self.sent[way] += times * longest * (ranks - 1) / ranks
        return out

    def way(self, x):
        """Return the name of a group, if an argument of an operation is one."""
        if isinstance(x, torch.ScriptObject):
            x = dist.ProcessGroup.unbox(x).group_name
        return x if isinstance(x, str) and x in self.ways else None

    def see(self, storage):
        """Note the size of a tensor's memory, until it is freed."""
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
        self.live += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def forget(self, key):
        self.live -= self.sizes.pop(key)

    def __enter__(self):
        resize = torch.UntypedStorage.resize_
        shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_see(storage, size):
            resize(storage, size)
            self.see(storage)
            return storage

        def without_counting(*args):
            self.paused = True
            try:
                return shapes(*args)
            finally:
                self.paused = False

        # FSDP frees and fills whole layers by resizing them.
        self.stack = ExitStack()
        patch = partial(mock.patch.object, torch.UntypedStorage)
        self.stack.enter_context(patch("resize_", resize_and_see))
        # To know its shape, a DTensor computes with whole tensors that have no memory.
        patch = partial(mock.patch.object, ShardingPropagator)
        self.stack.enter_context(patch(shapes.__name__, without_counting))
        return super().__enter__()

    def __exit__(self, *error):
        self.stack.close()
        return super().__exit__(*error)


def count(model, layout, tokens, again, mode):
    """Return the Count of a step on this rank. Every rank of the default group must call this."""
    replicas, shards, context, tensor = layout
    names = "replicas", "FSDP", "tensor"
    mesh = init_device_mesh("cpu", (replicas, shards * context, tensor), mesh_dim_names=names)
    texts = init_device_mesh(
        "cpu", (replicas * shards, context, tensor), mesh_dim_names=("data", "context", "same")
    )
    groups = {name: mesh.get_group(name) for name in names}
    groups["context"] = texts.get_group("context")
    counted = Count({group.group_name: (way, group.size()) for way, group in groups.items()})
    with mode, counted:
        net = Llama(model, groups["context"], again)
    with counted:  # dividing looks into the mesh, which is real
        divide(net, mesh)
    with mode, counted:
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for _ in range(2):  # in the first one, Adam has no states yet
            gc.collect()
            counted.messages.clear()
            counted.sent.clear()
            counted.peak = counted.live
            take_step(net, optimizer, model.vocabulary, tokens)
    return counted


def take_step(net, optimizer, vocabulary, tokens):
    inputs = torch.randint(vocabulary, (1, tokens))
    with tp.loss_parallel():  # if logits are divided
        # No variable holds the logits, so that backward can free them.
        F.cross_entropy(net(inputs).flatten(0, 1).float(), inputs.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def count_on_fake_ranks(model, layout, tokens, again):
    """Return rank 0's Count, with tensors that have no memory and messages that go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())
    try:
        return count(model, layout, tokens, again, FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        dist.destroy_process_group()
