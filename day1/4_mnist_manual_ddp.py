"""Lesson 4: divide the images, average the gradients. This is data parallelism.

Builds on: 3_mnist_distributed.py
New here:  DistributedSampler, average_gradients
Run:       python day1/4_mnist_manual_ddp.py [processes]
Look for:  => parameters ... on all ranks, losses within ... (limit 1e-05): ok
Try next:  leave out set_epoch; or all_reduce each gradient by itself.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST


def average_gradients(model):
    """Replace each gradient by its mean over the ranks. Every rank must call this."""
    if not hasattr(model, "all_ranks"):  # only once: every message costs time
        trained = [x.requires_grad for x in model.parameters()]  # False: frozen
        model.all_ranks = gather(trained)
        assert all(x == trained for x in model.all_ranks), "ranks froze other layers"
    gradients = [x.grad for x in model.parameters() if x.requires_grad]  # not frozen
    assert None not in gradients, "no gradient: freeze what the loss does not use"
    # All in one long vector: every message costs time, even a short one.
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()  # the mean, not the sum
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def train_one_epoch(model, loader, optimizer, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(train_set, device, args):
    """Train a new model on all ranks. Return it and the losses of all steps."""
    world_size = dist.get_world_size()
    global_batch_size = args.batch_size * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    report_visits(sampler, len(train_set))
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = islice(loader, args.max_steps)  # None: all
        epoch_losses = train_one_epoch(model, batches, optimizer, device)
        dist.all_reduce(epoch_losses)  # the sum over the ranks, in place
        losses.append(epoch_losses / world_size)
        images_seen = min(len(epoch_losses) * global_batch_size, len(train_set))
        loss = losses[-1].mean().item()  # waits for the device: only now read the clock
        speed = images_seen / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")
    return model, torch.cat(losses)


def main(device, args):
    """Run on every rank, as start (below) calls it: train, evaluate, report."""
    make_repeatable()  # only because we compare runs
    train_set, test_set = load_mnist()
    model, losses = train(train_set, device, args)
    same = identical_on_all_ranks(model)  # every rank takes part: not under the if
    if dist.get_rank() == 0:
        write_scalars(losses, args.batch_size * dist.get_world_size())
        print(f"test accuracy: {evaluate(model, test_set, device):.2%}")
        gap = gap_to_one_process(losses, train_set, device, args)
        parameters = f"parameters {'identical' if same else 'DIFFERENT'} on all ranks"
        gaps = f"losses within {gap:.0e} of one process (limit {ROUNDING:.0e})"
        return prove(f"{parameters}, {gaps}", same and gap <= ROUNDING)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def identical_on_all_ranks(model):
    """Return whether all ranks hold the same parameters. Every rank must call this."""
    numbers = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return all(others == numbers for others in gather(numbers))


def report_visits(sampler, images):
    """Print how many images are visited exactly once. Every rank must call this."""
    indices = torch.tensor(gather(list(sampler)))
    visits = torch.bincount(indices.flatten(), minlength=images)
    once = (visits == 1).sum().item()
    if dist.get_rank() == 0:
        print(f"visited exactly once per epoch: {once:,} of {images:,} images")


def gap_to_one_process(losses, train_set, device, args):
    """Train again on this process alone, with the global batch size. Rank 0 calls this.

    Return the largest difference of the losses of the first 10 steps. Not more: once
    rounding has switched one ReLU, the difference grows with each step.
    """
    batch_size = args.batch_size * dist.get_world_size()
    steps = min(10, len(losses) // args.epochs)
    print(f"now one process alone: {steps} batches of {batch_size} images")
    torch.manual_seed(args.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # DistributedSampler makes the same list, and all ranks together take its next part.
    # It repeats the first entries, until there are as many for each rank.
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(train_set), generator=generator)
    order = torch.cat([order, order[: -len(order) % dist.get_world_size()]])
    gaps = []
    for loss, indices in zip(losses[:steps], order.split(batch_size)):
        images, labels = [x.index_select(0, indices) for x in train_set.tensors]
        optimizer.zero_grad()
        expected = F.cross_entropy(model(images.to(device)), labels.to(device))
        expected.backward()
        optimizer.step()
        gaps.append((loss - expected).abs())
    return torch.stack(gaps).max().item()


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the share of the test images that the model gets right, from 0 to 1."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    correct = 0
    for images, labels in DataLoader(test_set, batch_size=1000):
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(test_set)


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(FOLDER, purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


def load_mnist():
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    train_set = MNIST(DATA, train=True)
    test_set = MNIST(DATA, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


class Net(nn.Module):
    """A small convolutional network: uint8 [N, 28, 28] to logits, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = images.unsqueeze(1) / 255  # float32 [N, 1, 28, 28], from 0 to 1
        x = (x - 0.1307) / 0.3081  # mean 0, standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


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


def start(args, url=None):
    """Run as one rank: join the process group, call main, leave the group."""
    # LOCAL_RANK: which rank of this node it is. init_process_group needs to know where
    # all ranks meet: at the url or, under torchrun, where two more variables say.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, url, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def start_rank(rank, args, url):
    """Run as this rank of one node."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # they end it, with no traceback
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(start(args, f"{url}?rank={rank}&world_size={args.processes}"))


def launch(args):
    """Start the ranks on this machine, with the variables that torchrun would set."""
    copies = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE", "1")
    if copies != "1":
        sys.exit(f"mpirun has started this {copies} times: use torchrun instead")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    world_size = str(args.processes)
    os.environ.update(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    linux = sys.platform == "linux"
    loopback = "lo" if linux else "lo0"  # what ranks send stays on this machine
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    method = "fork" if linux else "spawn"
    with tempfile.TemporaryDirectory() as folder:  # no other user can open it
        given = (args, f"file://{folder}/ranks")  # a file in which they meet
        try:
            mp.start_processes(start_rank, given, args.processes, start_method=method)
        except mp.ProcessExitedException as error:
            sys.exit(str(error))  # a rank was killed, or has printed what is wrong
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for process in mp.active_children():
                process.kill()
                process.join()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("processes", nargs="?", type=int, help="how many (4)")
    add("--epochs", type=int, default=2, help="epochs (2)")
    add("--batch-size", type=int, default=64, help="per process (64)")
    add("--lr", type=float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, help="end each epoch after so many steps")
    args = parser.parse_args()
    for name, number in vars(args).items():
        least = 0 if name == "seed" else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    ranks = int(os.environ.get("WORLD_SIZE", args.processes or 4))
    if not 0 < ranks <= 1000 or args.processes not in (None, ranks):
        parser.error("processes must be 1 to 1000, or WORLD_SIZE, which torchrun sets")
    args.processes = ranks
    timeout = os.environ.get("DIST_TIMEOUT", "60")
    if not timeout.isdecimal() or not 0 < int(timeout) < 2**31:
        parser.error(f"DIST_TIMEOUT is {timeout}, not a number of seconds")
    return args


if __name__ == "__main__":
    args = parse_args()
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        sys.exit(start(args))
    else:
        launch(args)
