"""How the tests run each lesson, and what it must show. A new lesson gets an entry in CASES.

A lesson is run short: its proof line must still say ok. Without its key line (a mutant) it must
say WRONG. More about a lesson may be tested in a file of tests/lessons.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import output_checks
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, cached_across_workers, output_of, proves


@dataclass(frozen=True)
class Mutant:
    """A line of a lesson, what stands there when somebody gets it wrong, and what comes of it.

    says      a pattern of the proof line; "": the line is as right as the other, and it says ok
    options   besides those that make the lesson short
    starts    so many times it is started; the others before the last one may fail
    quick     not only in the full suite
    """

    line: str
    wrong: str
    says: str
    options: str = ""
    ranks: int = 2
    starts: int = 1
    quick: bool = False


@dataclass(frozen=True)
class Case:
    """What the tests know of a lesson.

    short     its options. {folder} is where the lesson that it reads has written its data, or where
              it writes its own; {share} is a rank's part of a global batch of 84
    ranks     of the quick run, whose kinds of lines are those of its page; 1: it starts no others
    others    numbers of ranks in the full suite
    cold      started as a user does also in the quick run, not forked from a process with torch
    reads     the id of the lesson that writes what this one reads
    chain     so many of its losses are those of lesson 2: it trains on the same global batches
    check     a function of output_checks.py
    """

    short: str = ""
    ranks: int = 2
    others: Sequence[int] = (1, 3)
    cold: bool = False
    reads: str = ""
    chain: int = 0
    check: Callable | None = None
    mutants: Sequence[Mutant] = ()


def variants_of(lesson_id):
    """Return the variants that a lesson's page shows, on four ranks."""
    x = tomllib.loads((ROOT / "scripts" / "variants.toml").read_text()).get(lesson_id, {})
    says = {"right": "", "wrong": f"(?=.*{FROM_ONE}).*{x.get('says', '')}"}
    changes = [(*x[kind], says[kind]) for kind in says if len(x.get(kind, ())) > 1]
    return [Mutant(*change, ranks=4, quick=lesson_id == "4") for change in changes]


