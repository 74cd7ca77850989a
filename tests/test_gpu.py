"""The lessons on GPUs that are not there: what they choose, read and round can be tested without.

tests/standin answers for the GPUs. Nothing here has run on one.
"""

import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from operator import attrgetter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import LESSONS, ROOT, load, load_lesson, proof_of
from launcher.gpus import MASKS
from mutants import write_mutant
from ranks import run_ranks
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STANDIN = ROOT / "tests" / "standin"
PAGES = {  # where the tables of the days are
    "day1": ROOT / "day1" / "1_torch_dist_gpu.md",
    "day2": ROOT / "day2" / "9_torch_dist_multi_node.md",
}
PROOF_LIMIT = 9.5e-5  # what the proof of lesson 4 lets pass, as a number


def stand_in(code, **variables):
    """Run Python code with the stand-in at work; return what it prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STANDIN_"))}
    env = {k: v for k, v in env.items() if k not in MASKS}
    env |= {"PYTHONPATH": str(STANDIN), **variables}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


# ---------------------------------------------------------------- the stand-in itself


UUIDS = """
import torch
kind = torch.accelerator.current_accelerator()
device = torch.get_device_module(kind) if kind else None
uuids = [device.get_device_properties(i).uuid for i in range(torch.accelerator.device_count())]
print(kind, torch.version.cuda is None, torch.version.hip is None, *(x[4:8] for x in uuids))
"""


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"STANDIN_GPUS": "2"}, "cuda False True 0000 0001"),
        ({"STANDIN_GPUS": "4", "CUDA_VISIBLE_DEVICES": "3,1"}, "cuda False True 0003 0001"),
        ({"STANDIN_GPUS": "4", "CUDA_VISIBLE_DEVICES": "GPU-5ad10002"}, "cuda False True 0002"),
        (
            {"STANDIN_KIND": "hip", "STANDIN_GPUS": "8"}
            | {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"},
            "cuda True False 0006 0004",
        ),
        (
            {"STANDIN_KIND": "xpu", "STANDIN_GPUS": "4", "ZE_AFFINITY_MASK": "3"},
            "xpu True True 0003",
        ),
        ({"STANDIN_KIND": "none", "STANDIN_GPUS": "4"}, "None True True"),
    ],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_the_stand_in_answers_as_torch_would(variables, says):
    assert stand_in(UUIDS, **variables) == says


def test_the_stand_in_parses_masks_as_torch_does():
    """torch's own parser is asked for the same masks; it knows nothing of the stand-in."""
    standin = load(STANDIN / "sitecustomize.py")
    for mask in ("", "0", "0,2", "3,1,0", "2,2", "-1", "1,-1,2", "7", "0,9,1", " 2 , 3 "):
        env = {"STANDIN_GPUS": "4", "STANDIN_KIND": "cuda", "CUDA_VISIBLE_DEVICES": mask}
        with mock.patch.dict(os.environ, env):
            parsed = torch.cuda._parse_visible_devices()
            # torch leaves to the driver how many there are, and what comes after one too many.
            within = next((i for i, x in enumerate(parsed) if x >= 4), len(parsed))
            assert standin.visible() == parsed[:within], mask


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_the_tests_hide_the_gpus_of_the_machine(kind):
    """conftest.py does: a real GPU would be used, and NCCL's errors have other words."""
    hidden = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
    code = "import torch; print(torch.accelerator.device_count())"
    assert stand_in(code, STANDIN_KIND=kind, STANDIN_GPUS="4") == "4"
    assert stand_in(code, STANDIN_KIND=kind, STANDIN_GPUS="4", **hidden) == "0"


# ---------------------------------------------------------------- what the lessons choose


@pytest.mark.parametrize("day", PAGES)
def test_the_pages_show_what_the_lessons_choose(day):
    shown = re.search(
        rf"<!-- begin devices {day} -->\n(.*?)<!-- end -->", PAGES[day].read_text(), re.S
    )[1]
    made = runpy.run_path(str(STANDIN / "devices.py"))["make"](day)
    print(made)
    assert shown == made


def rows(day):
    """Return the table of a page, {(what is there, ranks, mask): (device, GPUs, backend, ...)}."""
    lines = PAGES[day].read_text().partition(f"<!-- begin devices {day} -->\n")[2].splitlines()
    table = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]
    return {tuple(row[:3]): row[3:] for row in table[: lines.index("<!-- end -->") - 2]}


