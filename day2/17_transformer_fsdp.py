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


def shard(model, device):
    """Spread a model over all ranks: each keeps a part of each parameter, a DTensor."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # of all ranks
    for layer in model.layers:
        # Before a layer computes, its parameters are gathered from all ranks. After it,
        # they are freed again. In backward the gradients are averaged, and each rank
        # keeps those of its own part.
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is left. Alone, it would gather all at once
    for part in [*model.layers, model]:
        if hasattr(part, "set_force_sum_reduction_for_comms"):  # torch 2.8 and newer
            # Add up, then divide: not every backend can average.
            part.set_force_sum_reduction_for_comms(True)


def save(model, optimizer):
    """Write a checkpoint, each rank its own parts. Every rank must call this."""
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
        loss = F.cross_entropy(model(text), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(name, model, optimizer, train_set, epoch, device, args):
    """Train the model, sharded or in DDP, for an epoch. Return its losses."""
    world_size = dist.get_world_size()
    # All ranks make the same shuffled list. Rank r takes entries r, r + world_size, ...
    sampler = DistributedSampler(train_set, seed=args.seed)
    sampler.set_epoch(epoch)  # without this every epoch has the same order
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    begin = time.perf_counter()
    batches = islice(loader, args.max_steps)  # None: all
    losses = train_one_epoch(model, batches, optimizer, device)
    dist.all_reduce(losses)  # each rank knows those of its own text
    losses /= world_size
    loss = losses.mean().item()  # waits for the device: only now read the clock
    seconds = time.perf_counter() - begin
    speed = len(losses) * args.batch_size * world_size * LENGTH / seconds
    if dist.get_rank() == 0:
        print(f"{name}, epoch {epoch}: loss {loss:.4f}, {speed:,.0f} characters/s")
    return losses


def main(device, args):
    """Run on every rank: train sharded, save, train on. --resume: load, train on."""
    make_repeatable()  # only because we compare runs
    device = device_for_sharding(device)
    train_set, test_set = make_text()
    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = Net().to(device)
    shard(model, device)
    # Made after sharding, because that replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ranks = dist.get_world_size()
    if args.resume:
        load(model, optimizer)
        losses = train("resumed", model, optimizer, train_set, 1, device, args)
    else:
        losses = train("FSDP", model, optimizer, train_set, 0, device, args)
        save(model, optimizer)
        more = train("FSDP", model, optimizer, train_set, 1, device, args)
        notes = {"ranks": ranks, "batch": ranks * args.batch_size}
        notes["losses"] = more.tolist()  # those that --resume must have, too
        if dist.get_rank() == 0:
            NOTES.write_text(json.dumps(vars(args) | notes))
    held = held_in_memory("FSDP", model, optimizer, train_set, device, args)
    accuracy = evaluate(model, test_set, device)
    if dist.get_rank() == 0:
        print(f"test accuracy: {accuracy:.2%} of the next characters, on {device.type}")
    if args.resume:
        claim = f"{ranks} ranks go on where {args.ranks} stopped"
        expected = torch.tensor(args.losses, device=device)
        return prove_equal(losses, expected, claim, True)
    return compare_with_ddp(losses, held, train_set, device, args)


# ---- Shared helpers, identical in every lesson

CHECKPOINT = Path("runs", Path(__file__).stem, "checkpoint")
NOTES = CHECKPOINT / "notes.json"  # written last: where it is, the rest is complete
LENGTH = 64  # characters in a piece of text
WIDTH = 64  # numbers per character inside the model
LAYERS = 4
ROUNDING = 1e-5  # adding up in a different order changes losses by less than this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def compare_with_ddp(losses, held, train_set, device, args):
    """Train the same model in DDP. Print the proof. Every rank must call this."""
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    expected = train("DDP", model, optimizer, train_set, 0, device, args)
    share = held / held_in_memory("DDP", model, optimizer, train_set, device, args)
    ranks = dist.get_world_size()
    limit = 1 / ranks + 0.05  # a part of a parameter may end in padding
    parts = f"{ranks} ranks: parameters, gradients, Adam's states {share:.2f} of DDP's"
    return prove_equal(losses, expected, f"{parts} (limit {limit:.2f})", share <= limit)


def prove_equal(losses, expected, claim, holds):
    """Print the proof, on rank 0: a claim, and that the losses are those expected."""
    gap = (losses - expected)[:8].abs().max().item()  # later, rounding adds up
    if dist.get_rank() == 0:
        gaps = f"losses within {gap:.0e} (limit {ROUNDING:.0e})"
        return prove(f"{claim}, {gaps}", holds and gap <= ROUNDING)


def held_in_memory(name, model, optimizer, train_set, device, args):
    """Print and return the megabytes that a rank holds. Every rank must call this."""
    parameters = list(model.parameters())
    inside = []

    def note(layer, inputs):
        # In a layer's turn its parameters are whole. The rank's own parts stay, too.
        inside.append(megabytes(parameters + list(model.parameters())))

    plain = model.module if name == "DDP" else model
    plain.layers[0].register_forward_pre_hook(note)
    train_one_epoch(model, [train_set[: args.batch_size]], optimizer, device)
    gradients = megabytes([parameter.grad for parameter in parameters])
    states = [x for state in optimizer.state.values() for x in state.values()]
    held = [megabytes(parameters), gradients, megabytes(states)]
    if dist.get_rank() == 0:
        parts = f"parameters {held[0]:.2f}, gradients {held[1]:.2f}"
        parts += f", Adam's states {held[2]:.2f}"
        print(f"{name}, MB a rank: {parts}; inside a layer parameters {inside[0]:.2f}")
    return sum(held)


def megabytes(tensors):
    """Return how much of these tensors this rank holds, padding included."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    storages = [part.untyped_storage() for part in parts]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()) / 1e6  # what several tensors share counts once


