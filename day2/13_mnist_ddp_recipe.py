"""Lesson 13: what a real job adds: precision, accumulation, decay, checkpoints, evaluation.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  mixed precision, gradient accumulation, evaluation on all ranks
Run:       scripts/multinode_setup_and_run.sh day2/13_mnist_ddp_recipe.py
Look for:  => fp32: losses within 2e-07 of one process; 10,000 of 10,000 tested, loss within 4e-09
Try next:  --precision bf16; --batch-size 16 --accumulate 4; --compile; 3 ranks: all still counted?
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
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
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not accelerator or accelerator.type == "mps":  # Apple's has no collectives
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    # Slurm may show each task one GPU only: then the node has more than this rank can see.
    count = max(count, int(os.environ.get("SLURM_GPUS_ON_NODE", 0)))
    shared = local_world_size > count  # then through gloo: NCCL refuses two ranks on one GPU
    return device, "gloo" if shared else dist.get_default_backend_for_device(device)


def choose_precision(device):
    """Return the name of the precision that pays on this device."""
    if device.type == "cpu":
        return "fp32"  # few CPUs can multiply in bf16; on the others it is slower
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16"  # older GPUs
    return "bf16"


def load_mnist(data_dir):
    """Return images, uint8 [N, 28, 28], and labels, int64 [N]: of training, then of testing."""
    from torchvision.datasets import MNIST, utils  # here, because the ranks need not wait for it

    # Unpacked for this process alone: whoever shares the files may read one half written.
    with tempfile.TemporaryDirectory() as folder:
        (raw := Path(folder, "MNIST", "raw")).mkdir(parents=True)
        for name, md5 in MNIST.resources:
            if not utils.check_integrity(archive := data_dir / "MNIST" / "raw" / name, md5):
                sys.exit(f"{archive} is missing or damaged. Restore it: git checkout data/MNIST")
            utils.extract_archive(archive, raw)
        parts = MNIST(folder, train=True), MNIST(folder, train=False)
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def load_folder(folder):
    """Return the data sets of training and testing: pictures in train/CLASS and test/CLASS."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, Grayscale, PILToTensor, Resize

    to_tensor = Compose([Grayscale(), Resize((28, 28)), PILToTensor()])  # what Net takes
    try:
        data = [ImageFolder(folder / part, to_tensor) for part in ("train", "test")]
        # Each part numbers its classes by itself: with one missing, all after it would be wrong.
        if data[0].classes != data[1].classes or len(data[0].classes) > 10:
            raise ValueError(f"train and test in {folder} must have the same classes, at most 10")
    except (OSError, ValueError) as error:
        sys.exit(str(error) if os.environ["LOCAL_RANK"] == "0" else 2)
    return data


def make_loader(data, sampler, batch_size, args):
    """Return a loader of batches in the sampler's order. args.workers processes read ahead."""
    # Persistent: else each epoch would start new ones.
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options["pin_memory"] = torch.cuda.is_available()
    return DataLoader(data, batch_size, sampler=sampler, **options)


