"""Exercise 12.1: a snapshot that holds all of a job.

Lesson:  12
Kind:    fill in, 20 minutes
Task:    Complete state_dict() and load_state_dict(). A job that was stopped after any
         step and resumes from its snapshot must end like a job that never stopped. The
         run stops after 5 steps and shows rank 0: the check tries more.
Run:     python day2/exercises/12.1_as_if_nothing_happened.py
Check:   python scripts/check.py 12.1
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR


class Job:
    """A model in training: 6 steps per epoch, each with a batch of 4 points."""

    def __init__(self):
        torch.manual_seed(0)  # the same first weights on every rank
        self.model = DistributedDataParallel(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = StepLR(self.optimizer, step_size=4, gamma=0.5)
        self.noise = torch.Generator().manual_seed(dist.get_rank())
        self.step = 0  # of all epochs

    def state_dict(self):
        """Return this rank's snapshot."""
        # TODO 1: what else does the next step depend on?
        return {"model": self.model.module.state_dict()}

    def load_state_dict(self, state):
        """Bring a new job to where the snapshot was made."""
        # TODO 2: bring all of it back. A generator has get_state() and set_state().
        self.model.module.load_state_dict(state["model"])

    def train(self, steps):
        """Take this many steps. Return the numbers of the points that they used."""
        used = []
        for _ in range(steps):
            epoch, place = divmod(self.step, 6)
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(24, generator=generator)
            batch = order[place * 4 : place * 4 + 4]
            x = batch.unsqueeze(1) / 24
            noise = torch.randn(4, 1, generator=self.noise) / 10
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x + noise), 2 * x).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            used += batch.tolist()
        return used


def main():
    """Run on every rank: 12 steps without a stop, and with one after 5 steps."""
    straight = Job()
    straight.train(12)
    first = Job()
    used = first.train(5)
    second = Job()
    second.load_state_dict(first.state_dict())
    used += second.train(7)
    if dist.get_rank() == 0:
        weights = [job.model.module.weight.item() for job in (straight, second)]
        print(f"weight without a stop {weights[0]:.6f}, with a stop {weights[1]:.6f}")
        print(f"points of epoch 0 that were used: {len(set(used[:24]))} of 24")


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
        options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        options.append(__file__)
        torchrun(options)
