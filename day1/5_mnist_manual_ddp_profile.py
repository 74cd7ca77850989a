"""Lesson 5: where does the time go? The profiler knows.

Builds on: 4_mnist_manual_ddp.py
New here:  profile, record_function, trace
Run:       python day1/5_mnist_manual_ddp_profile.py [processes]
Look for:  => traces in ./log_ddp: 4; communication hidden by computing: 0%
Try next:  --batch-size 8 and --batch-size 512: what becomes of the share of communication?
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler
from torch.utils.data import DistributedSampler


def choose_device(local_rank, local_world_size):
    """Return this rank's device and the backend that connects such devices."""
    accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not accelerator or accelerator.type == "mps":  # Apple's has no collectives
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count()
    device = torch.device(accelerator.type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    shared = local_world_size > count  # then through gloo: NCCL refuses two ranks on one GPU
    return device, "gloo" if shared else dist.get_default_backend_for_device(device)


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


def batches(images, labels, sampler, batch_size, max_steps):
    """Yield images and labels batch by batch, in the sampler's order."""
    order = torch.tensor(list(sampler), device=images.device)
    for indices in order.split(batch_size)[:max_steps]:
        with record_function("data"):
            batch = images.index_select(0, indices), labels.index_select(0, indices)
        yield batch


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


def average_gradients(model, world_size):
    """Replace each gradient by its mean over the ranks. They all must call this."""
    gradients = [parameter.grad for parameter in model.parameters()]
    # All of them in one message: every message costs time, however short it is.
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    nn.utils.vector_to_parameters(flat / world_size, gradients)  # the mean, not the sum


def time_shares(trace):
    """Return the shares of the time, from 0 to 1, that a trace file shows for each kind of work."""
    try:
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    except json.JSONDecodeError:
        raise RuntimeError(f"{trace} is not whole. Is the disk full?") from None
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    work = "kernel" if any(e["cat"] == "kernel" for e in events) else "cpu_op"  # GPU or CPU
    # One flag per microsecond and kind: two kinds overlap where both flags are set.
    data, compute, communication = torch.zeros(3, int(end - begin) + 1, dtype=torch.bool)
    for e in events:
        busy = slice(max(0, int(e["ts"] - begin)), max(0, int(e["ts"] + e["dur"] - begin)))
        data[busy] |= e["name"] == "data"
        communication[busy] |= e["name"].startswith(("gloo:", "ncclDevKernel"))
        compute[busy] |= e["cat"] == work and not e["name"].startswith(("c10d:", "gloo:", "nccl"))
    shares = {"data": data, "compute": compute & ~data, "communication": communication}
    shares |= {"overlap": communication & compute, "idle": ~(data | compute | communication)}
    return {kind: flags.float().mean().item() for kind, flags in shares.items()}


def report(folder):
    """Print where the time of every rank went, and how else to look at the traces."""
    table = [None] * dist.get_world_size()
    newest = max(Path(folder).glob(f"rank{dist.get_rank()}.*"))
    dist.all_gather_object(table, time_shares(newest))
    if dist.get_rank() == 0:
        print("rank", *(f"{kind:>14}" for kind in table[0]))
        for rank, shares in enumerate(table):
            print(f"{rank:4}", *(f"{share:14.1%}" for share in shares.values()))
        hidden, total = (sum(row[kind] for row in table) for kind in ("overlap", "communication"))
        share = f"{hidden / max(total, 1e-9):.0%}"
        print(f"See: python scripts/view_traces.py {folder} or tensorboard --logdir={folder}")
        print(f"=> traces in {folder}: {len(table)}; communication hidden by computing: {share}")


def main(device, data, args):
    """Run on every rank: train a few steps, record them, say where the time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides what the profiler says of itself
    images, labels = data[0].to(device), data[1].to(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # The ranks shuffle alike, then each takes every world_size-th image.
    sampler = DistributedSampler(images, world_size, rank, seed=args.seed)
    steps = batches(images, labels, sampler, args.batch_size, args.max_steps + 5)
    # Five more, because the first steps allocate memory and connect the ranks: not recorded.
    plan = schedule(wait=0, warmup=5, active=args.max_steps, repeat=1)
    writer = tensorboard_trace_handler("./log_ddp", worker_name=f"rank{rank}")
    with profile(schedule=plan, on_trace_ready=writer, acc_events=True) as profiler:
        for x, y in steps:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            average_gradients(model, world_size)
            optimizer.step()
            profiler.step()  # one step ends here
    report("./log_ddp")


def start(local_rank, *arguments):
    """Be one rank: join the process group, run main, leave the group."""
    if launcher := mp.parent_process():  # end with it, however it ends
        threading.Thread(target=lambda: launcher.join() or os._exit(1), daemon=True).start()
    os.environ.setdefault("RANK", str(local_rank))
    device, backend = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    gloo, wait = backend == "gloo", timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    dist.init_process_group(backend, timeout=wait, device_id=None if gloo else device)
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, device: {device.type}, backend: {backend}")
    main(device, *arguments)
    dist.barrier()  # leave together; a rank that fails never gets here and ends the job
    dist.destroy_process_group()


def launch(processes, *arguments):
    """Start the ranks on this machine, with the variables that torchrun or Slurm would set."""
    if "RANK" in os.environ:  # torchrun or Slurm has started this process as one of the ranks
        return start(int(os.environ["LOCAL_RANK"]), *arguments)
    # The ranks find each other through a small server here. Port 0: the system picks a free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 starts no server of its own
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    # Share the cores out: ranks that each want all of them slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every rank, with no traceback
    if sys.platform == "linux":  # import torch once, not once per rank; not safe on a Mac
        mp.set_forkserver_preload(["torch", "torch._dynamo"])  # which every optimizer wants
    mp.start_processes(start, args=arguments, nprocs=processes, start_method="forkserver")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processes", nargs="?", type=int, default=4, help="how many (4)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process (64)")
    parser.add_argument("--lr", type=float, default=0.015, help="learning rate (0.015)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, default=20, help="steps to record (20)")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


if __name__ == "__main__":
    args = parse_args()
    launch(args.processes, load_mnist(args.data_dir), args)  # the ranks share the data's memory
