import torch
from exercises.common import gap, gradients


def check_21_1(exercise, rank, world_size, report):
    groups = exercise.make_groups()
    place, at = exercise.places()
    for what in ("spread", "one way"):
        tokens, target = exercise.make_tokens()
        if what == "one way":  # almost all tokens want experts of the first data rank
            tokens = 0.001 * tokens
        tokens.requires_grad_()
        gate, experts = exercise.make_layer(groups[1])
        mine = tokens[place].detach().requires_grad_()
        result, norm = exercise.run(gate, experts, mine, target[place], *groups)
        right, right_gate, right_experts, right_norm = exercise.run_alone(tokens, target)
        report.numbers(f"{what}: output", result, right[place], 1e-9)
        own = mine.grad / exercise.DATA
        report.numbers(f"{what}: gradients of tokens", own, tokens.grad[place], 1e-9)
        report.numbers(f"{what}: gradients of gate", gradients(gate), gradients(right_gate), 1e-9)
        first = place * len(experts)
        for number, expert in enumerate(experts, first):
            whole = right_experts[number]
            own = torch.cat([expert.up.grad, expert.down.grad.T], 1)
            parts = torch.cat([whole.up.grad, whole.down.grad.T], 1).chunk(exercise.TENSOR)
            report.numbers(f"{what}: gradients of expert {number}", own, parts[at], 1e-9)
        report.numbers(f"{what}: norm", norm, right_norm, 1e-9)


def check_21_2(exercise, rank, world_size, report):
    """As in 11.4, the result comes first: as long as it's wrong, a learner sees only that."""
    right = exercise.train_whole()
    layouts = {"tensor": (2, 1, 2), "context": (1, 4, 1), "data and context": (2, 2, 1)}
    off = {what: gap(exercise.train(sizes), right) for what, sizes in layouts.items()}
    off = {"result": max(off.values()), **off}
    if rank == 0:
        report.who = ""
        for what, far in off.items():
            report.at_most(f"{what}: losses differ from one process's by", far, 1e-9)
    report.numbers("losses of 4 x 1 x 1:", exercise.train((4, 1, 1)), right, 1e-9)
