"""Exercise 15.3: Adam's states, divided among the ranks: ZeRO-1 by hand.

Lesson:  15
Kind:    fill in, 20 minutes
Task:    Every rank holds Adam's two averages of all parameters, and all hold the same
         ones. Change ZeroOne: each rank keeps the states of its part of the parameters
         only, updates this part, and gets the other parts from the other ranks.
Run:     python day2/exercises/15.3_a_part_of_the_states.py
Check:   python scripts/check.py 15.3
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import vector_to_parameters


def pad(vector):
    """Return the vector padded with zeros, so that all parts have the same length."""
    missing = -len(vector) % dist.get_world_size()
    return F.pad(vector, (0, missing))


def flatten(tensors):
    """Return all tensors as one vector, whatever their order in memory."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def note_version(parameter):
    """After backward: note how often the gradient has been written to."""
    parameter.noted = parameter.grad._version


class ZeroOne:
    """An optimizer for a model that all ranks hold whole: ZeRO, stage 1.

    It sees all parameters as one vector. Each rank has one part of it, and all parts
    have the same length: 193 parameters on 4 ranks need 3 zeros at the end. So
    the optimizer must treat each number by itself, as Adam and SGD do. Load the model's
    weights before. Clip in step, by the norm of the mean gradient: of all its parts.
    """

    def __init__(self, model, optimizer, **options):
        self.model = model
        self.trained = [x.requires_grad for x in model.parameters()]  # False: frozen
        all_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, self.trained)
        assert all(x == self.trained for x in all_ranks), "ranks froze other layers"
        self.parameters = [x for x in model.parameters() if x.requires_grad]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(note_version)
        assert len({x.dtype for x in self.parameters}) == 1, "parameters of two dtypes"
        everything = flatten(self.parameters)
        # TODO 1: this rank's part of everything.
        self.own = everything
        self.inner = optimizer([self.own], **options)

    def step(self):
        """Take a step along the mean of all ranks' gradients. All must call this."""
        trained = [x.requires_grad for x in self.model.parameters()]
        assert trained == self.trained, "frozen or unfrozen: make a new ZeroOne"
        gradients = [x.grad for x in self.parameters]
        assert None not in gradients, "no gradient: freeze what the loss does not use"
        same = all(x.grad._version == x.noted for x in self.parameters)
        assert same, "changed after backward: clip the mean of all ranks, in step"
        gradient = flatten(gradients)
        dist.all_reduce(gradient)
        # TODO 2: the gradient of this rank's part is enough.
        self.own.grad = gradient / dist.get_world_size()
        self.inner.step()
        # TODO 3: everything, made of the parts of all ranks.
        everything = self.own
        vector_to_parameters(everything.clone(), self.parameters)


def train(steps):
    """Train on this rank's points. Return the model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = ZeroOne(model, torch.optim.Adam, lr=0.01)
    x = torch.linspace(-2, 2, 32)[dist.get_rank() :: dist.get_world_size(), None]
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(x), x.sin()).backward()
        optimizer.step()
    return model, optimizer


def states(adam):
    """Return how many numbers Adam's two averages have on this rank."""
    averages = [(s["exp_avg"], s["exp_avg_sq"]) for s in adam.state.values()]
    return sum(one.numel() + two.numel() for one, two in averages)


def main():
    """Run on every rank: train for 50 steps, and count."""
    model, optimizer = train(50)
    if dist.get_rank() == 0:
        numbers = sum(parameter.numel() for parameter in model.parameters())
        print(f"the model: {numbers} numbers; Adam's states: {states(optimizer.inner)}")


# ---- Shared helpers, identical in every exercise


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
