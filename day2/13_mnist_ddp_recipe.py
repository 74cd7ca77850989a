"""Lesson 13: what a real job adds: precision, accumulation, decay, checkpoints, tests.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  autocast, no_sync, clipping, check_ranks, checkpoint, evaluation on all ranks
Run:       scripts/multinode_setup_and_run.sh day2/13_mnist_ddp_recipe.py
Look for:  => ...: losses within ... (limit ...), ... of 10,000 tested as by ...: ok
Try next:  --precision bf16; --batch-size 16 --accumulate 4; 3 ranks: all still tested?
"""

import argparse
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import MNIST


def train_one_epoch(model, loader, optimizer, scheduler, scaler, device, args):
    """Train, args.accumulate batches a step. Return the loss of every step, [steps]."""
    dtype = PRECISIONS[args.precision]
    model.train()
    losses = []
    samples = 0
    for number, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        backwards = len(losses) + 1  # the same on all ranks, even if one skips a batch
        last = backwards % args.accumulate == 0  # the last batch of a step
        # One message per step: the ranks average in its last backward only. DDP decides
        # in the forward pass whether to, so that must be inside no_sync as well.
        with nullcontext() if last else model.no_sync():
            # Weights and gradients stay fp32, what is multiplied is rounded.
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss / args.accumulate).backward()  # gradients add up
        samples += len(labels)
        if backwards % (args.accumulate * args.check_every) == 0:
            check_ranks(number, samples, images, model.named_parameters())
        if last:
            scaler.unscale_(optimizer)  # clip the gradients as they are, not scaled
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            # It leaves a step out where a number has left the range of fp16 (65,504).
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()  # once a step, not once a batch
            optimizer.zero_grad()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses).view(-1, args.accumulate).mean(dim=1)


