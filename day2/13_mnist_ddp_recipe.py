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
from tqdm import tqdm


def train_one_epoch(model, loader, optimizer, scheduler, scaler, device, args):
    """Train, args.accumulate batches a step. Return the loss of every step, [steps]."""
    dtype = PRECISIONS[args.precision]
    model.train()
    losses = []
    samples = 0
    for number, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        last = (len(losses) + 1) % args.accumulate == 0  # the last batch of a step
        # One message per step: the ranks average in its last backward only. DDP decides
        # in the forward pass whether to, so that must be inside no_sync as well.
        with nullcontext() if last else model.no_sync():
            # Weights and gradients stay fp32, what is multiplied is rounded.
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss / args.accumulate).backward()  # gradients add up
        samples += len(labels)
        if (len(losses) + 1) % (args.accumulate * args.check_every) == 0:
            check_ranks(number, samples, images, model.named_parameters())
        if last:
            scaler.unscale_(optimizer)  # clip the gradients as they are, not scaled
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            # If the scaler leaves a step out (fp16 ends at 65,504), the rate must wait.
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses).view(-1, args.accumulate).mean(dim=1)


def train(train_set, test_set, rank, world_size, lr, device, args):
    """Train a new model. Return the losses of all steps, and the counts of the test."""
    global_batch_size = args.batch_size * args.accumulate * world_size
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    # ddp_model shares model's parameters, and has copied those of rank 0 to all ranks.
    # In backward it averages gradients, and sends some while others are still computed.
    # No device_ids: model and images are already on the device of this rank.
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    # Whole batches and whole steps only: then all images count the same.
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    steps = min(len(loader) // args.accumulate, args.max_steps or len(loader))
    # At first a large rate can diverge: begin with a tenth, then raise it to lr.
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=args.warm_up)
    decay = CosineAnnealingLR(optimizer, T_max=args.epochs * steps)  # at the end 0
    scheduler = ChainedScheduler([warm_up, decay])  # the product of both
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = progress(loader, steps * args.accumulate)
        epoch_losses = train_one_epoch(
            ddp_model, batches, optimizer, scheduler, scaler, device, args
        )
        losses.append(mean_over_ranks(epoch_losses, world_size))
        images_seen = steps * global_batch_size
        report_epoch(epoch, losses[-1], images_seen, begin)
        correct, tested = evaluate_together(model, test_set, rank, world_size, device)
        if rank == 0:
            path = save_checkpoint(epoch, model, optimizer, scheduler, scaler)
            print(f"test accuracy: {correct / tested:.2%}, saved: {path.name}")
    return torch.cat(losses), correct, tested


@torch.inference_mode()
def evaluate_together(model, test_set, rank, world_size, device):
    """Return two numbers: of correct answers, of images. Every rank must call this."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    # DistributedSampler would take some images twice, to give all ranks equally many.
    sampler = range(rank, len(test_set), world_size)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in DataLoader(test_set, batch_size=1000, sampler=sampler):
        images, labels = images.to(device), labels.to(device)
        counts[0] += (model(images).argmax(dim=1) == labels).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)  # counts, not shares: the parts may differ in size
    return counts.tolist()


def main(device, args):
    """Run on every rank: train, then compare with one process that trains plainly."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_mnist(args.data_dir)
    if args.precision == "auto":
        args.precision = choose_precision(device)
    factor = args.accumulate * world_size
    lr = args.lr * factor  # the linear scaling rule: so much larger is the global batch
    report_setting(lr, args)
    results = train(train_set, test_set, rank, world_size, lr, device, args)
    losses, correct, tested = results
    if rank == 0:
        write_scalars(losses, args.batch_size * factor)
        gap = gap_to_plain_training(losses, train_set, lr, device, args)
        same = test_checkpoint(correct / tested, test_set, device, args)
        return report_proof(gap, same, tested, len(test_set), args)


# ---- The same in every lesson that has it; explained on the page of the first one

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}  # changes losses by less


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
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
    numbers = torch.tensor(list(own.values()), device=batch.device)
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
    return (bits * factors).sum().item()


def report_proof(gap, same, tested, images, args):
    """Print the proof: the losses of one process, each image tested once, as by one."""
    limit = ROUNDING[args.precision]
    losses = f"losses within {gap:.0e} of one process (limit {limit:.0e})"
    how = "as" if same else "DIFFERENTLY than"
    test = f"{tested:,} of {images:,} tested {how} by one process"
    claim = f"{args.precision}: {losses}, {test}"
    return prove(claim, gap <= limit and tested == images and same)


def choose_precision(device):
    """Return the name of the precision that pays on this device."""
    if device.type == "cpu":
        return "fp32"  # few CPUs can multiply in bf16; on the others it is slower
    emulated = {"including_emulation": False}
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(**emulated):
        return "fp16"  # older GPUs
    return "bf16"


def report_setting(lr, args):
    """Print precision, global batch and learning rate, on rank 0."""
    sizes = f"{args.batch_size} x {args.accumulate} x {dist.get_world_size()}"
    if dist.get_rank() == 0:
        print(f"{args.precision}, global batch {sizes}, highest learning rate {lr:g}")


def checkpoint_file(epoch):
    """Return the path of the checkpoint that is written after an epoch."""
    return Path("runs", Path(__file__).stem, f"checkpoint_epoch_{epoch}.pt")