def test_the_rules_hold_in_each_row():
    """What must be so on any machine, whatever choose_device looks like."""
    both = {**rows("day1"), **rows("day2")}
    assert len(both) == 34
    for there, (device, gpus, backend, *lesson_15) in both.items():
        ranks, gpus = int(there[1]), gpus.split()
        if backend in ("nccl", "xccl"):
            assert len(set(gpus)) == ranks, there  # neither takes two ranks on one GPU
        if device == "xpu":
            assert backend == "xccl", there  # gloo cannot carry its tensors
        assert (device == "cpu") == (not gpus), there
        assert lesson_15 in ([], ["CPU" if backend == "gloo" else "GPU"]), there
    # A rank of its own GPU, where it can be.
    assert both["`srun`, each task sees one GPU", "4", "`CUDA_VISIBLE_DEVICES=0` to `3`"][2] == (
        "nccl"
    )
    assert both["the same with a mask", "4", "`CUDA_VISIBLE_DEVICES=0`"][2] == "gloo"


# Where TF32 is switched: torch 2.9 has new names, and warns of the old ones.
OF_CONV, OF_MATMUL, USUAL, EXACT = "allow_tf32", "allow_tf32", True, False
if hasattr(torch.backends.cudnn, "conv"):
    OF_CONV, OF_MATMUL, USUAL, EXACT = "conv.fp32_precision", "fp32_precision", "tf32", "ieee"
FLAGS = """
import runpy, torch
b = torch.backends
read = lambda: (b.cudnn.deterministic, b.mkldnn.deterministic, b.cudnn.{conv},
                b.cuda.matmul.{matmul})
before = read()
lesson = runpy.run_path({file!r})
lesson["choose_device"](0, 1)
print(before, read())
"""


