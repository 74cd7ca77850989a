"""Each lesson without its key line: its proof line must say WRONG, and by how much.

A new lesson needs a line here. The first one of a lesson is in the quick suite.
"""

from typing import NamedTuple

import pytest
from support.cases import ONE_PROCESS, arguments_of
from support.mutants import assert_disproved, run_mutant


class Mutant(NamedTuple):
    """A line, what stands there when somebody gets it wrong, and what the proof line says then."""

    line: str
    wrong: str
    says: str  # a pattern
    options: str = ""  # besides those that make the lesson short
    ranks: int = 2


SUM = "    dist.all_reduce(value, op=dist.ReduceOp.SUM)\n"
FLAT = "    dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n"
WRAP = "ddp_model = DistributedDataParallel(model)"
NO_SUM = Mutant(SUM, "", r"every rank holds 0, 1; the sum 0\+1 is 1: WRONG")
APART = r"losses within \de(-0[1-4]|\+\d\d) of {} \(limit 1e-05\)"
FROM_ONE = APART.format("one process")
# Lesson 15: a part, a layer and positions would be 0.657 MB.
AT_MOST_ALL = r"parameters at most 1\.\d+ MB \(limit 0\.657\): WRONG"
FROM_MEMORY = APART.format("those from memory")
HELD = r"idle \d+\.\d% of slots, at most {} micro-batches held, .*, NOT as the formulas say: WRONG$"
ONCE = r"^=> {} of 60,000 images once an epoch \(limit 640\), .*: WRONG$"
NOT_SCALED = Mutant(
    "(world_size, args.lr * factor)", "(world_size, args.lr)", r"linear \(limit \d+%\): WRONG"
)
MUTANTS = {
    "0": [NO_SUM, Mutant("ReduceOp.SUM", "ReduceOp.MIN", r"holds 0; the sum 0\+1 is 1")],
    "1": [NO_SUM],
    "2": [Mutant("        optimizer.step()\n", "", r"=> 1?\d\.\d\d% of .* \(limit \d\d%\), .*: W")],
    "3": [
        Mutant(
            "torch.manual_seed(args.seed)",
            "torch.manual_seed(args.seed + dist.get_rank())",
            r"=> 2 ranks, 2,560 images, 2 different models \(limit 1\): WRONG",
        )
    ],
    "4": [
        Mutant("    flat /= dist.get_world_size()", "    pass", f"identical .*, {FROM_ONE}"),
        Mutant(FLAT, "", "parameters DIFFERENT on all ranks"),
        Mutant("(train_set, seed=", "(train_set, 1, 0, seed=", FROM_ONE),
    ],
    "5": [Mutant(FLAT, "", r"hidden by computing: nan% \(limit 5%\): WRONG")],
    "6": [Mutant(WRAP, "ddp_model = model", FROM_ONE)],
    "test-profile": [
        Mutant(
            "DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)",
            "model",
            "by computing: nan%",
        )
    ],
    "7": [
        Mutant(WRAP, "pass", FROM_ONE),
        Mutant("world_size, dist.get_rank(), seed=", "1, 0, seed=", FROM_ONE),
    ],
    "8": [NOT_SCALED],
    "9": [NO_SUM],
    "10": [Mutant(WRAP, "ddp_model = model", FROM_ONE)],
    "create_mnist_h5": [
        Mutant('file["images"][begin:end] = images  # goes', "# goes", "NOT as written: WRONG")
    ],
    "11": [
        Mutant("        self.rank = rank\n", "        self.rank = 0\n", ONCE.format(320)),
        Mutant("(self.rank * workers + worker)", "self.rank", ONCE.format(r"3\d\d"), "--workers 2"),
        Mutant(
            "torch.randperm(len(labels), generator=generator)",
            "torch.arange(len(labels))",
            r", 1% as mixed as by a full shuffle \(limit 25%\), .*: WRONG",
        ),
        Mutant(
            "order = torch.randperm(self.chunks, generator=generator)",
            "order = torch.arange(self.chunks)",
            r", 4% as mixed as by a full shuffle \(limit 25%\), .*: WRONG",
        ),
        Mutant(
            "        stream.set_epoch(epoch)",
            "        stream.set_epoch(0)",
            r", 1 orders \(limit 2\), ",
            "--epochs 2",
        ),
        Mutant(WRAP, "ddp_model = model", FROM_MEMORY),
    ],
    "create_ratings": [
        Mutant(
            "order[number :: args.files]]", "order[number + 1 :: args.files]]", "NOT as written: W"
        )
    ],
    "19": [
        Mutant("set_result(average)", "set_result(gradient)", ", tables DIFFERENT: WRONG$"),
        Mutant("        optimizer.step()\n", "", r"^=> RMSE .*, -?0\.0% below movie means .* id"),
    ],
    "20": [
        Mutant(
            "accelerator.prepare(model, optimizer, loader)",
            "model, optimizer, loader",
            r"losses within \de(-0[1-3]|\+\d\d) of those without Accelerate",
            "--epochs 5",
        ),
    ],
    "14": [
        # Less is sent, but it learns worse.
        Mutant(
            'if as_well and 0 < row["given"] < rows[best]["given"]',
            'if way == "accumulation"',
            r"^=> accumulation: 0.25 .* loss \+\d+\.\d% \(limit \+2%\): WRONG$",
        )
    ],
    "15": [
        # Nothing is freed after the forward pass.
        Mutant("reshard_after_forward=True", "reshard_after_forward=False", AT_MOST_ALL),
        Mutant("piece.register_forward_hook(self.free)", "pass", AT_MOST_ALL),
        # The sum of the gradients, not the mean.
        Mutant("flatten(gradients) / dist.get_world_size()", "flatten(gradients)", FROM_ONE),
        # The whole model on every rank before it is divided.
        Mutant('torch.device("meta")', "device", AT_MOST_ALL),
    ],
    "18": [
        Mutant(
            "return debugging_hooks.noop_hook(state, bucket)",
            "return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then("
            "lambda sent: sent.value()[0])",
            "but steps that should send nothing have sent",
            "--batch-size 4",
        ),
        # The messages are not those of the link.
        Mutant(
            "max(sent, moment) + all_reduce_ms(",
            "max(sent, moment) + 80 * all_reduce_ms(",
            r"\d{3,}% apart \(limit 100%\); worth",
            "--batch-size 4",
        ),
    ],
    "16": [
        Mutant(
            "return AddUp.apply(gradient, context.group), None", "return gradient, None", FROM_ONE
        ),
        # The bias is added on every rank.
        Mutant(
            "AddUp.apply(part, self.group) + self.bias",
            "AddUp.apply(part + self.bias, self.group)",
            FROM_ONE,
        ),
        # Those that have the same layers do not average.
        Mutant(
            '        dist.all_reduce(flat, group=mesh.get_group("data"))\n', "", FROM_ONE, ranks=4
        ),
        # Each of three column-wise layers adds up: right, but more messages.
        Mutant(
            'plan = {"norm1": copy, "norm2": copy}',
            "plan = {}",
            r"messages NOT as the formula says: WRONG$",
        ),
    ],
    "17": [
        Mutant(
            "targets[number].flatten()) / micro_batches", "targets[number].flatten())", FROM_ONE
        ),
        Mutant("y.backward(gradient)", "(micro_batches * y).backward(gradient)", FROM_ONE),
        # The losses are right. Only the counts tell.
        Mutant("min(stages - 1 - stage, micro_batches)", "micro_batches", HELD.format("8 and 8")),
        Mutant("min(stages - 1 - stage, micro_batches)", "0", HELD.format("8 and 1")),
    ],
}


def quick_and_full():
    """Return each lesson with each of its mutants."""
    return [
        pytest.param(lesson_id, mutant, marks=[pytest.mark.full] * (place > 0))
        for lesson_id, mutants in MUTANTS.items()
        for place, mutant in enumerate(mutants)
    ]


@pytest.mark.parametrize(("lesson_id", "mutant"), quick_and_full())
def test_without_its_key_line_a_lesson_proves_nothing(
    lesson_id, mutant, tmp_path, tmp_path_factory
):
    ranks = 1 if lesson_id in ONE_PROCESS else mutant.ranks
    arguments = arguments_of(lesson_id, tmp_path, tmp_path_factory) + mutant.options.split()
    change = (mutant.line, mutant.wrong)
    output = run_mutant(lesson_id, change, ranks, *arguments, cwd=tmp_path)
    assert_disproved(output, mutant.says)