def save_checkpoint(epoch, model, optimizer, scheduler, scaler):
    """Write to runs/ all that it takes to go on after this epoch. Return the file.

    First under another name: a file that has the right name is then always whole.
    """
    path = checkpoint_file(epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    return path


def gap_to_plain_training(losses, train_set, lr, device, args):
    """Train on this process alone: whole global batches, in fp32, nothing accumulated.

    Return the largest difference of the first 10 losses: later, training makes any
    difference in rounding grow. Only rank 0 calls this.
    """
    steps = min(10, len(losses) // args.epochs)
    batch_size = args.batch_size * args.accumulate * dist.get_world_size()
    print(f"now one process alone: {steps} batches of {batch_size} images in fp32")
    torch.manual_seed(args.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=args.warm_up)
    decay = CosineAnnealingLR(optimizer, T_max=len(losses))
    scheduler = ChainedScheduler([warm_up, decay])
    # DistributedSampler shuffles so too. A step of all ranks together takes the next
    # batch_size entries of this list.
    generator = torch.Generator().manual_seed(args.seed)
    batches = torch.randperm(len(train_set), generator=generator).split(batch_size)
    differences = []
    for loss, indices in zip(losses[:steps], batches[:steps], strict=True):
        images, labels = train_set[indices]
        optimizer.zero_grad()
        expected = F.cross_entropy(model(images.to(device)), labels.to(device))
        expected.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        differences.append((loss - expected).abs().item())
    return torch.tensor(differences).max().item()  # NaN if one of them is


def test_checkpoint(accuracy, test_set, device, args):
    """Test the last checkpoint's model on this process alone. Return if the same.

    accuracy: what all ranks found together. Only rank 0 calls this.
    """
    path = checkpoint_file(args.epochs - 1)
    state = torch.load(path, map_location=device, weights_only=True)  # runs no code
    model = Net().to(device)
    model.load_state_dict(state["model"])
    # Rounding may decide a few answers that are nearly even.
    gap = abs(evaluate(model, test_set, device) - accuracy)
    return gap < 5e-4


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


def report_epoch(epoch, losses, images, begin):
    """Print the mean loss of an epoch's steps, and images/s, on rank 0."""
    loss = losses.mean().item()  # waits for the device: only now may we read the clock
    speed = images / (time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} images/s")


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

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


def load_mnist(data_dir):
    """Return training set and test set: images, uint8 [N, 28, 28], and labels, [N]."""
    from torchvision.datasets import MNIST  # here, because importing it takes a second

    train_set, test_set = MNIST(data_dir, train=True), MNIST(data_dir, train=False)
    return [TensorDataset(part.data, part.targets) for part in (train_set, test_set)]


def progress(loader, max_steps=None):
    """Return the loader's first batches, with a bar if rank 0 writes to a terminal."""
    steps = min(len(loader), max_steps or len(loader))
    hidden = None if os.environ.get("RANK", "0") == "0" else True
    # disable=None hides the bar where there is no terminal.
    return tqdm(islice(loader, steps), total=steps, disable=hidden, leave=False)


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
        x = (x - 0.1307) / 0.3081  # mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


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


def start(*arguments):
    """Run as one rank: join the process group, call main, leave the group."""
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, backend = choose_device(local_rank, local_world_size)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    # NCCL's other way to connect hangs at random before torch 2.7.1 (pytorch#153960).
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")
    device_id = None if backend == "gloo" else device  # with it, NCCL connects at once
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    if dist.get_rank() == 0:
        setting = f"device: {device.type}, backend: {backend}"
        print(f"ranks: {dist.get_world_size()}, {setting}")
    status = main(device, *arguments)
    # The others wait here while rank 0 still works, at most as long as the timeout.
    dist.barrier()  # leave together; if a rank fails before, the job ends there
    # gloo's threads may still be freeing tensors, and need Python for that. Without a
    # pause, torch before 2.8 can hang in the next line (pytorch#154976), and Python can
    # abort while it ends.
    time.sleep(0.2)
    dist.destroy_process_group()
    sys.exit(status)  # of rank 0: whether the lesson has proved its claim


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


def mnist_folder(text):
    """Return an argument as a path, if MNIST is there, in files of the right size."""
    sizes = {"train-images-idx3": 47_040_016, "train-labels-idx1": 60_008}
    sizes |= {"t10k-images-idx3": 7_840_016, "t10k-labels-idx1": 10_008}
    for name, size in sizes.items():
        file = Path(text, "MNIST", "raw", f"{name}-ubyte")
        if not file.exists() or file.stat().st_size != size:
            todo = "Restore it: git checkout data/MNIST"
            raise argparse.ArgumentTypeError(f"{file} is missing or damaged. {todo}")
    return Path(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--epochs", type=positive_int, default=2, help="epochs (2)")
    add("--batch-size", type=positive_int, default=32, help="per process (32)")
    add("--accumulate", type=positive_int, default=2, help="batches per step (2)")
    add("--lr", type=positive_float, default=0.0075, help="for one batch (0.0075)")
    add("--clip", type=positive_float, default=1.0, help="longest gradient (1.0)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, help="end each epoch after so many steps")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    add("--warm-up", type=positive_int, default=12, help="steps of it (12)")
    add("--precision", choices=["auto", *PRECISIONS], default="auto")
    add("--check-every", type=positive_int, default=100, help="steps (100)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    images = args.batch_size * args.accumulate * int(os.environ["WORLD_SIZE"])
    if images > 60_000:
        todo = "Take a smaller --batch-size or --accumulate."
        parser.error(f"a step would take {images:,} of 60,000 images. {todo}")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
