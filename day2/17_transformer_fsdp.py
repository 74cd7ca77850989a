"""Lesson 17: when the model is the limit. Each rank keeps a part of it.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  fully_shard (FSDP2), DTensor, distributed checkpoint
Run:       scripts/multinode_setup_and_run.sh day2/17_transformer_fsdp.py
Look for:  => ... ranks: parameters, gradients, ... of DDP's (limit ...), losses ...: ok
Try next:  --resume, with 2 ranks instead of 4; LAYERS = 8: what grows "inside a layer"?
"""

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

CHECKPOINT = Path("runs", Path(__file__).stem, "checkpoint")


def shard(model, device):
    """Spread a model over all ranks: each keeps a part of each parameter, a DTensor."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # of all ranks
    for layer in model.layers:
        # Before a layer computes, its parameters are gathered from all ranks. After it,
        # they are freed again. In backward the gradients are averaged, and each rank
        # keeps those of its own part.
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is left. Alone, it would gather all at once
    # It warns that a view must not be changed in place. We do not change the scores.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    # This one comes from torch's own code for checkpoints, in torch 2.9.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
    for part in [*model.layers, model]:
        if hasattr(part, "set_force_sum_reduction_for_comms"):  # torch 2.8 and newer
            # Add up, then divide: not every backend can average.
            part.set_force_sum_reduction_for_comms(True)


def save(model, optimizer):
    """Write a checkpoint. Each rank writes its own parts."""
    new = CHECKPOINT.with_suffix(".new")  # the older one stays until this is complete
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
    dist.barrier()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=new)
    if dist.get_rank() == 0:  # dcp.save returns when all ranks have written
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
        new.rename(CHECKPOINT)


def load(model, optimizer):
    """Read the checkpoint. Each rank reads its parts, however many ranks wrote it."""
    weights, states = get_state_dict(model, optimizer)  # they say which parts to read
    # Load only what you trust: the .metadata file is a pickle, which may run any code.
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=CHECKPOINT)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def train_one_epoch(model, loader, optimizer, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for text, targets in loader:
        text, targets = text.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(name, model, optimizer, train_set, epochs, device, args):
    """Train the model, sharded or in DDP, in these epochs. Return all losses."""
    world_size = dist.get_world_size()
    global_batch_size = args.batch_size * world_size
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    losses = []
    for epoch in epochs:
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = progress(loader, args.max_steps)
        epoch_losses = train_one_epoch(model, batches, optimizer, device)
        losses.append(mean_over_ranks(epoch_losses, world_size))
        pieces = min(len(epoch_losses) * global_batch_size, len(train_set))
        report_epoch(name, epoch, losses[-1], pieces, begin)
    return torch.cat(losses)


def main(device, args):
    """Run on every rank: train sharded, save, train on. --resume: load, train on."""
    device = device_for_sharding(device)
    train_set, test_set = make_text()
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    shard(model, device)
    # Made after sharding, because that replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    before = range(args.epochs)
    after = [args.epochs]  # one more epoch, after the checkpoint
    if args.resume:
        load(model, optimizer)
        losses = train("resumed", model, optimizer, train_set, after, device, args)
    else:
        losses = train("FSDP", model, optimizer, train_set, before, device, args)
        save(model, optimizer)
        more = train("FSDP", model, optimizer, train_set, after, device, args)
    held = held_in_memory(model, optimizer, train_set, device, args)
    report_guesses(model, train_set, test_set, device)
    if args.resume:
        status = compare_with_notes(losses, args)
    else:
        status = compare_with_ddp(losses, held, train_set, device, args)
        losses = torch.cat([losses, more])
        write_notes(more, args)
    if dist.get_rank() == 0:
        write_scalars(losses, args.batch_size * dist.get_world_size())
    return status


# ---- The same in every lesson that has it; explained on the page of the first one

LENGTH = 64  # characters in a piece of text
WIDTH = 64  # numbers per character inside the model
LAYERS = 4
NOTES = CHECKPOINT / "notes.json"  # written last: where it is, the rest is complete
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def compare_with_ddp(losses, held, train_set, device, args):
    """Train the same model in DDP, for as many epochs. Print the proof, on rank 0.

    losses: of the sharded model. held: the megabytes that it took per rank.
    """
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    epochs = range(args.epochs)
    expected = train("DDP", model, optimizer, train_set, epochs, device, args)
    held_ddp = held_in_memory(model, optimizer, train_set, device, args)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        share = held / held_ddp
        limit = 1 / ranks + 0.05  # a part of a parameter may end in padding
        gap = largest_gap(losses, expected, steps=8)  # later, rounding adds up
        parts = f"parameters, gradients, Adam's states {share:.2f} of DDP's"
        gaps = f"losses within {gap:.0e} (limit {ROUNDING:.0e})"
        claim = f"{ranks} ranks: {parts} (limit {limit:.2f}), {gaps}"
        return prove(claim, share <= limit and gap <= ROUNDING)


def compare_with_notes(losses, args):
    """Compare with the losses of the job that wrote the checkpoint. Print the proof."""
    expected = torch.tensor(args.losses, device=losses.device)
    gap = largest_gap(losses, expected, steps=8)  # later, rounding adds up
    if dist.get_rank() == 0:
        claim = f"{dist.get_world_size()} ranks go on where {args.ranks} stopped"
        gaps = f"losses within {gap:.0e} (limit {ROUNDING:.0e})"
        return prove(f"{claim}, {gaps}", gap <= ROUNDING)


def largest_gap(losses, expected, steps):
    """Return the largest difference of two runs in the losses of their first steps."""
    return (losses[:steps] - expected[:steps]).abs().max().item()


def write_notes(losses, args):
    """Write beside the checkpoint how it was made, and the losses of the next epoch."""
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        notes = {"ranks": ranks, "batch": ranks * args.batch_size}
        notes["losses"] = losses.tolist()
        NOTES.write_text(json.dumps(vars(args) | notes))


def held_in_memory(model, optimizer, train_set, device, args):
    """Train on one more batch, and print what this rank holds meanwhile.

    Return the megabytes that it keeps between steps.
    """
    parameters = list(model.parameters())
    inside = []

    def note(layer, inputs):
        # In a layer's turn its parameters are whole. The rank's own parts stay, too.
        inside.append(megabytes(parameters + list(model.parameters())))

    in_ddp = isinstance(model, DistributedDataParallel)
    layers = model.module.layers if in_ddp else model.layers
    hook = layers[0].register_forward_pre_hook(note)
    accelerator = torch.get_device_module(device)
    has_peak = hasattr(accelerator, "max_memory_allocated")  # a CPU has not
    if has_peak:
        accelerator.reset_peak_memory_stats()
    batch = train_set[: args.batch_size]
    train_one_epoch(model, [batch], optimizer, device)
    hook.remove()
    states = []
    for state in optimizer.state.values():
        states += state.values()
    held = megabytes(parameters)
    held_gradients = megabytes([parameter.grad for parameter in parameters])
    held_states = megabytes(states)
    if dist.get_rank() == 0:
        parts = f"parameters {held:.2f}, gradients {held_gradients:.2f}"
        name = "DDP" if in_ddp else "FSDP"
        line = f"{name}, MB a rank: {parts}, Adam's states {held_states:.2f}"
        line += f"; inside a layer parameters {inside[0]:.2f}"
        if has_peak:
            line += f", peak of all {accelerator.max_memory_allocated() / 1e6:.2f}"
        print(line)
    return held + held_gradients + held_states


def megabytes(tensors):
    """Return how much of these tensors this rank holds, padding included."""
    sizes = {}
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = part.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()  # what several share counts once
    return sum(sizes.values()) / 1e6


def device_for_sharding(device):
    """Return the device for the model. Where this torch cannot shard there, end."""
    # Before torch 2.8 the backend must average, and no error says that it did not: gloo
    # then gives the sum, NCCL with one rank may give zeros (pytorch#144045).
    sums = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    # gloo can shard on CPUs only, so ranks that share a GPU do not use it.
    gloo = dist.get_backend() == "gloo"
    if gloo and sums and hasattr(torch.cpu.Stream, "record_event"):
        return torch.device("cpu")
    if not gloo and (sums or dist.get_world_size() > 1):
        return device
    if dist.get_rank() == 0:
        version, where = torch.__version__, "CPUs" if gloo else "one GPU"
        print(f"torch {version} cannot shard on {where}: use a newer one, or GPUs")
    sys.exit(os.EX_UNAVAILABLE)  # not a fault: run_course.sh skips the lesson here


def report_guesses(model, train_set, test_set, device):
    """Print how well the next character is guessed. Every rank must call this."""
    text, _ = train_set.tensors
    shares = text.flatten().bincount() / text.numel()  # how often each character comes
    loss = torch.special.entr(shares).sum()  # the loss of one who knows nothing else
    accuracy = evaluate(model, test_set, device)
    if dist.get_rank() == 0:
        print(f"model on the {device.type}; by frequency alone: loss {loss:.4f}")
        print(f"test accuracy: {accuracy:.2%} of the next characters")


def make_text():
    """Return training set and test set: text and what follows each of its characters.

    The text is made of sums, such as "7 plus 5 is 12. ", as codes, int64 [N, LENGTH].
    """
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(10, (6000, 2), generator=generator).tolist()
    text = "".join(f"{a} plus {b} is {a + b}. " for a, b in pairs)
    codes = torch.tensor(list(text.encode()))
    pieces = codes.unfold(0, LENGTH + 1, LENGTH)  # [N, LENGTH + 1]: they overlap by 1
    dataset = TensorDataset(pieces[:, :-1], pieces[:, 1:])
    return TensorDataset(*dataset[:1280]), TensorDataset(*dataset[1280:1408])


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


def report_epoch(name, epoch, losses, pieces, begin):
    """Print an epoch's mean loss and its speed, on rank 0. begin: when it began."""
    loss = losses.mean().item()  # waits for the device: only now may we read the clock
    speed = pieces * LENGTH / (time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        print(f"{name}, epoch {epoch}: loss {loss:.4f}, {speed:,.0f} characters/s")


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the share of the next characters that the model guesses, from 0 to 1.

    Every rank must call this, because each holds only a part of the model.
    """
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    correct = 0
    count = 0
    for text, targets in DataLoader(test_set, batch_size=128):
        text, targets = text.to(device), targets.to(device)
        correct += (model(text).argmax(dim=2) == targets).sum().item()
        count += targets.numel()
    return correct / count


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


def progress(loader, max_steps=None):
    """Return the loader's first batches, with a bar if rank 0 writes to a terminal."""
    steps = min(len(loader), max_steps or len(loader))
    hidden = None if os.environ.get("RANK", "0") == "0" else True
    # disable=None hides the bar where there is no terminal.
    return tqdm(islice(loader, steps), total=steps, disable=hidden, leave=False)


class Net(nn.Module):
    """A small transformer: int64 [N, LENGTH] to scores, float32 [N, LENGTH, 128]."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options)
            self.layers.append(layer)
        self.scores = nn.Linear(WIDTH, 128)

    def forward(self, text):
        x = self.codes(text) + self.places.weight
        # No character may see those after it: they are what the model must guess.
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.scores(x)


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


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--epochs", type=positive_int, default=1, help="before the checkpoint (1)")
    add("--batch-size", type=positive_int, default=8, help="per process (8)")
    add("--lr", type=positive_float, default=0.003, help="learning rate (0.003)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, help="end an epoch after this many steps")
    add("--resume", action="store_true", help="only go on from the checkpoint")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    if args.resume:
        if not NOTES.exists():
            todo = "run the lesson without --resume first"
            parser.error(f"{CHECKPOINT} holds no checkpoint: {todo}")
        vars(args).update(json.loads(NOTES.read_text()), resume=True)  # as it was then
        ranks = int(os.environ["WORLD_SIZE"])
        if args.batch % ranks:
            batch = f"{args.batch} pieces a step"
            parser.error(f"{batch} cannot be divided evenly by {ranks} ranks")
        args.batch_size = args.batch // ranks
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
