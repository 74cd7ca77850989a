"""Lesson 14: a recommender, its ratings divided among many files.

Builds on: 11_mnist_ddp_pt_multinode_streaming.py
New here:  shard, sparse gradient, communication hook
Run:       scripts/multinode_setup_and_run.sh day2/14_recommender_ddp_sharded.py
Look for:  => RMSE ..., ... below biases alone (limit 0.1%), ... (limit ...): ok
Try next:  --factors 1 and 32; ratings of --copies 1, with --weight-decay 0.0001
"""

import argparse
import json
import math
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
from tqdm import tqdm

ENOUGH_STEPS = 300


class ShardStream(IterableDataset):
    """Batches of ratings: users and movies, int64 [N], and ratings, float32 [N].

    Each rank reads its own files, called shards, and of each only some rows at a time.
    create_ratings.py has shuffled all ratings before it divided them.
    """

    def __init__(self, files, counts, args):
        self.files = files
        self.counts = counts  # how many ratings to use of each file, int64 [files]
        self.args = args
        self.epoch = 0
        self.most_read = 0  # ratings at a time
        # The same number of files for each rank, and of each file the same number of
        # ratings in a step. The shortest file tells all ranks how many steps there are.
        self.files_per_rank = len(files) // dist.get_world_size()
        size = max(1, args.batch_size // self.files_per_rank)
        self.size = min(size, int(counts.min()))  # ratings per file and step
        self.steps = int(counts.min()) // self.size

    def __len__(self):
        return self.steps

    def __iter__(self):
        """Yield this rank's batches of an epoch."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        seed = self.args.seed % 2**32
        # Drawn alike by all ranks: the order of the files, and where to begin in each.
        random = np.random.default_rng([seed, self.epoch])
        order = random.permutation(len(self.files))
        begins = random.integers(self.counts)
        # Files that are left over have their turn in another epoch.
        mine = order[: self.files_per_rank * world_size][rank::world_size]
        for first in range(0, self.steps, self.args.buffer):
            steps = min(self.args.buffer, self.steps - first)
            parts = []
            for number in mine:
                random = np.random.default_rng([seed, self.epoch, number, first])
                shuffled = random.permutation(steps * self.size)
                rows = begins[number] + first * self.size + shuffled
                rows = rows % self.counts[number]  # after the last comes the first
                parts.append(read_rows(self.files[number], rows))
            users, movies, ratings = join_columns(parts, steps)
            self.most_read = max(self.most_read, ratings.numel())
            yield from zip(users, movies, ratings, strict=True)


def gather_rows(state, bucket):
    """Average the gradient of a table over the ranks. DDP calls this in backward."""
    gradient = bucket.buffer()
    # It is sparse: it has only the rows that a batch has used. all_reduce would need
    # the whole table. So each rank gets the rows of all: their numbers and values.
    rows = all_gather(gradient._indices()[0])
    values = all_gather(gradient._values()) / dist.get_world_size()
    # A row that comes several times is added up in the optimizer.
    average = torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, gradient.shape, check_invariants=False
    )
    future = torch.futures.Future()  # DDP wants one. Here nothing is still on its way
    future.set_result(average)
    return future


def train_one_epoch(model, loader, optimizer, weight_decay, device):
    """Train on each batch once. Return the loss of every step, float32 [steps]."""
    model.train()
    losses = []
    for users, movies, ratings in loader:
        users, movies = users.to(device), movies.to(device)
        ratings = ratings.to(device)
        optimizer.zero_grad()
        guesses, squares = model(users, movies)
        loss = F.mse_loss(guesses, ratings)
        # Large factors cost something. Otherwise movies with few ratings learn these by
        # heart, noise and all, and others are guessed worse. SparseAdam has no option.
        (loss + weight_decay * squares.mean()).backward()
        optimizer.step()
        losses.append(loss.detach())  # no .item() here: the CPU would wait for the GPU
    return torch.stack(losses)


def train(model, stream, device, args):
    """Train the model on all ranks. Return the losses of all steps."""
    world_size = dist.get_world_size()
    ddp_model = DistributedDataParallel(model)
    ddp_model.register_comm_hook(None, gather_rows)  # what to do instead of all_reduce
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=args.lr)  # used rows only
    loader = DataLoader(stream, batch_size=None)  # None: they are batches already
    losses = []
    # It is steps that change the model: where an epoch has few, take more epochs.
    for epoch in range(args.epochs or math.ceil(ENOUGH_STEPS / len(stream))):
        stream.epoch = epoch  # without this every epoch has the same order
        begin = time.perf_counter()
        batches = progress(loader, args.max_steps)
        epoch_losses = train_one_epoch(
            ddp_model, batches, optimizer, args.weight_decay, device
        )
        losses.append(mean_over_ranks(epoch_losses, world_size))
        report_epoch(epoch, losses[-1], global_batch(stream), begin)
    return torch.cat(losses)


def main(device, args):
    """Run on every rank: guess from biases alone, train, guess again."""
    files = sorted(args.folder.glob("*.npy"))
    lengths = np.array([len(np.load(file, mmap_mode="r")) for file in files])
    counts = lengths * 9 // 10  # the rest is held out: nothing is learned from it
    mean, user_bias, movie_bias = find_biases(files, counts, args.sizes, device)
    torch.manual_seed(args.seed)  # the same first factors on every rank
    model = Net(mean, user_bias, movie_bias, args.factors).to(device)
    before = evaluate(model, parts(files, counts, lengths, device), device)
    report_biases(before, len(files), (lengths - counts).sum())
    stream = ShardStream(files, counts, args)
    losses = train(model, stream, device, args)
    after = evaluate(model, parts(files, counts, lengths, device), device)
    same = identical_on_all_ranks(model)
    if dist.get_rank() == 0:
        write_scalars(losses, global_batch(stream))
        return report_rmse(before, after, same, stream, lengths.sum())


# ---- The same in every lesson that has it; explained on the page of the first one

GAIN = 0.001  # factors that have learned something lower the error by at least this
COLUMNS = {"userId": np.int64, "movieId": np.int64, "rating": np.float32}


def prove(claim, holds):
    """Print the proof line. Return the exit status: 0 if the claim holds, else 1."""
    verdict = "ok" if holds else "WRONG"
    print(f"=> {claim}: {verdict}")
    return 0 if holds else 1


def read_rows(file, rows):
    """Return some rows of a file: users and movies, int64 [N], ratings, float32 [N]."""
    # Of a mapped file only what is touched gets read. But all that was ever touched
    # counts as this process's memory, as long as the map is there. So we make a new map
    # each time, and copy the columns.
    part = np.load(file, mmap_mode="r")[rows]
    return [torch.from_numpy(part[name].astype(kind)) for name, kind in COLUMNS.items()]


def join_columns(parts, steps):
    """Return each column of several parts, side by side: a row for each step."""
    columns = []
    for column in zip(*parts, strict=True):
        columns.append(torch.cat([values.view(steps, -1) for values in column], dim=1))
    return columns


def parts(files, begins, ends, device):
    """Yield users, movies and ratings of this rank's files, from one row to another."""
    for number in range(dist.get_rank(), len(files), dist.get_world_size()):
        for begin in range(begins[number], ends[number], 50_000):
            rows = slice(begin, min(begin + 50_000, ends[number]))
            yield [column.to(device) for column in read_rows(files[number], rows)]


def all_gather(tensor):
    """Return the tensors of all ranks, joined. All must have the same shape."""
    joined = [torch.clone(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(joined, tensor)
    return torch.cat(joined)


def global_batch(stream):
    """Return how many ratings all ranks use in a step."""
    return stream.size * stream.files_per_rank * dist.get_world_size()


def find_biases(files, counts, sizes, device):
    """Return the mean rating, and how far users and movies are from it.

    They are float32 [1], [users] and [movies]. Each takes a pass over the ratings for
    training: first the mean, then movies, then users.
    """
    mean = torch.zeros(1, device=device)
    movie_bias = torch.zeros(sizes["movies"], device=device)
    user_bias = torch.zeros(sizes["users"], device=device)
    for bias in (mean, movie_bias, user_bias):
        sums = torch.zeros_like(bias)
        numbers = torch.zeros_like(bias)
        for users, movies, ratings in parts(files, 0 * counts, counts, device):
            rest = ratings - mean - movie_bias[movies] - user_bias[users]
            rows = torch.zeros_like(users)  # the mean has only one
            if bias is movie_bias:
                rows = movies
            elif bias is user_bias:
                rows = users
            sums.index_add_(0, rows, rest)
            numbers.index_add_(0, rows, torch.ones_like(rest))
        dist.all_reduce(sums)  # of the files of all ranks
        dist.all_reduce(numbers)
        if bias is not mean:
            numbers += 5  # few ratings say little: count 5 more, of the average
        bias += sums / numbers
    return mean, user_bias, movie_bias


def report_biases(rmse, files, ratings):
    """Print, on rank 0, how the files are divided and how good the first guess is."""
    if dist.get_rank() == 0:
        print(f"files: {files}, for each rank: {files // dist.get_world_size()}")
        print(f"biases alone: RMSE {rmse:.4f} on {ratings:,} held-out ratings")


def report_rmse(before, after, same, stream, ratings):
    """Print how far the RMSE has fallen, and what was read. Return the exit status."""
    gain = 1 - after / before
    rmse = f"RMSE {after:.4f}, {gain:.1%} below biases alone (limit {GAIN:.1%})"
    models = f"models {'identical' if same else 'DIFFERENT'}"
    limit = stream.args.buffer * stream.size * stream.files_per_rank  # --buffer steps
    read = f"{stream.most_read:,} of {ratings:,} ratings read at a time"
    claim = f"{rmse}, {models}, {read} (limit {limit:,})"
    return prove(claim, gain >= GAIN and same and stream.most_read <= limit)


def ratings_folder(text):
    """Return an argument as a path, if the folder is there and holds what we read."""
    folder = Path(text)
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        lengths = []
        for file in folder.glob("*.npy"):
            lengths.append(len(np.load(file, mmap_mode="r")[list(COLUMNS)]))
        whole = len(lengths) == sizes["files"] and sum(lengths) == sizes["ratings"]
        fits = whole and min(lengths) > 1
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        fits = False
    if not fits:
        problem = f"{text} is missing, damaged or of another kind"
        todo = "Make it: python day2/create_ratings.py --force"
        raise argparse.ArgumentTypeError(f"{problem}. {todo}")
    return folder


def identical_on_all_ranks(model):
    """Return whether all ranks hold the same parameters. Every rank must call this."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    different = (mine != first).any().int()  # 1 if any number differs, else 0
    dist.all_reduce(different)
    return different.item() == 0


def mean_over_ranks(losses, world_size):
    """Return each step's mean loss over all ranks. Every rank must call this."""
    if world_size > 1:
        dist.all_reduce(losses)  # each rank knows only the losses of its own images
    return losses / world_size


def report_epoch(epoch, losses, batch_size, begin):
    """Print an epoch's mean loss and its speed, on rank 0. begin: when it began."""
    loss = losses.mean().item()  # waits for the device: only now may we read the clock
    speed = len(losses) * batch_size / (time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        row = f"{len(losses)} steps of {batch_size:,} ratings, {speed:,.0f} ratings/s"
        print(f"epoch {epoch}: loss {loss:.4f}, {row}")


@torch.inference_mode()
def evaluate(model, parts, device):
    """Return the root of the mean squared error (RMSE) of all ranks' parts together."""
    model.eval()  # no dropout; BatchNorm takes the averages that it has kept
    errors = torch.zeros(2, device=device)  # their sum, and how many they are
    for users, movies, ratings in parts:
        guesses, _ = model(users, movies)
        errors[0] += F.mse_loss(guesses, ratings, reduction="sum")
        errors[1] += len(ratings)
    dist.all_reduce(errors)  # sums, not means: the parts may differ in size
    return (errors[0] / errors[1]).sqrt().item()


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
    """Matrix factorisation: users and movies, int64 [N], to ratings, float32 [N].

    It also returns the sum of the squares of the factors used, float32 [N].
    """

    def __init__(self, mean, user_bias, movie_bias, factors):
        super().__init__()
        self.mean = mean.item()
        # A row for each user and each movie: factors, and a bias in the last column.
        # Sparse: the gradient has only the rows that the batch has used. Else it would
        # be as large as the table.
        self.users = nn.Embedding(len(user_bias), factors + 1, sparse=True)
        self.movies = nn.Embedding(len(movie_bias), factors + 1, sparse=True)
        with torch.no_grad():
            self.users.weight.zero_()  # the first guess is that of the biases
            self.movies.weight.normal_(std=0.1)
            self.users.weight[:, -1] = user_bias
            self.movies.weight[:, -1] = movie_bias

    def forward(self, users, movies):
        user, movie = self.users(users), self.movies(movies)
        user_factors, movie_factors = user[:, :-1], movie[:, :-1]
        match = (user_factors * movie_factors).sum(1)
        squares = user_factors.square().sum(1) + movie_factors.square().sum(1)
        return self.mean + user[:, -1] + movie[:, -1] + match, squares


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
    enough = f"as many as make {ENOUGH_STEPS} steps"
    add("--epochs", type=positive_int, help=f"epochs ({enough})")
    add("--batch-size", type=positive_int, default=1024, help="per process (1024)")
    add("--lr", type=positive_float, default=0.01, help="learning rate (0.01)")
    add("--seed", type=int, default=0, help="for weights and order (0)")
    add("--max-steps", type=positive_int, help="end each epoch after so many steps")
    data = Path(__file__).parents[1] / "data" / "ratings"
    made = "made by create_ratings.py"
    add("--folder", type=ratings_folder, default=str(data), help=made)
    add("--factors", type=positive_int, default=8, help="per user and movie (8)")
    add("--weight-decay", type=positive_float, default=0.07, help="of factors (0.07)")
    add("--buffer", type=positive_int, default=64, help="steps read at once (64)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this lesson with scripts/multinode_setup_and_run.sh")
    args.sizes = json.loads((args.folder / "sizes.json").read_text())
    files, ranks = args.sizes["files"], int(os.environ.get("WORLD_SIZE", 1))
    if files < ranks:
        todo = f"python day2/create_ratings.py --force --files {2 * ranks}"
        parser.error(f"{files} files are too few for {ranks} ranks. Make more: {todo}")
    return args


if __name__ == "__main__":
    args = parse_args()
    start(args)
