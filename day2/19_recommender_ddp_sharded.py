"""Lesson 19: a recommender, its ratings divided among many files.

Builds on: 11_mnist_ddp_pt_multinode_streaming.py
New here:  shard, sparse gradient, communication hook
Run:       scripts/multinode_setup_and_run.sh day2/19_recommender_ddp_sharded.py
Look for:  => RMSE ..., ...% below movie means (limit 5%), tables identical: ok
Try next:  --factors 0 (only biases) and 32; on one rank: --batch-size 4096
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class ShardStream(IterableDataset):
    """Batches of ratings: users and movies, int64 [N], and ratings, float32 [N].

    Each rank reads its own files, called shards. A batch has the next ratings of each.
    That is a fair sample: create_ratings.py has shuffled all before it divided them.
    """

    def __init__(self, files, counts, args):
        self.files = files
        self.seed = args.seed
        self.epoch = 0
        # The same number of files for each rank, and in a step the same number of
        # ratings of each file. So all ranks take as many steps as the shortest allows.
        self.files_per_rank = len(files) // dist.get_world_size()
        size = max(1, args.batch_size // self.files_per_rank)
        self.size = min(size, min(counts))  # ratings per file and step
        self.steps = min(counts) // self.size
        self.global_batch_size = self.size * self.files_per_rank * dist.get_world_size()

    def __iter__(self):
        """Yield this rank's batches of an epoch."""
        # All ranks draw the same order of files, and the same place to begin in each.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.files)
        order = torch.randperm(count, generator=generator).tolist()
        begins = torch.randint(self.steps, (count,), generator=generator).tolist()
        # Files that are left over are used in a later epoch.
        first = dist.get_rank() * self.files_per_rank
        mine = order[first : first + self.files_per_rank]
        for step in range(self.steps):
            parts = []
            for number in mine:
                # Mapped: only these ratings are read. Mapped again each time: what was
                # read counts as memory of this process until the map is gone.
                ratings = np.load(self.files[number], mmap_mode="r")
                place = (begins[number] + step) % self.steps
                parts.append(ratings[place * self.size : (place + 1) * self.size])
            yield to_tensors(np.concatenate(parts))


def gather_rows(state, bucket):
    """Average the gradient of a table over the ranks. DDP calls this in backward."""
    gradient = bucket.buffer()
    # It is sparse: it has only the rows that a batch has used. all_reduce would need
    # the whole table. So each rank gets the rows of all: their numbers and values.
    rows = all_gather(gradient._indices()[0])
    values = all_gather(gradient._values()) / dist.get_world_size()
    # A row that comes several times is added up in the optimizer.
    average = torch.sparse_coo_tensor(rows.unsqueeze(0), values, gradient.shape)
    future = torch.futures.Future()  # DDP wants one. Here nothing is still on its way
    future.set_result(average)
    return future