def device_for_sharding(device):
    """Return the device for the model. Where this torch cannot shard there, end."""
    # Before torch 2.8 the backend must average, and no error says that it did not: gloo
    # then gives the sum, NCCL with one rank may give zeros (pytorch#144045).
    sums = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    gloo = dist.get_backend() == "gloo"
    if not sums and (gloo or dist.get_world_size() == 1):
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__} cannot shard here: take 2.8 or newer")
        sys.exit(os.EX_UNAVAILABLE)  # not a fault: run_course.sh skips the lesson here
    # gloo can shard on CPUs only, so ranks that share a GPU do not use it.
    return torch.device("cpu") if gloo else device


def make_text():
    """Return training set and test set: sums, such as "7 plus 5 is 12. ", as codes."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(10, (6000, 2), generator=generator).tolist()
    text = "".join(f"{a} plus {b} is {a + b}. " for a, b in pairs)
    codes = torch.tensor(list(text.encode()))
    pieces = codes.unfold(0, LENGTH + 1, LENGTH)  # int64 [N, 65]: they overlap by 1
    parts = pieces[:1280], pieces[1280:1408]
    return [TensorDataset(part[:, :-1], part[:, 1:]) for part in parts]


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the share of next characters guessed right. Every rank must call this."""
    model.eval()
    text, targets = test_set[:]
    guesses = model(text.to(device)).argmax(dim=1)
    return (guesses == targets.flatten().to(device)).float().mean().item()


class Net(nn.Module):
    """A small transformer: int64 [N, LENGTH] to scores, float32 [N * LENGTH, 128]."""

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
        return self.scores(x.flatten(0, 1))


def choose_device(local_rank, local_world_size):
    """Return this rank's device, and the backend that connects such devices."""
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
    dist.barrier()  # the others wait here for rank 0, at most DIST_TIMEOUT seconds
    time.sleep(0.2)  # before torch 2.8 the next line can hang without it (#154976)
    dist.destroy_process_group()
    return status  # of rank 0: 0 if the lesson has proved its claim


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    add("--batch-size", type=int, default=8, help="per process (8)")
    add("--lr", type=float, default=0.003, help="learning rate (0.003)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, help="end each epoch after so many steps")
    add("--resume", action="store_true", help="only go on from the checkpoint")
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error("the batch size must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    if args.resume:
        if not NOTES.exists():
            parser.error("no checkpoint: run the lesson without --resume first")
        vars(args).update(json.loads(NOTES.read_text()), resume=True)  # as it was then
        ranks = int(os.environ["WORLD_SIZE"])
        if args.batch % ranks:
            parser.error(f"{ranks} ranks cannot share {args.batch} pieces evenly")
        args.batch_size = args.batch // ranks
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
