"""Lesson 17: when the model is the limit. Each rank keeps a part of it.

Builds on: 10_mnist_ddp_pt_multinode.py
New here:  fully_shard (FSDP2), DTensor, distributed checkpoint
Run:       scripts/multinode_setup_and_run.sh day2/17_transformer_fsdp.py
Look for:  => 4 ranks: parameters, gradients, Adam's states 0.25 of DDP's, losses within 2e-07
Try next:  --resume, with 2 ranks instead of 4; LAYERS = 8: what grows "inside a layer"?
"""

import argparse
import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

LENGTH, WIDTH, LAYERS = 64, 64, 4  # characters in a piece of text; numbers for each of them
CHECKPOINT = Path("runs", Path(__file__).stem, "checkpoint")
NOTES = CHECKPOINT / "notes.json"  # written last: where it is, the rest is complete


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


def make_text():
    """Return many sums, such as "7 plus 5 is 12. ", as codes: int64 [pieces, LENGTH + 1]."""
    pairs = torch.randint(10, (5000, 2), generator=torch.Generator().manual_seed(0)).tolist()
    text = "".join(f"{a} plus {b} is {a + b}. " for a, b in pairs).encode()
    return torch.tensor(list(text)).unfold(0, LENGTH + 1, LENGTH)[:1280]


def batches(text, sampler, batch_size, max_steps):
    """Yield pieces of text and, for each character, the one that follows, batch by batch."""
    order = torch.tensor(list(sampler), device=text.device)
    hidden = os.environ.get("RANK", "0") != "0" or None  # None: shown on a terminal only
    for indices in tqdm(order.split(batch_size)[:max_steps], disable=hidden, leave=False):
        yield text[indices, :-1], text[indices, 1:]


class Net(nn.Module):
    """A small transformer: codes, int64 [N, LENGTH], to scores, float32 [N, LENGTH, 128]."""

    def __init__(self):
        super().__init__()
        self.codes, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(LAYERS)
        )
        self.scores = nn.Linear(WIDTH, 128)

    def forward(self, text):
        x = self.codes(text) + self.places.weight
        # No character may see those after it: they are what the model must guess.
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.scores(x)


def train_one_epoch(model, optimizer, batches):
    """Train on each batch once. Return [2, steps]: loss summed over the batch; batch size."""
    history = []
    for text, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        # No .item() here: the CPU would wait for the GPU in every step.
        history.append(torch.stack([loss.detach() * len(text), loss.new_tensor(len(text))]))
    return torch.stack(history, dim=1)


def write_scalars(history):
    """Write the loss over the pieces seen to runs/, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, (loss, size) in zip(history[1].cumsum(0).int().tolist(), history.T.tolist()):
            writer.add_scalar("loss/train", loss / size, step)


def shard(model, device):
    """Spread a model over all ranks: of each parameter a rank keeps a part, in a DTensor."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # the ranks of all nodes
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # gathered when its turn comes, given up after it
    fully_shard(model, mesh=mesh)  # the rest. Alone it would gather the whole model at once


def save(model, optimizer):
    """Write a checkpoint. Each rank writes its own parts."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=CHECKPOINT)


def load(model, optimizer):
    """Read the checkpoint. Each rank reads its own parts, however many ranks wrote it."""
    weights, states = get_state_dict(model, optimizer)  # these say which parts, and are filled
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=CHECKPOINT)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def size(tensors):
    """Return how many megabytes this rank holds of some tensors."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    storages = [part.untyped_storage() for part in parts]  # padding counts, sharing does not
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / 1e6


def memory(name, model, optimizer, text):
    """Print what a rank holds in one more step. Return the megabytes that stay between steps."""
    parameters, inside = list(model.parameters()), []
    # In a layer's turn its parameters are whole, and the rank's own parts stay beside them.
    layer = getattr(model, "module", model).layers[0]
    hook = layer.register_forward_pre_hook(
        lambda *_: inside.append(size([*parameters, *model.parameters()]))
    )
    device = torch.get_device_module(text.device)
    if on_gpu := hasattr(device, "max_memory_allocated"):
        device.reset_peak_memory_stats()
    train_one_epoch(model, optimizer, [(text[:, :-1], text[:, 1:])])
    hook.remove()
    states = [x for state in optimizer.state.values() for x in state.values()]
    held = [size(x) for x in (parameters, [x.grad for x in parameters], states)]
    if dist.get_rank() == 0:
        peak = f", peak of all {device.max_memory_allocated() / 1e6:.2f}" if on_gpu else ""
        print(f"{name}, MB a rank: parameters {held[0]:.2f}, gradients {held[1]:.2f}, ", end="")
        print(f"Adam's states {held[2]:.2f}; inside a layer parameters {inside[0]:.2f}{peak}")
    return sum(held)