def batches(loader, device, count=None):
    """Yield the loader's images and labels batch by batch; no more than count batches."""
    count = min(count or len(loader), len(loader))
    hidden = os.environ.get("RANK", "0") != "0" or None  # None: shown on a terminal only
    for images, labels in tqdm(islice(loader, count), total=count, disable=hidden, leave=False):
        images = images.view(-1, 28, 28)  # pictures from files come as [N, 1, 28, 28]
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class Net(nn.Module):
    """A small convolutional network: images, uint8 [N, 28, 28], to scores, float32 [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = (images[:, None] / 255 - 0.1307) / 0.3081  # to mean 0 and standard deviation 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def train_one_epoch(model, optimizer, scheduler, scaler, batches, args):
    """Train on each batch once, args.accumulate a step. Return [2, steps]: loss summed; images."""
    history, dtype = [], PRECISIONS[args.precision]
    model.train()
    while group := list(islice(batches, args.accumulate)):
        optimizer.zero_grad()
        # The mean over the group: its images are counted, because an epoch's last group is smaller.
        count, loss_sum = sum(len(labels) for _, labels in group), 0
        for i, (images, labels) in enumerate(group):
            # The ranks average in the last backward only: one message a step. It is in the forward
            # pass that DDP looks whether to, so that must be inside as well.
            with model.no_sync() if i + 1 < len(group) else nullcontext():
                # Weights and gradients stay fp32; what is multiplied is rounded. Forward only:
                # backward computes in the types that forward has used.
                with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
                    loss = F.cross_entropy(model(images), labels, reduction="sum")
                scaler.scale(loss / count).backward()
            loss_sum += loss.detach()
        # fp16 ends at 65,504. If a gradient is not finite, the scaler leaves the step out and
        # halves its scale. All ranks do so, for they have the same gradients: averaged ones.
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # a step that was left out is none for the learning rate
            scheduler.step()
        # No .item() here: the CPU would wait for the GPU in every step.
        history.append(torch.stack([loss_sum, loss_sum.new_tensor(count)]))
    return torch.stack(history, dim=1)


def evaluate(net, batches):
    """Return sums over the batches, [3]: loss, right ones, images."""
    sums = torch.zeros(3, device=net.fc1.weight.device)  # a rank may have no batch at all
    net.eval()  # no dropout; BatchNorm takes the averages that it has kept
    with torch.no_grad():
        for images, labels in batches:
            scores = net(images)
            sums[0] += F.cross_entropy(scores, labels, reduction="sum")
            sums[1] += (scores.argmax(1) == labels).sum()
            sums[2] += len(labels)
    return sums


def write_scalars(history):
    """Write the loss over the images seen to runs/, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, (loss, size) in zip(history[1].cumsum(0).int().tolist(), history.T.tolist()):
            writer.add_scalar("loss/train", loss / size, step)


def save(path, epoch, *parts):
    """Write a checkpoint: the states of model, optimizer, scheduler and scaler."""
    names = ("model", "optimizer", "scheduler", "scaler")
    state = {"epoch": epoch} | {name: part.state_dict() for name, part in zip(names, parts)}
    temporary = path.with_suffix(f".{os.getpid()}")
    torch.save(state, temporary)
    temporary.replace(path)  # at once: nobody ever sees half a file under this name


def prepare(steps, device, args):
    """Return a new model, its optimizer, scheduler and scaler, for so many steps in all."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)

    # New weights may not stand a large rate yet: raise it step by step.
    def factor(step):  # then lower it to 0, first slowly, as half a wave of the cosine does
        return min(1, (step + 1) / args.warm_up) * (1 + math.cos(math.pi * step / steps)) / 2

    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    return net, optimizer, LambdaLR(optimizer, factor), scaler


def train(data, device, args):
    """Train on all ranks. Return the history of all steps, the test's sums, the checkpoint."""
    rank, world_size, histories = dist.get_rank(), dist.get_world_size(), []
    # The ranks shuffle alike, then each takes every world_size-th image. They must take as many
    # steps: where the images do not go round, some come twice.
    sampler = DistributedSampler(data[0], seed=args.seed)
    loader = make_loader(data[0], sampler, args.batch_size, args)
    # In a test that would count some twice. Here each image comes once; the parts may differ.
    test_loader = make_loader(data[1], range(rank, len(data[1]), world_size), 1000, args)
    steps = math.ceil(len(loader) / args.accumulate)
    steps = min(steps, args.max_steps or steps)
    net, *tools = prepare(args.epochs * steps, device, args)
    # net keeps its names. Those of the wrapped one begin with "module." or "_orig_mod."
    model = DistributedDataParallel(torch.compile(net) if args.compile else net)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        mine = batches(loader, device, steps * args.accumulate)
        histories.append(train_one_epoch(model, *tools, mine, args))
        dist.all_reduce(histories[-1])  # losses and images of all ranks, step by step
        # Reading the sums waits for the device. Only then is it fair to read the clock.
        loss, count = histories[-1].sum(1).tolist()
        speed = count / (time.perf_counter() - begin)
        # net, not model: DDP may want all ranks in every batch, and some have fewer.
        sums = evaluate(net, batches(test_loader, device))
        dist.all_reduce(sums)  # sums, not shares: the parts may differ in size
        path = Path("runs", Path(__file__).stem, f"checkpoint_epoch_{epoch}.pt")
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, epoch, net, *tools)
            right = f"{sums[1] / sums[2]:.2%} of the test images right"
            print(f"epoch {epoch}: loss {loss / count:.4f}, {speed:,.0f} images/s, {right}")
    return torch.cat(histories, dim=1), sums, path


