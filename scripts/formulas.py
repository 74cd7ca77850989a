"""What a step of a transformer computes, sends and holds on one rank: CHOOSE.md's formulas.

In bf16, with FSDP's parameters and Adam's states in float32. tokens: those of a rank's own piece of
the texts in a micro-batch, which a tensor group has together.

Sources: operations, Narayanan and others (arXiv 2104.04473); what a layer keeps and sends with
tensor and sequence parallel, Korthikanti and others (arXiv 2205.05198); FSDP's three messages, ZeRO
(arXiv 1910.02054). day2/count_step.py counts the same in PyTorch itself.
"""

from typing import NamedTuple


class Model(NamedTuple):
    """A Llama, or with other values of gated and kept a GPT: False and 2."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int  # numbers between an MLP's matrices
    vocabulary: int
    gated: bool = True  # SwiGLU: three matrices
    kept: float = 4  # such numbers that backward needs: 3 if SwiGLU is one kernel
    experts: float = 1  # MLPs of a layer
    active: int = 1  # of them, for a token

    @property
    def shared(self):
        """Key and value heads, of all heads."""
        return self.kv_heads / self.heads

    @property
    def layer(self):
        """Parameters of a layer's matrices."""
        attention = (2 + 2 * self.shared) * self.width**2
        return round(attention + self.experts * (2 + self.gated) * self.width * self.mlp)

    @property
    def ends(self):
        """Parameters of embedding and logits."""
        return 2 * self.vocabulary * self.width

    @property
    def parameters(self):
        norms = (2 * self.layers + 1) * self.width
        return self.layers * self.layer + self.ends + norms


def operations(parameters, layers, width, length, again=False):
    """Return the operations for a token: 6 a parameter, and a causal mask's half of attention's.

    parameters: those that multiply, so without an embedding; again: with checkpointing
    """
    return (8 if again else 6) * (parameters + layers * width * length)


def sends(model, layout, tokens, again=False):
    """Return the bytes that a rank sends in a micro-batch, in rings: {way: bytes}."""
    _, shards, context, tensor = layout
    fsdp = shards * context
    norms = (2 * model.layers + 1) * model.width  # whole on each tensor rank
    gathered = model.layers * model.layer / tensor + norms
    # Three times for each layer; the root is not gathered again for backward.
    layers, ends = 3 * gathered, 2 * model.ends / tensor
    own = (gathered + model.ends / tensor) / fsdp  # after reduce_scatter
    # Before and after attention and MLP, forward and backward; and at both ends. Computing twice
    # repeats three of four: nothing that backward needs comes after the last.
    x = (11 if again else 8) * model.layers + 4
    keys = (6 if again else 4) * model.layers * model.shared * model.width / tensor
    return {
        "FSDP": 2 * around(fsdp) * (layers + ends),
        "replicas": 2 * 2 * around(layout.replicas) * own,
        # And sums of the norms' gradients, and of the loss's three numbers for each token.
        "tensor": around(tensor) * (2 * x * tokens * model.width + 4 * norms + 24 * tokens),
        "context": 2 * around(context) * keys * tokens * context,
    }


def around(ranks):
    """Return how much of a message a rank sends in an all_gather or reduce_scatter."""
    return (ranks - 1) / ranks


def kept(model, tensor=1):
    """Return the bytes that a layer keeps for each token with flash attention."""
    # What goes into the norms, query, keys and values, what attention gives, the MLP's numbers;
    # what the norms give is whole on each rank.
    copies = 2 * model.width if model.experts > 1 else 0  # to an expert, and back
    mlp = model.active * (model.kept * model.mlp + copies)
    divided = (4 + 2 * model.shared) * model.width + mlp
    return 2 * (2 * model.width + divided / tensor)


def holds(model, layout, tokens, again=False):
    """Return the bytes that a rank holds, each at its largest: {what: bytes}."""
    fsdp, tensor = layout.shards * layout.context, layout.tensor
    activations = model.layers * kept(model, tensor) * tokens
    if again:
        x = 2 * model.width * tokens / tensor
        activations = model.layers * x + kept(model, tensor) * tokens
    return {
        "model": 16 * model.parameters / fsdp / tensor,
        # While it computes: a layer, the next one, its gradients; both ends. Each in bf16.
        "whole": 2 * (3 * model.layer + model.ends) / tensor if fsdp > 1 else 0,
        "activations": activations,
        # cross_entropy in float32; PyTorch's divided one keeps a copy more.
        "loss": (16 if tensor > 1 else 12) * tokens * model.vocabulary / tensor,
    }
