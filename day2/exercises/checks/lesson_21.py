import torch
from exercises.common import Fact, gap, gradients


def check_21_1(exercise, rank, world_size):
    groups = exercise.make_groups()
    place, at = exercise.places()
    for what in ("tokens for all", "tokens for few"):
        tokens, target = exercise.make_tokens()
        if what == "tokens for few":  # experts of the first data rank
            tokens = 0.001 * tokens
        tokens.requires_grad_()
        gate, experts = exercise.make_layer(groups[1])
        mine = tokens[place].detach().requires_grad_()
        result, norm = exercise.run(gate, experts, mine, target[place], *groups)
        right, right_gate, right_experts, right_norm = exercise.run_alone(
            tokens, target
        )
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
        facts.append(("norm", norm, "norm", right_norm))
        for name, value, key, right in facts:
            yield Fact(f"{what}: {name}", value, key, right, close=1e-9)


def check_21_2(exercise, rank, world_size):
    """As in 11.4 the result comes first: while it's wrong, a learner sees only that."""
    right = exercise.train_whole()
    layouts = {"tensor": (2, 1, 2), "context": (1, 4, 1), "data and context": (2, 2, 1)}
    off = {what: gap(exercise.train(sizes), right) for what, sizes in layouts.items()}
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
