"""Lesson 20: the same ideas in a library that hides them, Hugging Face Accelerate.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  Accelerator, prepare, gather_for_metrics, accelerate launch
Run:       scripts/multinode_setup_and_run.sh day2/20_linear_accelerate.py
Look for:  => y = ... x + ... (limit ...), losses within ... (limit ...): ok
Try next:  accelerate launch day2/20_linear_accelerate.py; mixed_precision="bf16";
           gather in place of gather_for_metrics: how many points are tested?
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(train_set, accelerator, args):
    """Train a new model with Accelerate. Return it and the losses of all steps."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(train_set, batch_size=args.batch_size, drop_last=True)
    # The model to the device and into DDP; of the batches, each rank gets its own.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
    losses = accelerator.reduce(torch.stack(losses), reduction="mean")
    return accelerator.unwrap_model(model), losses


def train_by_hand(train_set, accelerator, args):
    """Do the same as in lesson 10, for a few epochs. Return the losses of all steps."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    device = accelerator.device
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    if world_size > 1:
        model = DistributedDataParallel(model)  # averages gradients in backward
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=False)
    loader = DataLoader(
        train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True
    )
    model.train()
    losses = []
    for _ in range(min(args.epochs, 10)):  # enough to compare
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    losses = torch.stack(losses)
    if world_size > 1:
        dist.all_reduce(losses)
    return losses / world_size


@torch.inference_mode()
def evaluate(model, test_set, accelerator):
    """Return how far off the model is at each point, float32 [N, 1], on every rank."""
    model.eval()
    loader = accelerator.prepare(DataLoader(test_set, batch_size=10))
    errors = []
    for x, y in loader:
        # Some points come twice, so that all ranks have equal batch counts. This
        # joins the errors of all ranks and drops the repeats: each point counts once.
        errors.append(accelerator.gather_for_metrics((model(x) - y).abs()))
    return torch.cat(errors)


def main(args):
    """Run on every rank: train with Accelerate, test, train without. Compare."""
    make_repeatable()  # only because we compare runs
    accelerator = make_accelerator()  # joins the process group, as start does elsewhere
    say = accelerator.on_main_process(print)  # accelerator.print: once a node instead
    say(f"ranks: {accelerator.num_processes}, device: {accelerator.device.type}")
    model, losses = train(make_points(1000, args.seed), accelerator, args)
    say(f"loss: {losses[0]:.1e} in the first step, {losses[-1]:.1e} in the last")
    errors = evaluate(model, make_points(99, args.seed + 1), accelerator)
    say(f"tested on {len(errors)} more points: off by {errors.max():.4f} at most")
    expected = train_by_hand(make_points(1000, args.seed), accelerator, args)
    status = None
    if accelerator.is_main_process:
        write_scalars(losses, args.batch_size * accelerator.num_processes)
        status = report_line(model, losses, expected, accelerator.device)
    leave(accelerator)
    return status


# ---- Shared helpers, identical in every lesson

FOLDER = f"runs/{Path(__file__).stem}"
LINE = 0.02  # how far the line may be from 0.7 and 0.3
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this
GLOBAL_BATCH = 500  # half of the points: two steps in an epoch


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


@torch.inference_mode()
def report_line(model, losses, expected, device):
    """Print the proof: the line through the model's guesses at x = -1 and x = 1."""
    ends = torch.tensor([[-1.0], [1.0]], device=device)
    left, right = model(ends).flatten().tolist()
    slope = (right - left) / 2
    height = (right + left) / 2
    far = max(abs(slope - 0.7), abs(height - 0.3))
    line = f"y = {slope:.2f} x + {height:.2f} (limit {LINE:g} from 0.7 and 0.3)"
    gap = (losses[: len(expected)] - expected).abs().max().item()
    gaps = f"losses within {gap:.0e} of those without Accelerate"
    claim = f"{line}, {gaps} (limit {ROUNDING:.0e})"
    return prove(claim, far <= LINE and gap <= ROUNDING)


def make_points(count, seed):
    """Return a data set of points on the line y = 0.7 x + 0.3: x and y, [N, 1] each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=generator) * 2 - 1
    return TensorDataset(x, 0.7 * x + 0.3)


def make_accelerator():
    """Return an Accelerator for this rank. It reads the launcher's variables itself."""
    copies = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE", "1")
    if "RANK" in os.environ:  # Kubernetes gives no LOCAL_RANK, and Accelerate needs it
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    elif copies != "1":
        sys.exit(f"mpirun has started this {copies} times: use torchrun instead")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    _, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    # Otherwise it takes the local rank for the number of the GPU. A task that sees only
    # one GPU has no other number than 0.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    # With Accelerate, ranks cannot share a GPU. If they would, all take the CPU.
    # What is not said here, it takes from variables named ACCELERATE_...
    return Accelerator(
        cpu=backend == "gloo",
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )


def leave(accelerator):
    """Leave the process group, all ranks together."""
    # Not wait_for_everyone, which takes the local rank for the number of the GPU.
    accelerator.reduce(torch.zeros(1, device=accelerator.device)).item()
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    accelerator.end_training()


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(FOLDER, purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


class Net(nn.Module):
    """Three linear layers: x, float32 [N, 1], to y, float32 [N, 1]."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(1, 1000)
        self.fc2 = nn.Linear(1000, 1000)
        self.fc3 = nn.Linear(1000, 1)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


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


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    # The same global batch on any number of ranks, so they take the same steps.
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    share = max(1, GLOBAL_BATCH // ranks)
    note = f"per process ({GLOBAL_BATCH} divided by the number of ranks)"
    add("--epochs", type=int, default=50, help="epochs (50)")
    add("--batch-size", type=int, default=share, help=note)
    add("--lr", type=float, default=0.001, help="learning rate (0.001)")
    add("--seed", type=int, default=0, help="for weights and points (0)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    most = 1000 // ranks
    if args.batch_size > most:
        points = "there are 1000 points for all ranks"
        parser.error(f"batch-size must be at most {most}: {points}")
    return args


if __name__ == "__main__":
    args = parse_args()
    sys.exit(main(args))  # of rank 0: whether the lesson has proved its claim
