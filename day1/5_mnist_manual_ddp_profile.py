"""Lesson 5: where does the time go? The profiler knows.

Builds on: 4_mnist_manual_ddp.py
New here:  profile, schedule, trace
Run:       python day1/5_mnist_manual_ddp_profile.py [processes]
Look for:  => traces in ./log_ddp: 4; ... hidden by computing: ... (limit 5%): ok
Try next:  --batch-size 8 and --batch-size 512: what happens to communication?
"""

import argparse
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

FOLDER = "./log_ddp"
DATA = "enumerate(DataLoader)"  # what the loader does, in a trace


def train_one_epoch(model, loader, optimizer, device, profiler):
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
        profiler.step()  # one step ends here
    return torch.stack(losses)


def train(train_set, device, args):
    """Record a few steps on all ranks. Return the model and the losses of the steps."""
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    # Five more, because the first steps allocate memory and connect the ranks.
    plan = schedule(wait=0, warmup=5, active=args.max_steps, repeat=1)
    writer = tensorboard_trace_handler(FOLDER, worker_name=f"rank{dist.get_rank()}")
    with profile(schedule=plan, on_trace_ready=writer, acc_events=True) as profiler:
        batches = progress(loader, 5 + args.max_steps)
        losses = train_one_epoch(model, batches, optimizer, device, profiler)
    return model, mean_over_ranks(losses, dist.get_world_size())


def main(device, args):
    """Run on every rank: say what averaging costs; train, say where the time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's own messages
    train_set, test_set = load_mnist(args.data_dir)
    compare_speeds(train_set, device, args)
    older = set(Path(FOLDER).glob("*"))
    model, losses = train(train_set, device, args)
    if dist.get_rank() == 0:
        write_scalars(losses, args.batch_size * dist.get_world_size())
        print(f"test accuracy: {evaluate(model, test_set, device):.2%}")
    hidden, claim = report_shares(FOLDER, older)
    if dist.get_rank() == 0:
        return prove(f"{claim} (limit 5%)", hidden <= 0.05)


# ---- The same in every lesson that has it; explained on the page of the first one


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def time_shares(trace):
    """Return the share of time, from 0 to 1, of each kind of work in a trace file."""
    try:
        events = json.loads(trace.read_text())["traceEvents"]
    except json.JSONDecodeError:
        raise RuntimeError(f"{trace} is not whole. Is the disk full?") from None
    events = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    # On a GPU we count when the GPU works, not when the CPU asks it to.
    categories = {event["cat"] for event in events}
    work = "kernel" if "kernel" in categories else "cpu_op"
    marks = {event["cat"] for event in events if event["name"].startswith(DATA)}
    on_gpu = "gpu_user_annotation" in marks
    mark = "gpu_user_annotation" if on_gpu else "user_annotation"
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    copied = sorted(event["ts"] + event["dur"] for event in copies)
    # One flag per microsecond and kind: two kinds overlap where both flags are set.
    flags = torch.zeros(3, int(end - begin) + 1, dtype=torch.bool)
    data, compute, communication = flags
    for event in events:
        name, category = event["name"], event["cat"]
        first, last = event["ts"], event["ts"] + event["dur"]
        sends = category == "kernel" and "ccl" in name.lower()  # NCCL, RCCL, oneCCL
        if category == "user_annotation" and name.startswith("gloo:"):
            # gloo sends from the CPU: a GPU's tensor only after it was copied there.
            first = next((done for done in copied if first < done < last), first)
            sends = True
        busy = slice(max(0, int(first - begin)), max(0, int(last - begin)))
        data[busy] |= category == mark and name.startswith(DATA)
        communication[busy] |= sends
        asks = name.startswith("c10d:")  # for communication
        compute[busy] |= category == work and not sends and not asks
    if work == "kernel" and not on_gpu:
        data &= ~compute  # while the GPU computes, loading on the CPU costs nothing
    else:
        compute &= ~data
    shares = {
        "data": data,
        "compute": compute,
        "communication": communication,
        "overlap": communication & compute,
        "idle": ~(data | compute | communication),
    }
    return {kind: part.float().mean().item() for kind, part in shares.items()}


def report_shares(folder, older):
    """Print where the time of every rank went. Every rank must call this.

    older: what was in the folder before. Traces of an earlier run do not count.
    Return the share of communication that computing hides, NaN if a rank of several
    has none; and the same as a text.
    """
    traces = set(Path(folder).glob(f"rank{dist.get_rank()}.*")) - older
    if not traces:
        raise RuntimeError(f"No trace was written to {folder}. Is the disk full?")
    table = gather(time_shares(traces.pop()))
    overlap = sum(shares["overlap"] for shares in table)
    communication = [shares["communication"] for shares in table]
    hidden = 0.0
    if len(table) > 1:  # a rank alone may have nothing to send
        hidden = overlap / sum(communication) if all(communication) else math.nan
    if dist.get_rank() == 0:
        print("rank", *(f"{kind:>14}" for kind in table[0]))
        for rank, shares in enumerate(table):
            print(f"{rank:4}", *(f"{share:14.1%}" for share in shares.values()))
        viewer = f"python scripts/view_traces.py {folder}"
        print(f"See: {viewer} or tensorboard --logdir={folder}")
    traces = f"traces in {folder}: {len(table)}"
    return hidden, f"{traces}; communication hidden by computing: {hidden:.0%}"


def time_steps(loader, device, args, averaging):
    """Return this rank's seconds for a step of training, with averaging or without."""
    torch.manual_seed(args.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for step, (images, labels) in enumerate(islice(loader, 5 + args.max_steps)):
        if step == 5:  # the first ones are the warm-up
            dist.barrier()
            torch.get_device_module(device).synchronize()
            begin = time.perf_counter()
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if averaging:
            average_gradients(model)
        optimizer.step()
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) / args.max_steps