@pytest.mark.parametrize("lesson_id", ["2", "9"])
def test_runs_are_comparable_also_in_nvidias_containers(lesson_id):
    """The flags are set with no warning, which is an error here."""
    code = FLAGS.format(file=LESSONS[lesson_id]["file"], conv=OF_CONV, matmul=OF_MATMUL)
    said = stand_in(code, STANDIN_GPUS="1", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    assert said == f"{(False, False, USUAL, USUAL)} {(True, True, EXACT, EXACT)}"


# ---------------------------------------------------------------- TF32, imitated


def to_tf32(x):
    """Return float32 numbers rounded to the nearest with TF32's 10 bits after the point."""
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class Tf32Conv(torch.autograd.Function):
    """conv2d as cuDNN computes it with TF32: factors are rounded, sums are float32."""

    @staticmethod
    def forward(ctx, x, weight, stride):
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return torch.conv2d(to_tf32(x), to_tf32(weight), None, stride)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = map(to_tf32, ctx.saved_tensors)
        gradient, shapes = to_tf32(gradient), torch.nn.grad
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = shapes.conv2d_input(x.shape, weight, gradient, ctx.stride)
        return of_x, shapes.conv2d_weight(x, weight.shape, gradient, ctx.stride), None


class Tf32Linear(torch.autograd.Function):
    """x @ weight.T as cuBLAS computes it with TF32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return to_tf32(x) @ to_tf32(weight).T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = map(to_tf32, ctx.saved_tensors)
        gradient = to_tf32(gradient)
        return gradient @ weight, gradient.T @ x


def conv2d(x, weight, bias=None, stride=1, *rest):
    """conv2d as on a GPU that has TF32: the flag of PyTorch decides."""
    if attrgetter(OF_CONV)(torch.backends.cudnn) == EXACT:
        return torch.conv2d(x, weight, bias, stride)
    return Tf32Conv.apply(x, weight, stride) + bias[:, None, None]


def linear(x, weight, bias):
    """As conv2d."""
    if not torch.backends.cuda.matmul.allow_tf32:
        return torch.addmm(bias, x, weight.T)
    return Tf32Linear.apply(x, weight) + bias


def gap(lesson, data, ranks, seed, steps=20, batch_size=64):
    """Return how far the losses of lesson 4's ranks are from those of one process."""
    orders = [
        torch.tensor([*DistributedSampler(data[0], ranks, rank, seed=seed)][: steps * batch_size])
        for rank in range(ranks)
    ]
    alone = [torch.stack(orders, 1).flatten()]  # as one process takes them

    def losses(orders):
        torch.manual_seed(seed)
        model = lesson.Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
        history = []
        for indices in zip(*(order.chunk(steps) for order in orders)):
            optimizer.zero_grad()
            parts = [F.cross_entropy(model(data[0][i]), data[1][i]) for i in indices]
            loss = sum(parts) / len(parts)
            loss.backward()  # the mean of the ranks' gradients, as they average it
            optimizer.step()
            history.append(loss.detach())
        return torch.stack(history)

    return (losses(orders) - losses(alone)).abs().max().item()


@pytest.fixture
def _flags():
    """What choose_device sets is taken back."""
    backends = torch.backends
    flags = [(backends.cudnn, "deterministic"), (backends.mkldnn, "deterministic")]
    *inner, name = OF_CONV.split(".")
    flags += [(getattr(backends.cudnn, *inner) if inner else backends.cudnn, name)]
    flags += [(backends.cuda.matmul, "allow_tf32")]
    before = [getattr(*flag) for flag in flags]
    yield
    for flag, value in zip(flags, before):
        setattr(*flag, value)


@pytest.mark.usefixtures("_flags")
def test_with_tf32_the_losses_would_drift_apart():
    """Imitated: the flags decide whether factors are rounded. How far losses drift is chance."""
    lesson = load_lesson("4")
    data = lesson.load_mnist(ROOT / "data")[0].tensors
    runs = [(ranks, seed) for ranks in (2, 3, 4) for seed in (0, 1)]
    answers = {"device_count": 4, "current_accelerator": torch.device("cuda")}
    gpu = mock.Mock(**{f"{name}.return_value": value for name, value in answers.items()})
    with mock.patch.multiple(F, conv2d=conv2d, linear=linear):
        assert attrgetter(OF_CONV)(torch.backends.cudnn) == USUAL  # as PyTorch has it
        torch.backends.cuda.matmul.allow_tf32 = True  # as NVIDIA's containers have it
        default = [gap(lesson, data, *run) for run in runs]
        with mock.patch.object(torch, "accelerator", gpu):
            lesson.choose_device(0, 4)
        chosen = [gap(lesson, data, *run) for run in runs]
    print("TF32:", default, "float32:", chosen)
    assert max(chosen) < PROOF_LIMIT
    assert statistics.median(chosen) < 1e-6  # "losses within 5e-07", says the page
    assert statistics.median(default) > 3 * statistics.median(chosen)


# ---------------------------------------------------------------- traces, made up


def span(name, cat, begin, end):
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin}


def shares(events, tmp_path):
    """Return what the lessons make of a trace: 100 microseconds, one step."""
    events = [span("ProfilerStep#5", "user_annotation", 0, 100), *events]
    (trace := tmp_path / "rank0.1.pt.trace.json").write_text(json.dumps({"traceEvents": events}))
    got = load_lesson("test-profile").time_shares(trace)
    # One flag per microsecond, both ends of the time included.
    return {kind: round(share * 101) for kind, share in got.items()}