def train(train_set, test_set, lr, device, args):
    """Train a new model. Return the losses of all steps, and the counts of the test."""
    world_size = dist.get_world_size()
    global_batch_size = args.batch_size * args.accumulate * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    # Whole batches and whole steps only: then all images count the same.
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    steps = min(len(loader) // args.accumulate, args.max_steps)
    scheduler = warm_up_and_decay(optimizer, args.epochs * steps, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = islice(loader, steps * args.accumulate)
        epoch_losses = train_one_epoch(
            ddp_model, batches, optimizer, scheduler, scaler, device, args
        )
        dist.all_reduce(epoch_losses)  # the sum over the ranks, in place
        losses.append(epoch_losses / world_size)
        loss = losses[-1].mean().item()  # waits for the device: only now read the clock
        speed = steps * global_batch_size / (time.perf_counter() - begin)
        correct, tested = evaluate_together(model, test_set, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")
            file = save_checkpoint(epoch, model, optimizer, scheduler, scaler)
            print(f"test accuracy: {correct / tested:.2%}, saved: {file}")
    return torch.cat(losses), correct, tested


def warm_up_and_decay(optimizer, steps, args):
    """Return the scheduler. At first a large rate can diverge: begin with a tenth."""
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=args.warm_up)
    decay = CosineAnnealingLR(optimizer, T_max=steps)  # at the end 0
    return ChainedScheduler([warm_up, decay])  # the product of both


@torch.inference_mode()
def evaluate_together(model, test_set, device):
    """Return two numbers: of correct answers, of images. Every rank must call this."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    # DistributedSampler would take some images twice, to give all ranks equally many.
    sampler = range(dist.get_rank(), len(test_set), dist.get_world_size())
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in DataLoader(test_set, batch_size=1000, sampler=sampler):
        images, labels = images.to(device), labels.to(device)
        counts[0] += (model(images).argmax(dim=1) == labels).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)  # counts, not shares: the parts may differ in size
    return counts.tolist()


def main(device, args):
    """Run on every rank: train, then compare with one process that trains plainly."""
    make_repeatable()  # only because we compare runs
    train_set, test_set = load_mnist()
    if args.precision == "auto":
        args.precision = choose_precision(device)
    factor = args.accumulate * dist.get_world_size()
    lr = args.lr * factor  # the linear scaling rule: so much larger is the global batch
    if dist.get_rank() == 0:
        sizes = f"{args.batch_size} x {args.accumulate} x {dist.get_world_size()}"
        print(f"{args.precision}, global batch {sizes}, highest learning rate {lr:g}")
    losses, correct, tested = train(train_set, test_set, lr, device, args)
    if dist.get_rank() == 0:
        write_scalars(losses, args.batch_size * factor)
        gap = gap_to_plain_training(losses, train_set, lr, device, args)
        limit = ROUNDING[args.precision]
        gaps = f"losses within {gap:.0e} of one process (limit {limit:.0e})"
        same = test_checkpoint(correct / tested, test_set, device, args)
        how = "as" if same else "DIFFERENTLY than"
        tests = f"{tested:,} of {len(test_set):,} tested {how} by one process"
        holds = gap <= limit and tested == len(test_set) and same
        return prove(f"{args.precision}: {gaps}, {tests}", holds)


# ---- Shared helpers, identical in every lesson

DATA = Path(__file__).parents[1] / "data"
FOLDER = f"runs/{Path(__file__).stem}"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}  # changes losses by less


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def check_ranks(number, samples, batch, named):
    """Stop all ranks with one sentence if one differs. Every rank must call this.

    number, samples: of the batch in the rank's loop; how many samples it has used
    batch: the rank's own samples; no two ranks may have the same
    named: [(name, tensor), ...], what must be the same on all ranks to the last bit
    """
    own = {"another batch number": number, "another number of samples": samples}
    own["the same batch"] = fingerprint(batch)
    own |= {f"another {name}": fingerprint(tensor) for name, tensor in named}
    numbers = [torch.as_tensor(x, device=batch.device) for x in own.values()]
    numbers = torch.stack(numbers)
    all_ranks = [torch.zeros_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, numbers)  # one small message
    for what, values in zip(own, torch.stack(all_ranks).T.tolist()):
        most = max(values, key=values.count)  # what most ranks have
        odd = [rank for rank, value in enumerate(values) if value != most]
        if what == "the same batch":  # only here it is wrong to be alike
            odd = [rank for rank, value in enumerate(values) if values.count(value) > 1]
        if odd:  # on every rank, because all have the same lists
            stop(f"After batch {number}: {what} on ranks {odd}.")


def stop(sentence):
    """End this rank, after rank 0 has said why. Every rank must call this."""
    if dist.get_rank() == 0:
        print(sentence, file=sys.stderr)
    dist.barrier()  # the first rank that ends may end the others
    sys.exit(1)


def fingerprint(tensor):
    """Return a whole number, hardly ever the same for other values or another order."""
    # Whole numbers add up exactly; a sum of floats depends on who adds, and how.
    bits = tensor.detach().float().flatten().view(torch.int32)
    # Each place has its factor. With 1, 2, 3, ... zeros and ones often add up alike.
    factors = torch.arange(1, 2 * len(bits) + 1, 2, device=bits.device) ** 3
    return (bits * factors).sum()  # no .item() here: the CPU would wait for the GPU


def choose_precision(device):
    """Return the name of the precision that pays on this device."""
    if device.type == "cpu":
        return "fp32"  # few CPUs can multiply in bf16; on the others it is slower
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        return "fp16"  # older GPUs only imitate bf16
    return "bf16"


def save_checkpoint(epoch, model, optimizer, scheduler, scaler):
    """Write to runs/ all that it takes to go on after this epoch. Return the file."""
    os.makedirs(FOLDER, exist_ok=True)
    file = f"checkpoint_epoch_{epoch}.pt"
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
    }
    # Renamed last, a file of that name is always complete.
    torch.save(state, f"{FOLDER}/checkpoint.tmp")
    os.replace(f"{FOLDER}/checkpoint.tmp", f"{FOLDER}/{file}")
    return file


def gap_to_plain_training(losses, train_set, lr, device, args):
    """Train on this process alone, in fp32, nothing accumulated. Rank 0 calls this.

    Return the largest difference of the losses of the first 10 steps. Not more: once
    rounding has switched one ReLU, the difference grows with each step.
    """
    batch_size = args.batch_size * args.accumulate * dist.get_world_size()
    steps = min(10, len(losses) // args.epochs)
    print(f"now one process alone: {steps} batches of {batch_size} images in fp32")
    torch.manual_seed(args.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = warm_up_and_decay(optimizer, len(losses), args)
    # DistributedSampler makes the same list, and all ranks together take its next part.
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(train_set), generator=generator)
    gaps = []
    for loss, indices in zip(losses[:steps], order.split(batch_size)):
        images, labels = train_set[indices]
        optimizer.zero_grad()
        expected = F.cross_entropy(model(images.to(device)), labels.to(device))
        expected.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        gaps.append((loss - expected).abs())
    return torch.stack(gaps).max().item()


def test_checkpoint(accuracy, test_set, device, args):
    """Return whether the last checkpoint has this accuracy, too. Rank 0 calls this."""
    file = f"{FOLDER}/checkpoint_epoch_{args.epochs - 1}.pt"
    state = torch.load(file, map_location=device, weights_only=True)  # runs no code
    model = Net().to(device)
    model.load_state_dict(state["model"])
    # Rounding may decide a few answers that are nearly even.
    return abs(evaluate(model, test_set, device) - accuracy) < 5e-4


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
    """A small convolutional network: uint8 [N, 28, 28] to scores, float32 [N, 10]."""

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
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    # Where each rank sees its own GPU only, the launcher says how many the node has.
    shared = local_world_size > int(os.environ.get("GPUS_ON_NODE", gpus))
    if kind in ("cpu", "mps") or (kind == "xpu" and shared):
        return torch.device("cpu"), "gloo"  # gloo carries CPU and CUDA tensors only
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


def start(args):
    """Run as one rank: join the process group, call main, leave the group."""
    # Variables tell a process who it is. LOCAL_RANK: its number on this node. The other
    # four, RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, are for init_process_group.
    local_rank = int(os.environ["LOCAL_RANK"])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects at once
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # pytorch#153960
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"ranks: {ranks}, device: {device.type}, backend: {backend}")
    status = main(device, args)
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--epochs", type=int, default=2, help="epochs (2)")
    add("--batch-size", type=int, default=32, help="per process (32)")
    add("--accumulate", type=int, default=2, help="batches per step (2)")
    add("--lr", type=float, default=0.0075, help="for one batch (0.0075)")
    add("--clip", type=float, default=1.0, help="longest gradient (1.0)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, default=60_000, help="steps of an epoch, at most")
    add("--warm-up", type=int, default=12, help="steps of it (12)")
    add("--precision", choices=["auto", *PRECISIONS], default="auto")
    add("--check-every", type=int, default=100, help="steps (100)")
    args = parser.parse_args()
    if min(args.epochs, args.max_steps, args.warm_up, args.check_every) < 1:
        parser.error("epochs and numbers of steps must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    images = args.batch_size * args.accumulate * int(os.environ["WORLD_SIZE"])
    if not 0 < images <= 60_000:
        parser.error(f"a step would take {images:,} of 60,000 images")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
