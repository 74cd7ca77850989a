"""Lesson 15: the same ideas in a library that hides them, Hugging Face Accelerate.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  Accelerator, prepare, accelerate launch
Run:       scripts/multinode_setup_and_run.sh day2/15_linear_accelerate.py
Look for:  => y = ... x + ... (limit ...), losses within ... (limit ...): ok
Try next:  accelerate launch day2/15_linear_accelerate.py; mixed_precision="bf16"
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
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 500  # half of the points: two steps in an epoch


def train(train_set, accelerator, args):
    """Train a new model with Accelerate. Return it and the losses of all steps."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(train_set, batch_size=args.batch_size, drop_last=True)
    # The model to the device and into DDP; of the batches, each rank gets its own.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
    """Do the same with what the earlier lessons use. Return the losses of all steps."""
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
    losses = []
    for _ in range(args.epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return mean_over_ranks(torch.stack(losses), world_size)


def main(args):
    """Run on every rank: train with Accelerate, then without. Compare."""
    accelerator = make_accelerator()  # joins the process group, as start does elsewhere
    say = accelerator.on_main_process(print)  # accelerator.print: once a node instead
    say(f"ranks: {accelerator.num_processes}, device: {accelerator.device.type}")
    train_set = make_points(1000, args.seed)
    model, losses = train(train_set, accelerator, args)
    if accelerator.is_main_process:
        write_scalars(losses, args.batch_size * accelerator.num_processes)
    say(f"loss: {losses[0]:.1e} in the first step, {losses[-1]:.1e} in the last")
    expected = train_by_hand(train_set, accelerator, args)
    gap = largest_gap(losses, expected, steps=len(expected))
    status = None
    if accelerator.is_main_process:
        status = report_line(model, gap, accelerator.device)
    leave(accelerator)
    return status


# ---- The same in every lesson that has it; explained on the page of the first one


LINE = 0.02  # how far the numbers of the line may be from those of the points
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


@torch.inference_mode()
def report_line(model, gap, device):
    """Print the proof: the line through the model's guesses at x = -1 and x = 1."""
    ends = torch.tensor([[-1.0], [1.0]], device=device)
    left, right = model(ends).flatten().tolist()
    slope = (right - left) / 2
    height = (right + left) / 2
    far = max(abs(slope - 0.7), abs(height - 0.3))
    line = f"y = {slope:.2f} x + {height:.2f} (limit {LINE:g} from 0.7 and 0.3)"
    losses = f"losses within {gap:.0e} of those without Accelerate"
    claim = f"{line}, {losses} (limit {ROUNDING:.0e})"
    return prove(claim, far <= LINE and gap <= ROUNDING)


def largest_gap(losses, expected, steps):
    """Return the largest difference of two runs in the losses of their first steps."""
    return (losses[:steps] - expected[:steps]).abs().max().item()


def make_points(count, seed):
    """Return a data set of points on the line y = 0.7 x + 0.3: x and y, [N, 1] each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=generator) * 2 - 1
    return TensorDataset(x, 0.7 * x + 0.3)


def make_accelerator():
    """Return an Accelerator for this rank. It reads the launcher's variables itself."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    _, backend = choose_device(local_rank, local_world_size)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    # Otherwise it takes the local rank for the number of the GPU. A task that sees only
    # one GPU has no other number than 0.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    # With Accelerate, ranks cannot share a GPU. If they would, all take the CPU.
    return Accelerator(
        cpu=backend == "gloo", kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)]
    )


def leave(accelerator):
    """Leave the process group, all ranks together."""
    # Not wait_for_everyone, which takes the local rank for the number of the GPU.
    accelerator.reduce(torch.zeros(1, device=accelerator.device)).item()
    # gloo's threads may still be freeing tensors, and need Python for that. Without a
    # pause, torch before 2.8 can hang in the next line (pytorch#154976), and Python can
    # abort while it ends.
    time.sleep(0.2)
    accelerator.end_training()


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
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
    """Return this rank's device and the backend that connects such devices."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if count else "cpu"
    if kind in ("cpu", "mps"):  # there are no collectives for Apple's GPU
        return torch.device("cpu"), "gloo"
    device = torch.device(kind, local_rank % count)
    # Where Slurm shows a rank only its own GPU, the launcher says how many there are.
    # Parts of a GPU (MIG) do not count: NCCL takes two of them for the same GPU.
    if count == 1 and "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        count = int(os.environ.get("GPUS_ON_NODE", 1))
    shared = local_world_size > count
    if kind == "xpu" and (shared or not dist.is_xccl_available()):
        return torch.device("cpu"), "gloo"  # gloo cannot carry tensors of Intel's GPUs
    torch.accelerator.set_device_index(device.index)
    # We compare runs: a run must give the same numbers again, with little rounding
    # (TF32 keeps 11 of float32's 24 bits). A real job may leave out these lines.
    torch.backends.cudnn.deterministic = True  # NVIDIA and AMD
    torch.backends.mkldnn.deterministic = True  # Intel
    torch.backends.cuda.matmul.allow_tf32 = False  # True in NVIDIA's containers
    if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and newer
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False
    # NCCL refuses two ranks on one GPU, so gloo connects ranks that share one.
    backend = "gloo" if shared else dist.get_default_backend_for_device(device)
    return device, backend


def positive_int(text):
    """Return an argument as a whole number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        problem = f"must be a whole number greater than 0, not {text}"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def positive_float(text):
    """Return an argument as a number greater than 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return number


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    # The same global batch on any number of ranks, so they take the same steps.
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    share = max(1, GLOBAL_BATCH // ranks)
    note = f"per process ({GLOBAL_BATCH} divided by the number of ranks)"
    add("--epochs", type=positive_int, default=50, help="epochs (50)")
    add("--batch-size", type=positive_int, default=share, help=note)
    add("--lr", type=positive_float, default=0.001, help="learning rate (0.001)")
    add("--seed", type=int, default=0, help="for weights and points (0)")
    args = parser.parse_args()
    most = 1000 // ranks
    if args.batch_size > most:
        points = "there are 1000 points for all ranks"
        parser.error(f"batch-size must be at most {most}: {points}")
    return args


if __name__ == "__main__":
    args = parse_args()
    sys.exit(main(args))  # of rank 0: whether the lesson has proved its claim