def train(name, epochs, text, args):
    """Train a new model. Return the loss of each step, and the megabytes that it takes a rank."""
    # The same first weights on every rank; others where the checkpoint has to bring the right ones.
    torch.manual_seed(args.seed + epochs.start)
    model = Net().to(text.device)
    if name == "DDP":
        model = DistributedDataParallel(model)  # averages the gradients during backward
    else:
        shard(model, text.device)
    # Made after sharding, because that puts new parameters in the place of the old ones.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if name == "resumed":
        load(model, optimizer)
    # The ranks shuffle alike, then each takes every world_size-th piece.
    sampler = DistributedSampler(text, seed=args.seed)
    histories = []
    for epoch in epochs:
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        begin = time.perf_counter()
        steps = batches(text, sampler, args.batch_size, args.max_steps)
        histories.append(train_one_epoch(model, optimizer, steps))
        dist.all_reduce(histories[-1])  # losses and pieces of all ranks, step by step
        # Reading the sums waits for the device. Only then is it fair to read the clock.
        loss, count = histories[-1].sum(1).tolist()
        speed = count * LENGTH / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"{name}, epoch {epoch}: loss {loss / count:.4f}, {speed:,.0f} characters/s")
        if name == "FSDP" and epoch + 1 == args.epochs:
            save(model, optimizer)
    history = torch.cat(histories, dim=1)
    if dist.get_rank() == 0 and name != "DDP":
        write_scalars(history)
    return history[0] / history[1], memory(name, model, optimizer, text[: args.batch_size])


def main(device, args):
    """Run on every rank: train with DDP and sharded, or go on from the checkpoint. Compare."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "gloo":  # ranks that share a GPU leave it: gloo is for the CPU
        device, mean = torch.device("cpu"), torch.zeros(1)
        dist.reduce_scatter_tensor(mean, torch.ones(world_size), op=dist.ReduceOp.AVG)
        # The gloo of older versions gives the sum instead, without a word.
        if mean != 1 or not hasattr(torch.cpu.Stream, "record_event"):
            hint = f"torch {torch.__version__} cannot shard on CPUs: use a newer one, or GPUs"
            sys.exit(hint if rank == 0 else 2)
    text = make_text().to(device)
    shares = text.flatten().bincount() / text.numel()  # how often each character comes
    if rank == 0:
        guess = torch.special.entr(shares).sum()  # the loss of one who knows nothing else
        print(f"model on the {device.type}; guessing by frequency alone: loss {guess:.4f}")
    if args.resume:
        expected = torch.tensor(args.losses, device=device)
        losses, _ = train("resumed", range(args.epochs, args.epochs + 1), text, args)
        proof = f"{world_size} ranks go on where {args.ranks} stopped"
    else:
        if rank == 0:  # the rest of an older checkpoint shall not mix with the new one
            shutil.rmtree(CHECKPOINT, ignore_errors=True)
        expected, whole = train("DDP", range(args.epochs), text, args)
        losses, part = train("FSDP", range(args.epochs + 1), text, args)
        proof = f"{world_size} ranks: parameters, gradients, Adam's states "
        proof += f"{part / whole:.2f} of DDP's"
        if rank == 0:
            notes = {"ranks": world_size, "batch": world_size * args.batch_size}
            notes["losses"] = losses[len(expected) :].tolist()  # of the epoch after the checkpoint
            NOTES.write_text(json.dumps(vars(args) | notes))
    if rank == 0:
        # The first 20 steps: later, the differences of rounding have grown.
        gap = (losses[: len(expected)] - expected)[:20].abs().max()
        print(f"=> {proof}, losses within {gap:.0e}")


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
    parser.add_argument("--epochs", type=int, default=1, help="before the checkpoint (1)")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces per process (8)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate (0.003)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, help="end an epoch after this many steps")
    parser.add_argument("--resume", action="store_true", help="only go on from the checkpoint")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name not in "seed resume":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    if args.resume:
        if not NOTES.exists():
            parser.error(f"{CHECKPOINT} holds no checkpoint: run the lesson without --resume first")
        vars(args).update(json.loads(NOTES.read_text()), resume=True)  # as they were then
        args.batch_size, rest = divmod(args.batch, ranks := int(os.environ["WORLD_SIZE"]))
        if rest:
            parser.error(f"{args.batch} pieces a step cannot be divided equally by {ranks} ranks")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
