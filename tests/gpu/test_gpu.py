"""The lessons on GPUs that are not there: what they choose and read can be tested without.

sitecustomize.py answers for the GPUs.
"""

import json
import re

import pytest
import torch
from catalog import load
from launcher import gpus
from support.run import ROOT, load_lesson

STAND_IN = load("tests/gpu/sitecustomize.py")
# The rows of a page's table: what is there, ranks, mask, and what each rank then takes.
PAGE = (ROOT / "day2" / "SITES.md").read_text()
ROWS = re.search(r"\n\| what is there .*\n\| --- .*\n((?:\| .*\n)+)", PAGE)[1].splitlines()
FOUR = {"STANDIN_GPUS": "4"}
TASK = FOUR | {"SLURM_GPUS_ON_NODE": "4"}
AMD, INTEL = FOUR | {"STANDIN_KIND": "hip"}, FOUR | {"STANDIN_KIND": "xpu"}
# What is there, where it is not just four GPUs.
MACHINES = {
    "no GPU": {"STANDIN_KIND": "none"},
    "4 GPUs, divided (MIG)": FOUR | {"STANDIN_MIG": "1"},
    "4 GPUs of AMD": AMD,
    "4 GPUs of Intel": INTEL,
    "`srun`, each task sees all GPUs": TASK,
    "`srun`, each task sees one GPU": TASK,
    "`srun`, each task sees the parts of divided GPUs (MIG)": TASK | {"STANDIN_MIG": "1"},
}


@pytest.fixture
def be(monkeypatch):
    """A function that makes this process one with these variables, on that machine."""

    def become(variables):
        for name in ("GPUS_ON_NODE", "SLURM_GPUS_ON_NODE", *gpus.MASKS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for answer in STAND_IN.answers(torch):
            monkeypatch.setattr(*answer)
        # Who gets a GPU by the name that the launcher knows sees that one.
        name, found = gpus.name_gpus(torch)
        seen = STAND_IN.visible() if STAND_IN.is_available() else []
        for gpu, own in zip(seen, found, strict=True):
            with monkeypatch.context() as patch:
                patch.setenv(name, own)
                assert STAND_IN.visible() == [gpu], (name, own)
        return seen

    return become


@pytest.mark.parametrize("row", ROWS)
def test_the_lessons_choose_what_the_page_says(row, be, monkeypatch):
    there, ranks, mask, *expected = (cell.strip() for cell in row[1:-1].split("|"))
    accelerate = load_lesson("20")
    monkeypatch.setattr(accelerate, "Accelerator", lambda cpu, **_: "CPU" if cpu else "GPU")
    taken, chosen = [], set()
    for rank in map(str, range(int(ranks))):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        env |= MACHINES.get(there, FOUR)
        for name, value in re.findall(r"`(\w+)=([^`]*)`", mask):
            env[name] = rank if " to " in mask else value
        if "SLURM_GPUS_ON_NODE" in env and gpus.own_gpu_only(env):  # as for a task of Slurm
            env["GPUS_ON_NODE"] = env["SLURM_GPUS_ON_NODE"]
        seen = be(env)
        device, backend = load_lesson("10").choose_device(int(rank), int(ranks))
        chosen.add((device.type, backend, accelerate.make_accelerator()))
        if device.type != "cpu":
            taken.append(re.sub("MIG-.*", "a part", str(seen[device.index])))
    ((kind, backend, accelerator),) = chosen  # ranks that do not agree would never meet
    assert [kind, " ".join(taken), backend, accelerator] == expected
    if backend != "gloo":  # NCCL and XCCL take no two ranks on one GPU
        assert len(set(taken)) == int(ranks)


@pytest.mark.parametrize(
    ("machine", "masks"),
    [
        (FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-5ad10003"}),
        # HIP takes CUDA's variable, too, but its own wins.
        (AMD, {"CUDA_VISIBLE_DEVICES": "3,1"}),
        (AMD, {"CUDA_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "2"}),
        # Slurm sets ROCR's. What it leaves is counted from 0.
        (AMD, {"ROCR_VISIBLE_DEVICES": "2,3"}),
        (INTEL, {"CUDA_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "3,1"}),
    ],
)
def test_the_launcher_gives_gpus_by_names_that_the_masks_know(machine, masks, be):
    assert be(machine | masks)


MARK = load_lesson("test-profile").LOADING


def span(name, category, begin, end):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin}


def shares(folder, *events):
    """Return how many of 100 microseconds are data, compute, communication, overlap, idle."""
    step = span("ProfilerStep#5", "user_annotation", 0, 100)
    trace = folder / "rank0.1.pt.trace.json"
    trace.write_text(json.dumps({"traceEvents": [step, *events]}))
    found = load_lesson("test-profile").time_shares(trace)
    # One flag per microsecond, both ends of the time included.
    return tuple(round(share * 101) for share in found.values())


# The CPU asks for the work in the first 20, 10 of them for the data, and the GPU does it later: it
# computes from 20 to 60 and from 80 to 90. c10d:: and nccl: are the CPU's calls.
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
    "RCCL": "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "oneCCL": "oneccl_allreduce_small<float>",
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_kernel_that_sends_is_communication(kernel, tmp_path):
    backend = "xccl" if "oneccl" in kernel else "nccl"  # RCCL answers to NCCL's name
    sent = [
        span("c10d::allreduce_", "cpu_op", 18, 20),
        span(f"{backend}:all_reduce", "user_annotation", 18, 20),
        span(f"{backend}:all_reduce", "gpu_user_annotation", 50, 80),
        span(kernel, "kernel", 50, 80),
    ]
    assert shares(tmp_path, *ON_GPU, *sent) == (10, 50, 30, 10, 21)


def test_with_gloo_the_time_counts_from_the_copy_to_the_cpu(tmp_path):
    """On a GPU that ranks share. The bar begins while it still computes what is to be sent."""
    sent = [
        span("gloo:all_reduce", "user_annotation", 22, 80),
        span("gloo:all_reduce", "gpu_user_annotation", 60, 80),
        span("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 60, 65),
        span("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 78, 80),
    ]
    assert shares(tmp_path, *ON_GPU, *sent) == (10, 50, 15, 0, 26)
