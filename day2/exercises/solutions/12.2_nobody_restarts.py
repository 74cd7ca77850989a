"""Solution 12.2: a rank is killed, and nobody restarts: the others finish its step.

Lesson:  12
Kind:    fill in, 40 minutes
Task:    Four members train. One is killed, later a new one joins, and no other process
         starts again. Complete Job.gradient (TODO 1), agree (TODO 2) and train
         (TODO 3): the losses must be those of one process, in every step. For
         interest, the run shows who heard of the death, when, and in which words.
Run:     python day2/exercises/solutions/12.2_nobody_restarts.py
Check:   python scripts/check.py 12.2 --solution
"""

import multiprocessing
import os
import re
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS = 40
BATCH = 62  # points in a step, on any number of members
KILLED, LAST_STEP = 2, 15  # this member dies in this step
NEW, OPEN_STEP = 4, 25  # this one joins before this step
TIMEOUT = timedelta(seconds=3)  # of a message: whom nobody tells waits so long


class Job:
    """What a member trains: a model, its momentum, and how far it has come."""

    def __init__(self):
        torch.manual_seed(0)
        layers = nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)
        self.model = nn.Sequential(*layers).double()
        self.momentum = torch.zeros_like(parameters_to_vector(self.model.parameters()))
        self.losses = torch.zeros(STEPS).double()
        self.step = 0

    def gradient(self, rank, size):
        """Return the loss of a part of the batch, and the gradient: one float64 vector.

        The vectors of all members, added up, are those of the mean over the batch.
        """
        x, y = make_batch(self.step)
        own = torch.arange(BATCH).tensor_split(size)[rank]
        # Parts may differ in size, so each point counts the same, and no part does.
        loss = F.mse_loss(self.model(x[own]), y[own], reduction="sum") / y.numel()
        gradients = torch.autograd.grad(loss, [*self.model.parameters()])
        return torch.cat([loss.detach().view(1), *(x.flatten() for x in gradients)])

    def update(self, total):
        """Take a step with the sum of all members' vectors."""
        self.losses[self.step] = total[0]
        self.momentum = 0.9 * self.momentum + total[1:]
        weights = parameters_to_vector(self.model.parameters()).detach()
        vector_to_parameters(weights - 0.5 * self.momentum, self.model.parameters())
        self.step += 1

    def state(self):
        """Return all that the next step depends on, and the losses: float64 [n]."""
        weights = parameters_to_vector(self.model.parameters()).detach()
        step = torch.tensor([self.step]).double()
        return torch.cat([step, self.losses, self.momentum, weights])

    def load(self, state):
        """Go on from a state."""
        sizes = 1, STEPS, len(self.momentum), len(self.momentum)
        step, self.losses, self.momentum, weights = state.clone().split(sizes)
        self.step = round(step.item())
        vector_to_parameters(weights, self.model.parameters())


def agree(crew, job):
    """Bring all members of a new crew to the state of one that has come furthest.

    A member may be new. Or it got its sum in a step in which others got an error.
    """
    steps = torch.zeros(crew.size)
    steps[crew.rank] = job.step
    source = int(crew.add_up(steps).argmax())
    state = job.state()
    job.load(crew.add_up(state if crew.rank == source else torch.zeros_like(state)))


def train(crew, job):
    """Train to the end, although a member dies and a new one comes."""
    while job.step < STEPS:
        open_now = job.step == OPEN_STEP and NEW not in crew.names
        if open_now:
            crew.let_in()
            agree(crew, job)
        vector = job.gradient(crew.rank, crew.size)
        if crew.name == KILLED and job.step == LAST_STEP:
            crew.die()
        try:
            total = crew.add_up(vector)
        except RuntimeError as error:
            crew.heard(error)
            # The state is that before this step: nobody has updated, or who has will
            # hand it over. The vector was for the old crew, so it is computed again.
            crew.form(crew.size - 1)
            agree(crew, job)
            continue
        job.update(total)


# ---- Shared helpers, identical in every exercise