def all_gather(tensor):
    """Return the tensors of all ranks, joined. All must have the same shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return torch.cat(tensors)


def train_one_epoch(model, loader, optimizer, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for users, movies, ratings in loader:
        users, movies = users.to(device), movies.to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(users, movies), ratings.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(model, stream, device, args):
    """Train the model on all ranks. Return the losses of all steps."""
    # The ratings are divided, the tables aren't: each rank holds them whole. For larger
    # tables there's TorchRec, which divides them too, so ranks ask others for rows.
    ddp_model = DistributedDataParallel(model)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns otherwise
    ddp_model.register_comm_hook(None, gather_rows)  # what to do instead of all_reduce
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=args.lr)  # used rows only
    loader = DataLoader(stream, batch_size=None)  # None: they are batches already
    losses = []
    for epoch in range(args.epochs):
        stream.epoch = epoch  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = islice(loader, args.max_steps)  # None: all
        epoch_losses = train_one_epoch(ddp_model, batches, optimizer, device)
        dist.all_reduce(epoch_losses)  # each rank knows only its own
        losses.append(epoch_losses / dist.get_world_size())
        ratings_seen = len(epoch_losses) * stream.global_batch_size
        loss = losses[-1].mean().item()  # waits for the device: only now read the clock
        speed = ratings_seen / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {speed:,.0f} ratings/s")
    return torch.cat(losses)


def main(device, args):
    """Run on every rank: guess from movie means alone, train, guess again."""
    files = sorted(args.folder.glob("*.npy"))
    lengths = [len(np.load(file, mmap_mode="r")) for file in files]
    # All files are shuffled, so other ratings hardly ever begin with the same one.
    firsts = [np.load(file, mmap_mode="r")[:1].tobytes() for file in files]
    check_copies(args.folder, [args.sizes, lengths, firsts])
    counts = [length * 9 // 10 for length in lengths]  # the rest is for testing
    torch.manual_seed(args.seed)  # the same first factors on every rank
    mean, movie_bias = movie_means(files, counts, args.sizes["movies"], device)
    model = Net(mean, movie_bias, args.sizes["users"], args.factors).to(device)
    before = evaluate(model, read_parts(files, counts, lengths), device)
    stream = ShardStream(files, counts, args)
    report_begin(stream, model, before)
    losses = train(model, stream, device, args)
    after = evaluate(model, read_parts(files, counts, lengths), device)
    same = identical_on_all_ranks(model)
    if dist.get_rank() == 0:
        write_scalars(losses, stream.global_batch_size)
        gain = 1 - after / before if before else 0.0  # 0: all ratings are equal
        rmse = f"RMSE {after:.4f}, {gain:.1%} below movie means (limit {GAIN:.0%})"
        tables = f"tables {'identical' if same else 'DIFFERENT'}"
        return prove(f"{rmse}, {tables}", gain >= GAIN and same)


# ---- Shared helpers, identical in every lesson

FOLDER = f"runs/{Path(__file__).stem}"
RATINGS = Path(__file__).parents[1] / "data" / "ratings"
GAIN = 0.05  # a model that has learned something lowers the error by at least this


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    print(f"=> {claim}: {'ok' if holds else 'WRONG'}")
    return 0 if holds else 1


def to_tensors(ratings):
    """Return users and movies, int64 [N], and their ratings, float32 [N]."""
    users = torch.from_numpy(ratings["userId"].astype(np.int64))
    movies = torch.from_numpy(ratings["movieId"].astype(np.int64))
    return users, movies, torch.from_numpy(ratings["rating"].astype(np.float32))


def read_parts(files, begins, ends):
    """Yield users, movies and ratings of this rank's files, from one row to another."""
    for number in range(dist.get_rank(), len(files), dist.get_world_size()):
        ratings = np.load(files[number], mmap_mode="r")
        yield to_tensors(ratings[begins[number] : ends[number]])


def movie_means(files, counts, movies, device):
    """Return the mean rating, and how far movies are from it. All ranks call this."""
    sums = torch.zeros(movies, device=device)
    numbers = torch.zeros(movies, device=device)
    for _, rows, ratings in read_parts(files, [0] * len(files), counts):
        ratings = ratings.to(device)
        rows = rows.to(device)
        sums.index_add_(0, rows, ratings)
        numbers.index_add_(0, rows, torch.ones_like(ratings))
    dist.all_reduce(sums)
    dist.all_reduce(numbers)
    mean = sums.sum() / numbers.sum()
    # A few ratings say little, so we add 5 to each movie, all at the mean.
    return mean.item(), (sums - mean * numbers) / (numbers + 5)


