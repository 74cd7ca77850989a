"""The lessons on GPUs that are not there: what they choose and read can be tested without.

sitecustomize.py answers for the GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import gpus
from support.run import ROOT, load_lesson

FOLDER = Path(__file__).parent


def test_the_lessons_choose_what_the_table_of_a_page_says():
    """The table has a row for each machine, number of ranks and mask. Some must hold on any."""
    page = "day2/SITES.md"
    env = {name: value for name, value in os.environ.items() if name not in gpus.MASKS}
    env |= {"PYTHONPATH": str(FOLDER), "STANDIN_GPUS": "4"}
    # torch 2.6 leaves it to Python's end to delete a temporary folder.
    strict = ["-W", "error", "-W", "ignore::ResourceWarning"]
    command = [sys.executable, *strict, FOLDER / "devices.py", page]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout
    assert answers in (ROOT / page).read_text()
    for line in answers.splitlines():
        there, ranks, _, device, taken, backend, lesson_20 = line[1:-1].split("|")
        own = len(set(taken.split())) == int(ranks)
        if backend.strip() in ("nccl", "xccl"):
            assert own, line  # neither takes two ranks on one GPU
        if device.strip() == "xpu":
            assert backend.strip() == "xccl", line  # gloo cannot carry its tensors
        if there.strip() == "4 GPUs" and own:
            assert backend.strip() == "nccl", line
        assert ("CPU" in lesson_20) == (backend.strip() == "gloo"), line


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