def make_batch(step):
    """Return the points of a step: x and y, float64 [BATCH, 8]."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 8, generator=generator).double()
    return x, x.roll(1, 1).sin()


class Crew:
    """Those who train now. Names stay; rank and size are new in every crew."""

    def __init__(self, store, name, number):
        self.store, self.name, self.number = store, name, number
        self.past = []  # the names of each crew
        self.told = None  # how long after the death it heard of it, and what

    def form(self, expected):
        """Leave the old crew, if any, and meet the next: so many are expected."""
        self.group = None  # this closes its connections: who still waits gets an error
        self.number += 1
        room = dist.PrefixStore(f"crew {self.number}", self.store)
        self.rank = room.add("members", 1) - 1
        room.set(f"name {self.rank}", str(self.name))
        if self.rank == 0:  # the first to come says when all are there
            end = time.monotonic() + 10  # seconds, if more are gone than one
            while room.add("members", 0) < expected and time.monotonic() < end:
                time.sleep(0.01)
            room.set("size", str(room.add("members", 0)))
        self.size = int(room.get("size"))
        self.names = [int(room.get(f"name {rank}")) for rank in range(self.size)]
        self.past.append(sorted(self.names))
        # What init_process_group would make, but a process can have one after another.
        self.group = dist.ProcessGroupGloo(room, self.rank, self.size, timeout=TIMEOUT)

    def add_up(self, vector):
        """Return the sum of all members' vectors. RuntimeError: one of them is gone."""
        total = vector.clone()
        self.group.allreduce([total]).wait()
        return total

    def let_in(self):
        """Form a crew with the new member, which waits at the door."""
        self.store.set("door", str(self.number))
        self.form(self.size + 1)

    def die(self):
        """End as kill -9 ends a process: without a word."""
        self.store.set("death", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def heard(self, error):
        """Note when this member heard that one is gone, and in which words."""
        seconds = time.time() - float(self.store.get("death"))
        words = re.sub(r"\[.*?\]:?\d*", "", str(error)).split(".")[0]
        self.told = seconds, " ".join(words.split())


def be_member(name, file, results):
    """Be one process that trains."""
    signal.alarm(30)  # its end, whatever happens
    store = dist.FileStore(file)
    store.set_timeout(timedelta(seconds=20))
    crew, job = Crew(store, name, 0), Job()
    if name == NEW:
        crew.number = int(store.get("door"))  # until it is opened
    if crew.number >= 0:
        crew.form(4)
        if name == NEW:
            agree(crew, job)
        train(crew, job)
        numbers = job.state().tolist(), job.losses.tolist()
        results.put((name, *numbers, crew.past, crew.told))
    store.compare_set("door", "", "-1")  # nobody trains any more
    time.sleep(0.2)  # a member that leaves early breaks the connections of the others
    os._exit(0)


def run_members():
    """Start the members. Return of each that ends well: state, losses, crews, told."""
    context = multiprocessing.get_context("fork")
    # Where members find each other. It must outlive them, so none of them keeps it.
    file = tempfile.mkstemp()[1]
    results = context.SimpleQueue()
    members = {}
    for name in (*range(4), NEW):
        if name == NEW:
            members[KILLED].join()
        arguments = name, file, results
        members[name] = context.Process(target=be_member, args=arguments)
        members[name].start()
    found = {}
    while any(member.is_alive() for member in members.values()) or not results.empty():
        if results.empty():
            time.sleep(0.01)
        else:
            name, *result = results.get()
            found[name] = result
    os.remove(file)
    return dict(sorted(found.items()))


def train_in_one_process():
    """Return the losses of one process, with the loop everybody knows."""
    model = Job().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = torch.zeros(STEPS).double()
    for step in range(STEPS):
        x, y = make_batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    return losses


def main():
    """Run four members, and show what happened to them."""
    right = train_in_one_process()
    for name, (_, losses, crews, told) in run_members().items():
        losses = torch.tensor(losses, dtype=torch.float64)
        off = (losses - right).abs().max()
        print(f"member {name}: crews {crews}, losses off by {off:.0e}")
        if told:
            print(f"  heard after {told[0]:.2f} s: {told[1]}")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
        options.append(__file__)
        torchrun(options)