@torch.inference_mode()
def evaluate(model, parts, device):
    """Return the RMSE of all ranks' parts together. Every rank must call this."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    errors = torch.zeros(2, device=device)  # their sum, and how many they are
    for users, movies, ratings in parts:
        guesses = model(users.to(device), movies.to(device))
        errors[0] += F.mse_loss(guesses, ratings.to(device), reduction="sum")
        errors[1] += len(ratings)
    dist.all_reduce(errors)  # sums, not means: the parts may differ in size
    return (errors[0] / errors[1]).sqrt().item()  # the root of the mean squared error


def report_begin(stream, model, rmse):
    """Print, on rank 0, what is divided among the ranks, and how good the means are."""
    if dist.get_rank() == 0:
        print(f"files: {len(stream.files)}, for each rank: {stream.files_per_rank}")
        rows = f"{len(model.users.weight):,} and {len(model.movies.weight):,}"
        print(f"rows of the two tables: {rows}, for each rank: all")
        print(f"movie means alone: RMSE {rmse:.4f} on held-out ratings")


def identical_on_all_ranks(model):
    """Return whether all ranks hold the same parameters. Every rank must call this."""
    numbers = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return all(others == numbers for others in gather(numbers))


def check_copies(path, own):
    """Stop if ranks differ: each node may have a copy of its own. All ranks call this.

    own: this rank's value, which must be rank 0's, too.
    """
    copies = gather(own)
    odd = [rank for rank, copy in enumerate(copies) if copy != copies[0]]
    if odd:
        if dist.get_rank() == 0:
            sentence = f"{path} is not the same on ranks {odd} as on rank 0"
            print(f"{sentence}. Copy the right one to all.", file=sys.stderr)
        dist.barrier()  # the first rank that ends may end the others
        sys.exit(1)


def gather(value):
    """Return the values of all ranks, in rank order. Every rank must call this."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def write_scalars(losses, batch_size):
    """Write the loss of each step to runs/, over the images seen, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 needs it

    with SummaryWriter(FOLDER, purge_step=0) as writer:
        for step, loss in enumerate(losses.tolist(), start=1):
            writer.add_scalar("loss/train", loss, step * batch_size)


class Net(nn.Module):
    """Matrix factorisation: users and movies, int64 [N], to ratings, float32 [N]."""

    def __init__(self, mean, movie_bias, users, factors):
        super().__init__()
        self.mean = mean
        # A row for each user and each movie: factors, and a bias in the last column.
        # Sparse: the gradient has only the rows that the batch has used. Otherwise it
        # would be as large as the table.
        self.users = nn.Embedding(users, factors + 1, sparse=True)
        self.movies = nn.Embedding(len(movie_bias), factors + 1, sparse=True)
        with torch.no_grad():
            self.users.weight.zero_()  # the first guess is the mean of the movie
            self.movies.weight.normal_(std=0.1)
            self.movies.weight[:, -1] = movie_bias

    def forward(self, users, movies):
        user, movie = self.users(users), self.movies(movies)
        match = (user[:, :-1] * movie[:, :-1]).sum(dim=1)
        return self.mean + user[:, -1] + movie[:, -1] + match


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


def start(args):
    """Run as one rank: join the process group, call main, leave the group."""
    # Variables tell a process who it is. LOCAL_RANK: its number on this node. The other
    # four, RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, are for init_process_group.
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))  # Kubernetes
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    device, backend = choose_device(local_rank, ranks_here)
    timeout = timedelta(seconds=int(os.environ.get("DIST_TIMEOUT", 60)))
    device_id = None if backend == "gloo" else device  # with it, NCCL connects now
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
    add("--epochs", type=int, default=2, help="epochs (2)")
    add("--batch-size", type=int, default=1024, help="per process (1024)")
    add("--lr", type=float, default=0.01, help="learning rate (0.01)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=int, help="end each epoch after so many steps")
    add("--folder", type=Path, default=RATINGS, help="made by create_ratings.py")
    add("--factors", type=int, default=8, help="per user and movie (8)")
    args = parser.parse_args()
    if not os.environ.get("DIST_TIMEOUT", "60").isdecimal():
        parser.error("DIST_TIMEOUT is not a number of seconds")
    for name, number in vars(args).items():
        least = 0 if name in ("seed", "factors") else 1e-9
        if type(number) in (int, float) and not least <= number < 2**31:  # nan
            parser.error(f"{name} is {number}: too small, too large, or no number")
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    sizes = args.folder / "sizes.json"
    if not sizes.is_file():
        parser.error(f"there is no {sizes}. Make it: python day2/create_ratings.py")
    args.sizes = json.loads(sizes.read_text())
    files, ranks = args.sizes["files"], int(os.environ["WORLD_SIZE"])
    held = len(list(args.folder.glob("*.npy")))
    if held != files:
        parser.error(f"{args.folder} has {held} of its {files} files. Copy it again")
    if args.sizes["ratings"] < 2 * files:
        few = f"{args.sizes['ratings']} ratings are too few for {files} files"
        parser.error(f"{few}. Write fewer with create_ratings.py --files")
    if files < ranks:
        todo = f"Write them with create_ratings.py --files {2 * ranks}"
        parser.error(f"{files} files are too few for {ranks} ranks. {todo}")
    return args


if __name__ == "__main__":
    sys.exit(start(parse_args()))