def main(device, data, args):
    """Run on every rank: train, then compare with one process alone, fp32, nothing accumulated."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    patient = dist.new_group(timeout=timedelta(days=1))
    nodes = torch.tensor(int(os.environ["LOCAL_RANK"] == "0"), device=device)
    dist.all_reduce(nodes)
    if args.precision == "auto":
        args.precision = choose_precision(device)
    batch = args.batch_size * args.accumulate * world_size
    if rank == 0:
        print(f"training on {world_size} processes, {nodes} nodes")
        terms = f"{args.batch_size} x {args.accumulate} x {world_size}"
        print(f"{args.precision}, global batch {terms} = {batch} images")
    history, sums, path = train(data, device, args)
    if rank == 0:
        write_scalars(history)
        steps = min(10, history.shape[1] // args.epochs)  # later, the roundings' differences grow
        print(f"now one process alone: {steps} batches of {batch} images in fp32, {path.name}")
        plain = argparse.Namespace(**vars(args) | {"accumulate": 1, "precision": "fp32"})
        net, *tools = prepare(history.shape[1], device, plain)
        sampler = DistributedSampler(data[0], 1, 0, seed=args.seed)
        loader = make_loader(data[0], sampler, batch, args)
        expected = train_one_epoch(net, *tools, batches(loader, device, steps), plain)
        gap = (history[0, :steps] / history[1, :steps] - expected[0] / expected[1]).abs().max()
        # The test once more: by one process, of the model as the file has it.
        net.load_state_dict(torch.load(path, device, weights_only=True)["model"])
        whole = make_loader(data[1], range(len(data[1])), 1000, args)
        alone = evaluate(net, batches(whole, device))
        difference = (sums[0] / sums[2] - alone[0] / alone[2]).abs()
        tested = f"{sums[2]:,.0f} of {len(data[1]):,} tested, loss within {difference:.0e}"
        print(f"=> {args.precision}: losses within {gap:.0e} of one process; {tested}")
    dist.barrier(patient)  # here the others wait while rank 0 works alone


def start(*arguments):
    """Be one rank, as the variables say: join the process group, run main, leave the group."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), os.environ.get("LOCAL_WORLD_SIZE")
    device, backend = choose_device(local_rank, int(local_world_size or 1))
    gloo, wait = backend == "gloo", timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group(backend, timeout=wait, device_id=None if gloo else device)
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    main(device, *arguments)
    dist.barrier()  # leave together; a rank that fails never gets here and ends the job
    dist.destroy_process_group()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="times through the data (2)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process (32)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step (2)")
    parser.add_argument("--lr", type=float, default=0.06, help="the highest learning rate (0.06)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, help="end an epoch after this many steps")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--warm-up", type=int, default=12, help="steps of it (12)")
    parser.add_argument("--precision", choices=["auto", *PRECISIONS], default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--image-folder", type=Path, help="train and test on its pictures")
    parser.add_argument("--workers", type=int, default=0, help="processes that read, a rank (0)")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name not in "seed workers compile":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    if args.workers < 0:
        parser.error(f"workers must not be negative, but is {args.workers}")
    if args.compile and not shutil.which(os.environ.get("CXX", "c++")):
        parser.error("compile needs a C++ compiler, such as g++")
    return args


if __name__ == "__main__":
    args = parse_args()
    if args.image_folder:
        data = load_folder(args.image_folder)
    else:
        images, labels, *test = load_mnist(args.data_dir)
        data = [TensorDataset(images, labels), TensorDataset(*test)]
    start(data, args)