def arguments_of(lesson_id, tmp_path_factory, more="", ranks=2, folder=None):
    """Return what makes a lesson short, and more options, as a list. It reads what is written."""
    case = CASES[lesson_id]
    text = f"{case.short} {more}"
    if case.reads and "{folder}" in text:
        folder = written_by(case.reads, tmp_path_factory)
    return text.format(folder=folder, share=84 // ranks).split()


def written_by(lesson_id, tmp_path_factory):
    """Return the folder in which a lesson has run as one process, once for all tests."""

    def write():
        folder = tmp_path_factory.mktemp(lesson_id)
        arguments = arguments_of(lesson_id, tmp_path_factory, folder=folder)
        output = output_of(run_ranks(1, ROOT / LESSONS[lesson_id]["file"], *arguments, cwd=folder))
        assert proves(output), output
        return str(folder)

    return Path(cached_across_workers(tmp_path_factory, lesson_id, write))


# 20 steps with a global batch of 84 = 3 x 4 x 7 images; the second epoch has another order.
EPOCHS = "--epochs 2 --max-steps 10"
SHARED = f"{EPOCHS} --batch-size {{share}}"

SUM = "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n"
FLAT = "    dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n"
WRAP = "ddp_model = DistributedDataParallel(model)"
NO_SUM = Mutant(SUM, "", r"every rank holds 0, 1; the sum 0\+1 is 1: WRONG")
APART = r"losses within \de(-0[1-4]|\+\d\d) of {} \(limit 1e-05\)"
FROM_ONE = APART.format("one process")
FROM_MEMORY = APART.format("those from memory")
HELD = r"at most 8 and 8 micro-batches held, .*, NOT as the formulas say: WRONG$"
ONCE = r"^=> {} of 60,000 images once an epoch \(limit 640\), .*: WRONG$"
FORGOTTEN = (
    r"^=> starts: 3, images once an epoch: {} of 1,280 \(limit 1,279\), "
    r"parameters DIFFERENT: WRONG$"
)

# Of lesson 21: what people forget where one way meets another.
OFF = r"losses within \de(-0|\+0)\d of one process \(limit 1e-12\), bytes .*as predicted: WRONG$"
LAYOUT_LOST = [
    (" / self.copies).sum()", ").sum()"),  # the norm counts what is on several ranks more than once
    ("view.copy_(numbers[box(begin, view)])", "view[0] = numbers[box(begin, view)][0]"),  # moments
    ("= context.axis.reduce_scatter(gradient.flatten(1))", "= gradient[context.axis.at]"),
    ("places = places_of(self.context, self.context.at)", "places = torch.arange(x.shape[1])"),
    ("ranks.movedim(3, 1).flatten(2).flatten(0, 1))", "ranks.movedim(1, 3).flatten(0, 2))"),
    ("return context.axis.all_reduce(gradient), None", "return gradient, None"),
]

CASES = {
    "0": Case(cold=True, mutants=[NO_SUM]),
    "1": Case(check=output_checks.check_bandwidth, mutants=[NO_SUM]),
    "2": Case(  # its defaults: the page promises 98%
        ranks=1,
        others=(),
        mutants=[
            Mutant("        optimizer.step()\n", "", r"=> 1?\d\.\d\d% of .* \(limit \d\d%\), .*: W")
        ],
    ),
    "3": Case(
        f"{EPOCHS} --batch-size 84",
        chain=20,
        mutants=[
            Mutant(
                "torch.manual_seed(args.seed)",
                "torch.manual_seed(args.seed + dist.get_rank())",
                r"=> 2 ranks, 3,360 images, 2 different models \(limit 1\): WRONG",
            )
        ],
    ),
    "4": Case(
        SHARED,
        others=(1, 3, 7),
        cold=True,
        chain=20,
        mutants=[Mutant(FLAT, "", "parameters DIFFERENT on all ranks")],
    ),
    "5": Case(
        "--max-steps 5 --batch-size {share}",
        chain=10,  # with 5 steps to warm up
        check=output_checks.check_shares,
        mutants=[Mutant(FLAT, "", r"hidden by computing: nan% \(limit 5%\): WRONG")],
    ),
    "6": Case(
        SHARED,
        chain=20,
        check=output_checks.check_saved_model,
        mutants=[Mutant(WRAP, "ddp_model = model", FROM_ONE)],
    ),
    "test-profile": Case(
        check=output_checks.check_shares,
        mutants=[
            Mutant("DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)", "model", "nan%")
        ],
    ),
    "7": Case(
        f"{EPOCHS} --rounds 1 --batch-size 84",
        chain=20,
        mutants=[Mutant("world_size, dist.get_rank(), seed=", "1, 0, seed=", FROM_ONE)],
    ),
    "8": Case(
        "--images 3200",
        mutants=[
            Mutant("(world_size, args.lr * factor)", "(world_size, args.lr)", "linear .*: WRONG")
        ],
    ),
    "9": Case(ranks=4, cold=True, mutants=[NO_SUM]),
    "10": Case(SHARED, ranks=4, chain=20, check=output_checks.check_saved_model),
    "create_mnist_h5": Case(
        "--force --file {folder}/mnist.h5",
        ranks=1,
        others=(),
        mutants=[
            Mutant('file["images"][begin:end] = images  # goes', "# goes", "NOT as written: WRONG")
        ],
    ),
    "11": Case(
        "--file {folder}/mnist.h5 --epochs 1 --max-steps 5",
        reads="create_mnist_h5",
        mutants=[
            Mutant("self.rank = rank\n", "self.rank = 0\n", ONCE.format(320), quick=True),
            Mutant(
                "torch.randperm(len(labels), generator=generator)",
                "torch.arange(len(labels))",
                ", 1% as mixed .*: WRONG",
            ),
            Mutant("stream.set_epoch(epoch)", "stream.set_epoch(0)", ", 1 orders ", "--epochs 2"),
            Mutant(WRAP, "ddp_model = model", FROM_MEMORY),
        ],
    ),
    # torchrun starts a job again that ends with 1. That must not make it right: two more starts.
    "12": Case(
        "--images 1280 --batch-size 32 --save-every 4 --crash-at-step 6",
        cold=True,
        check=output_checks.check_that_the_model_stays,
        mutants=[
            Mutant(
                'self.optimizer.load_state_dict(state["optimizer"])\n',
                "\n",
                FORGOTTEN.format("1,280"),
                starts=3,
                quick=True,
            ),
            Mutant(
                "order[seen + self.rank ::", "order[self.rank ::", FORGOTTEN.format("768"), starts=3
            ),
        ],
    ),
    "13": Case(  # its losses: test_take_home.py
        "1 --max-steps 12 --global-batch-size 50 --log-every 2 --workers 1 --clip 0.3",
        mutants=[
            Mutant(
                "(positions < count)", "(positions < count + 9)", "^=> 10,002 of 10,000 ", ranks=3
            ),
            Mutant(
                "x.contiguous().clone() for", "x.contiguous() + 0.001 for", " 0 of 8 tensors equal"
            ),
        ],
    ),
    "14": Case(
        "--max-steps 20 --batch-size 16",
        check=output_checks.check_what_is_sent,
        mutants=[
            # Less is sent, but it learns worse.
            Mutant(
                'if as_well and 0 < row["given"] < rows[best]["given"]',
                'if way == "accumulation"',
                r"^=> accumulation: 0.25 .* loss \+\d+\.\d% \(limit \+2%\): WRONG$",
            )
        ],
    ),
    "15": Case(
        "--max-steps 12",
        others=(1, 4),  # it refuses 3: their parts would not be equal
        check=output_checks.check_that_it_learns,
        mutants=[
            Mutant(
                "reshard_after_forward=True",
                "reshard_after_forward=False",
                r"parameters at most 1\.\d+ MB \(limit 0\.657\): WRONG",
            ),
            Mutant("flatten(gradients) / dist.get_world_size()", "flatten(gradients)", FROM_ONE),
        ],
    ),
    "16": Case("--max-steps 4", ranks=4),
    "17": Case(
        "--max-steps 3",
        ranks=4,
        # The losses are right. Only the counts tell.
        mutants=[
            Mutant("min(stages - 1 - stage, micro_batches)", "micro_batches", HELD, quick=True)
        ],
    ),
    "18": Case(
        ranks=4,
        mutants=[
            Mutant(
                "return debugging_hooks.noop_hook(state, bucket)",
                "return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()"
                ".then(lambda sent: sent.value()[0])",
                "but steps that should send nothing have sent",
                "--batch-size 4",
            ),
            # The messages are not those of the link.
            Mutant(
                "max(sent, moment) + all_reduce_ms(",
                "max(sent, moment) + 80 * all_reduce_ms(",
                r"\d{3,}% apart .*: WRONG",
                "--batch-size 4",
            ),
        ],
    ),
    "create_ratings": Case(
        "--force --folder {folder}/ratings --copies 3 --files 12",
        ranks=1,
        others=(),
        mutants=[
            Mutant(
                "order[number :: args.files]]",
                "order[number + 1 :: args.files]]",
                "NOT as written: W",
            )
        ],
    ),
    "19": Case(
        "--folder {folder}/ratings --epochs 1 --batch-size 504 --lr 0.03",
        reads="create_ratings",
        mutants=[
            Mutant("set_result(average)", "set_result(gradient)", ", tables DIFFERENT: WRONG$"),
            Mutant(
                "        optimizer.step()\n", "", r"^=> RMSE .*, -?0\.0% below movie means .* id"
            ),
        ],
    ),
    "20": Case(
        mutants=[
            Mutant(
                "accelerator.prepare(model, optimizer, loader)",
                "model, optimizer, loader",
                r"losses within \de(-0[1-3]|\+\d\d) of those without Accelerate",
                "--epochs 5",
            )
        ]
    ),
    "21": Case(ranks=4, others=(1, 2, 8), mutants=[Mutant(*x, OFF, ranks=4) for x in LAYOUT_LOST]),
}
