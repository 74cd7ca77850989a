"""Lesson 14: a recommender, its ratings in many files that together need not fit into memory.

Builds on: 11_mnist_ddp_pt_multinode_streaming.py
New here:  shard, sparse gradient, communication hook
Run:       scripts/multinode_setup_and_run.sh day2/14_recommender_ddp_sharded.py
Look for:  => RMSE 0.7191, 12% below biases alone; 16 MB of ratings, at most 725 MB in memory
Try next:  --factors 1 and 32; ratings of --copies 200: watch the memory; real ratings.
"""

import argparse
import json
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

COLUMNS = {"userId": np.int64, "movieId": np.int64, "rating": np.float32}


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


def read(file, rows):
    """Return some rows of a file: users and movies, int64 [N], and ratings, float32 [N]."""
    # Of a mapped file only what is touched gets read. But all that was ever touched counts as this
    # process's memory, until the map is gone. So: a new map each time, and copies of the columns.
    part = np.load(file, mmap_mode="r")[rows]
    return [torch.from_numpy(part[name].astype(kind)) for name, kind in COLUMNS.items()]


def parts(files, begins, ends, device):
    """Yield users, movies, ratings of this rank's files, from one row to another, part by part."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for file, begin, end in zip(files[mine], begins[mine], ends[mine]):
        for row in range(begin, end, 50_000):
            yield [x.to(device) for x in read(file, slice(row, min(row + 50_000, end)))]


def batches(files, counts, size, steps, epoch, device, args):
    """Yield users, movies and ratings of this rank's batches in an epoch.

    counts: how many ratings at the beginning of each file are for training, int64 [files].
    size: how many ratings of each of its files a rank uses in a step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Drawn alike by all ranks: the order of the files, and where to begin in each of them.
    random = np.random.default_rng([args.seed % 2**32, epoch])
    order, begins = random.permutation(len(files)), random.integers(counts)
    # Equally many files for each rank; those left over have their turn in another epoch.
    mine = order[: len(files) // world_size * world_size][rank::world_size]
    for first in tqdm(range(0, steps, args.buffer), disable=rank > 0 or None, leave=False):
        last, columns = min(first + args.buffer, steps), ([], [], [])
        for file in mine:
            random = np.random.default_rng([args.seed % 2**32, epoch, file, first])
            rows = begins[file] + first * size + random.permutation((last - first) * size)
            for column, values in zip(columns, read(files[file], rows % counts[file])):
                column.append(values.view(last - first, size))
        yield from zip(*(torch.cat(column, dim=1).to(device) for column in columns))


def usable(folder):
    """Return whether the folder holds what the lesson reads."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        lengths = [len(np.load(x, mmap_mode="r")[[*COLUMNS]]) for x in folder.glob("*.npy")]
        whole = len(lengths) == sizes["files"] and sum(lengths) == sizes["ratings"]
        return whole and min(lengths) > 1
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        return False


class Net(nn.Module):
    """Matrix factorisation: users and movies, int64 [N], to ratings, float32 [N]."""

    def __init__(self, mean, user_bias, movie_bias, factors):
        super().__init__()
        self.mean = mean.item()
        # A row for each user and each movie: factors, and a bias in the last column. Sparse: the
        # gradient has only rows that the batch has used. Else it is as large as the table.
        self.users = nn.Embedding(len(user_bias), factors + 1, sparse=True)
        self.movies = nn.Embedding(len(movie_bias), factors + 1, sparse=True)
        with torch.no_grad():
            self.users.weight.zero_()  # no factors yet: the first guess is that of the biases
            self.movies.weight.normal_(std=0.1)
            self.users.weight[:, -1], self.movies.weight[:, -1] = user_bias, movie_bias

    def forward(self, users, movies):
        user, movie = self.users(users), self.movies(movies)
        match = (user[:, :-1] * movie[:, :-1]).sum(1)
        return self.mean + user[:, -1] + movie[:, -1] + match


def gather_rows(state, bucket):
    """Average the gradient of a table over the ranks. DistributedDataParallel calls this."""
    gradient, world_size = bucket.buffer(), dist.get_world_size()
    # all_reduce would need the whole table, and NCCL refuses a sparse tensor. So each rank gets the
    # rows of all: their numbers and their values. They are as many from each rank: one a rating.
    gathered = []
    for mine in (gradient._indices()[0], gradient._values() / world_size):
        gathered.append(mine.new_empty(world_size * len(mine), *mine.shape[1:]))
        dist.all_gather_into_tensor(gathered[-1], mine)
    rows, values = gathered  # a row that comes several times is added up in the optimizer
    average = torch.sparse_coo_tensor(rows[None], values, gradient.shape, check_invariants=False)
    future = torch.futures.Future()  # of what is still on its way; here we have waited for it
    future.set_result(average)
    return future


def train_one_epoch(model, optimizer, batches, history):
    """Train on each batch once. Fill the rows of history: loss summed over a batch; batch size."""
    for step, (users, movies, ratings) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.mse_loss(model(users, movies), ratings)
        loss.backward()
        optimizer.step()
        # No .item() here: the CPU would wait for the GPU in every step. And no list of small
        # tensors: strewn over the memory, they keep what is free between them from being used.
        history[0, step], history[1, step] = loss.detach() * len(ratings), len(ratings)


@torch.no_grad()
def evaluate(model, parts, device):
    """Return the RMSE, the root of the mean squared error, over the parts of all ranks."""
    sums = torch.zeros(2, device=device)
    for users, movies, ratings in parts:
        error = F.mse_loss(model(users, movies), ratings, reduction="sum")
        sums += torch.stack([error, error.new_tensor(len(ratings))])
    dist.all_reduce(sums)  # sums, not means: the parts may differ in size
    return (sums[0] / sums[1]).sqrt().item()


def find_biases(files, counts, sizes, device):
    """Return the mean rating, and how far users and movies are from it: float32 [1], [U], [M].

    Each is a pass over the ratings for training: first the mean, then movies, then users.
    """
    mean, movie_bias, user_bias = (
        torch.zeros(n, device=device) for n in (1, sizes["movies"], sizes["users"])
    )
    for turn, bias in enumerate((mean, movie_bias, user_bias)):
        sums = torch.zeros(2, len(bias), device=device)
        for users, movies, ratings in parts(files, 0 * counts, counts, device):
            rest = ratings - mean - movie_bias[movies] - user_bias[users]
            rows = (torch.zeros_like(users), movies, users)[turn]
            for total, values in zip(sums, (rest, torch.ones_like(rest))):  # and how many
                total.index_add_(0, rows, values)
        dist.all_reduce(sums)  # of the files of all ranks
        # Few ratings say little: count 5 more that do not differ from the average.
        bias += sums[0] / (sums[1] + (5 if turn else 0))
    return mean, user_bias, movie_bias


def write_scalars(history):
    """Write the loss over the ratings seen to runs/, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

    with SummaryWriter(f"runs/{Path(__file__).stem}", purge_step=0) as writer:
        for step, (loss, size) in zip(history[1].cumsum(0).int().tolist(), history.T.tolist()):
            writer.add_scalar("loss/train", loss / size, step)


def peak_memory():
    """Return the most memory that this process has held, and the largest worker that has ended."""
    megabyte = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, kilobytes elsewhere
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    rank, worker = (resource.getrusage(kind).ru_maxrss / megabyte for kind in kinds)
    return f"at most {rank:,.0f} MB in memory, a worker {worker:,.0f} MB"


def train(model, files, counts, device, args):
    """Train the model. Return the history of all steps."""
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, gather_rows)  # what to do instead of all_reduce
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=args.lr)  # changes used rows only
    # A step takes equally many ratings of each file. So its ratings are the same for any number of
    # ranks, if no file is left over. The shortest file tells all alike how many steps there are.
    size = min(max(1, args.batch_size // (len(files) // dist.get_world_size())), counts.min())
    steps = min(counts.min() // size, args.max_steps or sys.maxsize)
    histories = torch.zeros(args.epochs, 2, steps, device=device)
    for epoch, history in enumerate(histories):
        begin = time.perf_counter()
        mine = batches(files, counts, size, steps, epoch, device, args)
        train_one_epoch(model, optimizer, mine, history)
        dist.all_reduce(history)  # losses and ratings of all ranks, step by step
        # Reading the sums waits for the device. Only then is it fair to read the clock.
        loss, count = history.sum(1).tolist()
        speed = count / (time.perf_counter() - begin)
        if dist.get_rank() == 0:
            row = f"{steps} steps of {count / steps:,.0f} ratings, {speed:,.0f} ratings/s"
            print(f"epoch {epoch}: loss {loss / count:.4f}, {row}")
    return torch.cat([*histories], dim=1)


def main(device, args):
    """Run on every rank: guess from biases alone, train, guess again."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = json.loads((args.folder / "sizes.json").read_text())
    files = sorted(args.folder.glob("*.npy"))
    lengths = np.array([len(np.load(file, mmap_mode="r")) for file in files])
    counts = lengths * 9 // 10  # the rest of each file is held out: nothing is learned from it
    torch.manual_seed(args.seed)  # the same first factors on every rank
    model = Net(*find_biases(files, counts, sizes, device), args.factors).to(device)
    alone = evaluate(model, parts(files, counts, lengths, device), device)
    if rank == 0:
        print(f"files: {len(files)}, for each rank: {len(files) // world_size}")
        print(f"biases alone: RMSE {alone:.4f} on {(lengths - counts).sum():,} held-out ratings")
    history = train(model, files, counts, device, args)
    rmse = evaluate(model, parts(files, counts, lengths, device), device)
    if rank == 0:
        size = f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB of ratings"
        memory = peak_memory().partition(", a worker")[0]  # there is none here
        print(f"=> RMSE {rmse:.4f}, {1 - rmse / alone:.0%} below biases alone; {size}, {memory}")
        write_scalars(history)


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
    parser.add_argument("--batch-size", type=int, default=1024, help="ratings per process (1024)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (0.01)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and order (0)")
    parser.add_argument("--max-steps", type=int, help="end an epoch after this many steps")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--folder", type=Path, help="made by create_ratings.py (data/ratings)")
    parser.add_argument("--factors", type=int, default=8, help="numbers for a user or a movie (8)")
    parser.add_argument("--buffer", type=int, default=64, help="steps read at once (64)")
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank a node says what is wrong
        parser.error = lambda message: sys.exit(2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not value > 0 and name != "seed":
            parser.error(f"{name.replace('_', '-')} must be greater than 0, not {value}")
    args.folder = args.folder or args.data_dir / "ratings"
    if not usable(args.folder):
        hint = "python day2/create_ratings.py --force"
        parser.error(f"{args.folder} is missing, damaged or of another kind. Make it: {hint}")
    files, ranks = len(list(args.folder.glob("*.npy"))), int(os.environ.get("WORLD_SIZE", 1))
    if files < ranks:
        hint = f"python day2/create_ratings.py --force --files {2 * ranks}"
        parser.error(f"{files} files are too few for {ranks} ranks. Make more: {hint}")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
