import torch
from exercises.common import (
    Fact,
    Messages,
    at_each_step,
    flat,
    gap,
    gather,
    gradients,
    noted,
)
from torch import nn


def check_21_1(exercise, rank, world_size):
    inputs = noted(exercise.Expert, "forward")
    cases = ("tokens for all", "tokens for few", "data 4 x tensor 1")
    wrong = False  # the output, or it takes more than it needs
    for what in cases:
        if what == cases[2]:
            if any(gather(wrong)):
                return  # what is wrong can end in an error there
            exercise.DATA, exercise.TENSOR = 4, 1
        groups = exercise.make_groups()
        place, at = exercise.places()
        tokens, target = exercise.make_tokens()
        if what == "tokens for few":  # experts of the first data rank
            tokens = 0.001 * tokens
        tokens.requires_grad_()
        gate, experts = exercise.make_layer(groups[1])
        mine = tokens[place].detach().requires_grad_()
        inputs.clear()
        with Messages() as messages:
            result, norm = exercise.run(gate, experts, mine, target[place], *groups)
        rows = sum(len(x) for (_, x), _ in inputs)
        right, right_gate, right_experts, right_norm = exercise.run_alone(
            tokens, target
        )
        choice = right_gate(tokens).argmax(2).flatten()
        need = choice.bincount(minlength=exercise.EXPERTS)
        need = need.view(exercise.DATA, -1)[place].sum().item()
        # Four times a row goes along data, and so do its expert's sums along tensor.
        row = 4 * mine[0].nbytes * (1 - 1 / world_size)
        most = 1.2 * row * (max(len(mine), need) + need) + 1000
        far = gap(result, right[place])
        wrong |= rows > need or messages.bytes > most or far > 1e-6
        own = mine.grad / exercise.DATA
        right_gate, gate = gradients(right_gate), gradients(gate)
        facts = [("output", result, "output", right[place])]
        facts.append(("gradients of tokens", own, "exchange", tokens.grad[place]))
        facts.append(("gradients of gate", gate, "exchange", right_gate))
        for number, expert in enumerate(experts, place * len(experts)):
            whole = right_experts[number]
            own = torch.cat([expert.up.grad, expert.down.grad.T], 1)
            parts = torch.cat([whole.up.grad, whole.down.grad.T], 1).chunk(
                exercise.TENSOR
            )
            facts.append((f"gradients of expert {number}", own, "experts", parts[at]))
        for name, value, key, right in facts:
            yield Fact(f"{what}: {name}", value, key, right, close=1e-9)
        # A sum in float32 is good enough.
        yield Fact(f"{what}: norm", norm, "norm", right_norm, close=1e-6)
        yield Fact(f"{what}: rows that its experts get:", rows, "output", most=need)
        yield Fact(f"{what}: bytes sent", messages.bytes, "output", most=most)
    if any(gather(wrong)):
        return
    exercise.DATA, exercise.TENSOR = 2, 2
    data, tensor = exercise.make_groups()
    place, _ = exercise.places()
    _, experts = exercise.make_layer(tensor)
    mine = exercise.make_tokens()[0][place, : 3 + 4 * place].requires_grad_()
    choice = torch.arange(len(mine)) * 3 % exercise.EXPERTS
    answers = exercise.ask_experts(mine, choice, experts, data)
    experts = [exercise.Expert(number) for number in choice.tolist()]
    rows = zip(experts, mine.detach())
    right = torch.cat([expert(x[None]) for expert, x in rows]).detach()
    yield Fact("3 and 7 tokens: answers", answers, "output", right, close=1e-9)


def check_21_2(exercise, rank, world_size):
    """As in 11.4 the result comes first: while it's wrong, a learner sees only that."""
    right = exercise.train_whole()
    layouts = {"tensor": (2, 1, 2), "context": (1, 4, 1), "data and context": (2, 2, 1)}
    inputs = noted(nn.Embedding, "forward")
    held = at_each_step(lambda adam: len(flat(adam.param_groups[0]["params"])))
    off, shares = {}, []
    for what, sizes in layouts.items():
        inputs.clear()
        off[what] = gap(exercise.train(sizes), right)
        tokens = sum(x.numel() for (_, x), _ in inputs)
        shares.append((what, tokens, held[-1]))
    same = sum(far <= 1e-9 for far in off.values())
    what = f"result: layouts out of {len(off)} with the losses of one process:"
    yield Fact(what, same, "norm", right=len(off))
    keys = {"context": "places", "data and context": "batch"}
    for what, far in off.items():
        key = keys.get(what, "norm")
        yield Fact(f"{what}: losses differ from one process's by", far, key, most=1e-9)
    yield Fact(
        "losses of 4 x 1 x 1:", exercise.train((4, 1, 1)), right=right, close=1e-9
    )
    yield Fact("losses of one process:", right, close=1e-9)
    for what, tokens, numbers in shares:
        key = keys.get(what, "norm")
        yield Fact(f"{what}: tokens that it takes in all steps:", tokens, key)
        yield Fact(f"{what}: numbers that it has of the model:", numbers, key)