MARK = load_lesson("test-profile").DATA
# The CPU asks for the work in the first 20, and the GPU does it later. It takes the data from 20 to
# 30, computes from 30 to 60 and from 80 to 90. c10d:: and nccl: are the CPU's calls.
ON_GPU = [
    span(MARK, "user_annotation", 0, 10),
    span(MARK, "gpu_user_annotation", 20, 30),
    span("aten::index_select", "cpu_op", 0, 10),
    span("aten::conv2d", "cpu_op", 10, 20),
    span("index_kernel", "kernel", 20, 30),
    span("implicit_convolve_sgemm", "kernel", 30, 60),
    span("sgd_kernel", "kernel", 80, 90),
]
KERNELS = {
    "NCCL": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "NCCL before 2.19": "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)",
    "NCCL, symmetric": "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(ncclSymkDevWorkArgs4K)",
    "RCCL": "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "oneCCL": "oneccl_allreduce_small<float>",
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_kernel_that_sends_is_communication(kernel, tmp_path):
    backend = "xccl" if "oneccl" in kernel else "nccl"  # RCCL answers to NCCL's name
    events = [
        *ON_GPU,
        span("c10d::allreduce_", "cpu_op", 18, 20),
        span(f"{backend}:all_reduce", "user_annotation", 18, 20),
        span(f"{backend}:all_reduce", "gpu_user_annotation", 50, 80),
        span(kernel, "kernel", 50, 80),
    ]
    expected = {"data": 10, "compute": 40, "communication": 30, "overlap": 10, "idle": 31}
    assert shares(events, tmp_path) == expected


def test_gloo_on_a_shared_gpu_counts_from_the_copy(tmp_path):
    """gloo's bar begins while the GPU still computes what is to be sent. Nothing is hidden."""
    events = [
        *ON_GPU,
        span("gloo:all_reduce", "user_annotation", 22, 80),
        span("gloo:all_reduce", "gpu_user_annotation", 60, 80),
        span("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 60, 65),
        span("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 78, 80),
    ]
    expected = {"data": 10, "compute": 40, "communication": 15, "overlap": 0, "idle": 36}
    assert shares(events, tmp_path) == expected


def test_gloo_that_sends_while_the_gpu_computes_is_hidden(tmp_path):
    events = [
        *ON_GPU,
        span("gloo:all_reduce", "user_annotation", 32, 70),
        span("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 38, 40),
    ]
    expected = {"data": 10, "compute": 40, "communication": 30, "overlap": 20, "idle": 41}
    assert shares(events, tmp_path) == expected


def test_data_without_marks_of_the_gpu_is_the_cpus(tmp_path):
    """A profiler that does not carry marks over to the GPU, as some have none for Intel's."""
    events = [e for e in ON_GPU if e["cat"] != "gpu_user_annotation"]
    assert shares(events, tmp_path)["data"] == 10


def test_data_that_the_cpu_loads_while_the_gpu_computes_is_hidden(tmp_path):
    """A loader on the CPU, and a GPU that still works on the batch before."""
    events = [
        span(MARK, "user_annotation", 20, 50),
        span("aten::stack", "cpu_op", 20, 45),
        span("implicit_convolve_sgemm", "kernel", 0, 40),
    ]
    expected = {"data": 10, "compute": 40, "communication": 0, "overlap": 0, "idle": 51}
    assert shares(events, tmp_path) == expected


def test_the_name_of_lesson_5s_loader_is_that_of_the_trace(tmp_path):
    images = torch.zeros(8, 2)
    loader = DataLoader(TensorDataset(images, images), batch_size=4)
    with torch.profiler.profile() as profiler:
        list(loader)
    names = {event.key for event in profiler.key_averages()}
    assert [name for name in names if name.startswith(load_lesson("5").DATA)]


def test_gloo_between_cpus(tmp_path):
    events = [
        span(MARK, "user_annotation", 0, 10),
        span("aten::conv2d", "cpu_op", 10, 50),
        span("c10d::allreduce_", "cpu_op", 40, 42),
        span("gloo:all_reduce", "user_annotation", 40, 80),
    ]
    expected = {"data": 10, "compute": 40, "communication": 40, "overlap": 10, "idle": 21}
    assert shares(events, tmp_path) == expected


# ---------------------------------------------------------------- lesson 15


def test_dist_timeout_reaches_lesson_15(tmp_path):
    """A rank that leaves a collective out: the other one gives up after DIST_TIMEOUT."""
    text = (ROOT / LESSONS["15"]["file"]).read_text()
    line = "    expected = train_by_hand(train_set, accelerator, args)\n"
    assert text.count(line) == 1
    late = "    if accelerator.process_index == 1:\n        time.sleep(60)\n"
    mutant = tmp_path / "mutant.py"
    mutant.write_text(text.replace(line, late + line))
    env = {"DIST_TIMEOUT": "4"}
    status, output = run_ranks(2, mutant, "--epochs", 1, cwd=tmp_path, env=env, timeout=50)
    assert status != 0
    assert "4000ms" in output


# In place of a GPU for each rank, of which its process sees no other: NCCL's barrier would take
# memory of the GPU that it is given.
ONE_VISIBLE = """
import runpy, sys, torch.distributed as dist
barrier = dist.barrier
def barrier_on_a_gpu(*args, device_ids=None, **options):
    if device_ids and device_ids[0] > 0:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return barrier(*args, **options)
dist.barrier = barrier_on_a_gpu
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_lesson_15_ends_where_each_rank_sees_one_gpu(tmp_path):
    (run := tmp_path / "run.py").write_text(ONE_VISIBLE)
    file = ROOT / LESSONS["15"]["file"]
    status, output = run_ranks(2, run, file, cwd=tmp_path, timeout=120)
    assert status == 0, output
    assert "invalid device ordinal" not in output


# ---------------------------------------------------------------- torch, built without CUDA


# How to run each lesson in seconds: ranks, arguments, and what must have been run before. {0} is a
# folder. All lessons are here, and a test says so.
SHORT = {
    "0": (2, []),
    "1": (2, []),
    "2": (1, ["--epochs", "1", "--max-steps", "20"]),
    "3": (2, ["--epochs", "1", "--max-steps", "5"]),
    "4": (2, ["--epochs", "1", "--max-steps", "5"]),
    "5": (2, ["--max-steps", "3"]),
    "6": (2, ["--epochs", "1", "--max-steps", "5"]),
    "test-profile": (2, []),
    "7": (2, ["--rounds", "1", "--max-steps", "10"]),
    "8": (2, ["--images", "640"]),
    "9": (2, []),
    "10": (2, ["--images", "640"]),
    "create_mnist_h5": (1, ["--file", "{0}/mnist.h5"]),
    "11": (2, ["--file", "{0}/mnist.h5", "--epochs", "1", "--max-steps", "20"], "create_mnist_h5"),
    "12": (2, ["--images", "2000", "--epochs", "1", "--save-every", "10"]),
    "13": (2, ["--epochs", "1", "--max-steps", "10"]),
    "create_ratings": (1, ["--folder", "{0}/ratings", "--copies", "1", "--files", "8"]),
    "14": (2, ["--folder", "{0}/ratings", "--epochs", "1", "--max-steps", "5"], "create_ratings"),
    "15": (2, ["--epochs", "2"]),
    "16": (2, ["--max-steps", "6"]),
    "17": (2, ["--max-steps", "5"]),
    "18": (2, ["--steps", "5", "--batch-size", "8"]),
}


def run_without_cuda(lesson_id, cwd, file=None, *more):
    """Run a lesson with a torch that has no CUDA; return (exit status, output)."""
    ranks, arguments, *before = SHORT[lesson_id]
    for other in before:
        status, output = run_without_cuda(other, cwd)
        assert status == 0, output
    arguments = [*(argument.format(cwd) for argument in arguments), *more]
    file = file or ROOT / LESSONS[lesson_id]["file"]
    env = {"STANDIN_KIND": "none"}
    return run_ranks(ranks, STANDIN / "run.py", file, *arguments, cwd=cwd, env=env, timeout=120)


def test_each_lesson_can_be_run_short():
    assert list(SHORT) == list(LESSONS), "SHORT in tests/test_gpu.py"


@pytest.mark.no_cuda
@pytest.mark.parametrize("lesson_id", SHORT)
def test_it_runs_on_a_torch_without_cuda_and_without_a_warning(lesson_id, tmp_path):
    """So short a run may say WRONG. run.py makes FutureWarning and UserWarning errors."""
    _, output = run_without_cuda(lesson_id, tmp_path)
    assert "Traceback" not in output, output
    assert "Warning" not in output, output  # of PyTorch's C++, too
    if "cannot shard on CPUs" in output:
        pytest.skip("this torch cannot run lesson 17 on CPUs")
    assert proof_of(output), output


@pytest.mark.no_cuda
def test_there_ddp_refuses_pytorchs_own_hook(tmp_path):
    """It is for this that lesson 16 has a function of its own."""
    line = 'hook = send_bf16 if way == "bf16" else default_hooks.allreduce_hook'
    refused = line.replace("send_bf16", "default_hooks.bf16_compress_hook")
    mutant = write_mutant(tmp_path, "16", (line, refused))
    status, output = run_without_cuda("16", tmp_path, mutant, "--data-dir", ROOT / "data")
    assert status != 0
    assert "BF16 all reduce communication hook required CUDA" in output