def time_messages(device, args):
    """Return the seconds of an all_reduce as large as all gradients, by itself."""
    flat = nn.utils.parameters_to_vector(Net().to(device).parameters()).detach()
    dist.barrier()
    torch.get_device_module(device).synchronize()
    begin = time.perf_counter()
    for _ in range(args.max_steps):
        dist.all_reduce(flat)
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - begin) / args.max_steps


def compare_speeds(train_set, device, args):
    """Print what averaging costs, medians of five rounds. Every rank must call this."""
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    rounds = []
    for _ in range(5):
        apart = time_steps(loader, device, args, averaging=False)
        together = time_steps(loader, device, args, averaging=True)
        rounds.append([apart, together, time_messages(device, args)])
    # Of [ranks, rounds, 3] the mean over the ranks, then the median of the rounds.
    times = torch.tensor(gather(rounds)).mean(dim=0).median(dim=0).values
    apart, together, message = times.tolist()
    waiting = max(0.0, together - apart - message)
    images = args.batch_size * dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{'a step of all ranks':42}       ms  images/s")
        for name, seconds in (
            ("without averaging: no rank ever waits", apart),
            ("with averaging", together),
        ):
            print(f"{name:42} {1000 * seconds:8.1f}  {images / seconds:8,.0f}")
        print(f"{'  of it one all_reduce, by itself':42} {1000 * message:8.1f}")
        print(f"{'  of it waiting for each other, the rest':42} {1000 * waiting:8.1f}")


def average_gradients(model):
    """Replace each gradient by its mean over the ranks. Every rank must call this."""
    gradients = [parameter.grad for parameter in model.parameters()]
    # All in one long vector: every message costs time, even a short one.
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()  # the mean, not the sum
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


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


def end_with_launcher():
    """End this rank as soon as the launcher has ended, even if by kill -9."""
    mp.parent_process().join()
    os._exit(1)


def start_rank(rank, *arguments):
    """Run as this rank, a number that start_processes gives: set variables, start."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    threading.Thread(target=end_with_launcher, daemon=True).start()
    start(*arguments)


def launch(processes, *arguments):
    """Start the ranks on this machine, with the variables that torchrun would set."""
    if "RANK" in os.environ:  # torchrun has started this process, as one of the ranks
        ranks = int(os.environ["WORLD_SIZE"])
        if processes != ranks:
            problem = f"torchrun has started {ranks} processes, not {processes}"
            sys.exit(f"{problem}. Leave the number out.")
        start(*arguments)
        return
    # Reserve a free port. Rank 0 will listen there, and the others connect to it.
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))  # 0: the system chooses one
        address, port = keeper.getsockname()
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        # Divide the cores: ranks that each want all of them slow each other down.
        threads = max(1, torch.get_num_threads() // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # Ctrl-C ends every rank, with no traceback, unless the shell has it ignored.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":  # import once, not once per rank; not safe on a Mac
            mp.set_forkserver_preload(["torch", "torch._dynamo", "torchvision"])
        try:
            mp.start_processes(
                start_rank, arguments, processes, start_method="forkserver"
            )
        except mp.ProcessExitedException as error:
            sys.exit(str(error))  # a rank was killed, or has said what is wrong itself


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
    ranks = int(os.environ.get("WORLD_SIZE", 4))  # torchrun sets it
    add("processes", nargs="?", type=positive_int, default=ranks, help="how many (4)")
    add("--batch-size", type=positive_int, default=64, help="per process (64)")
    add("--lr", type=positive_float, default=0.015, help="learning rate (0.015)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, default=20, help="to record (20)")
    data = Path(__file__).parents[1] / "data"
    add("--data-dir", type=mnist_folder, default=str(data), help="where MNIST is")
    args = parser.parse_args()
    # Without all of its steps the profiler would write no trace.
    ranks = int(os.environ.get("WORLD_SIZE", args.processes))
    steps = math.ceil(60_000 / (ranks * args.batch_size))
    needed = 5 + args.max_steps
    if steps < needed:
        parts = f"{needed} steps (5 to warm up, {args.max_steps} to record)"
        found = f"with {ranks} x {args.batch_size} images a step there are {steps}"
        todo = "lower --batch-size or --max-steps"
        parser.error(f"the profiler needs {parts}; {found}: {todo}")
    return args


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes, args)
