"""The lessons on GPUs that are not there: what they choose and read can be tested without."""

import json
import os
import re

import pytest
import torch
from launcher import gpus
from support.run import ROOT, load_lesson

# The rows of a page's table: what is there, ranks, mask, and what each rank then takes.
PAGE = (ROOT / "day2" / "SITES.md").read_text()
ROWS = re.search(r"\n\| what is there .*\n\| --- .*\n((?:\| .*\n)+)", PAGE)[1].splitlines()
# What is there, where it is not just four GPUs of NVIDIA. mig: each of them is divided.
MACHINES = {
    "no GPU": "none",
    "4 GPUs, divided (MIG)": "mig",
    "4 GPUs of AMD": "hip",
    "4 GPUs of Intel": "xpu",
    "`srun`, each task sees the parts of divided GPUs (MIG)": "mig",
}


def choose(mask, devices):
    """Return those of the devices that a mask lets through, in its order. None lets all."""
    if mask is None:
        return devices
    chosen = []
    for entry in mask.split(","):
        fits = [d for i, d in enumerate(devices) if entry in (str(i), f"GPU-5ad1000{d}")]
        if not fits:
            break  # and what comes after it is not looked at
        chosen += fits
    return chosen


def visible(kind):
    """Return which of four GPUs torch sees in this process: numbers, or the name of a part."""
    devices, mask = [0, 1, 2, 3], os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind == "none":
        return []
    if kind == "xpu":
        mask = os.environ.get("ZE_AFFINITY_MASK") or None
    elif kind == "hip":
        # ROCR's comes first; HIP's counts what it leaves. An empty one hides nothing, -1 does.
        devices = choose(os.environ.get("ROCR_VISIBLE_DEVICES"), devices)
        mask = os.environ.get("HIP_VISIBLE_DEVICES") or mask or None
    elif kind == "mig":  # one part at most, as with CUDA
        parts = [f"MIG-{device}" for device in choose(mask, devices)]
        return (mask.split(",") if (mask or "").startswith("MIG-") else parts)[:1]
    return choose(mask, devices)


@pytest.fixture
def be(monkeypatch):
    """A function: this process gets variables on a machine of a kind. It returns the GPUs."""

    def become(kind, variables):
        for name in ("GPUS_ON_NODE", "SLURM_GPUS_ON_NODE", *gpus.MASKS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        seen = visible(kind)
        device = torch.device("xpu" if kind == "xpu" else "cuda")
        answers = {"device_count": lambda: len(seen), "set_device_index": seen.__getitem__}
        answers["current_accelerator"] = lambda **_: device if seen else None
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        monkeypatch.setattr(torch.version, "hip", "7.2" if kind == "hip" else None)
        # Who gets a GPU by the name that the launcher knows sees that one.
        name, found = gpus.name_gpus(torch)
        for gpu, own in zip(seen, found, strict=True):
            with monkeypatch.context() as patch:
                patch.setenv(name, own)
                assert visible(kind) == [gpu], (name, own)
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
        for name, value in re.findall(r"`(\w+)=([^`]*)`", mask):
            env[name] = rank if " to " in mask else value
        if "each task" in there and "not set" not in there and gpus.own_gpu_only(env):
            env["GPUS_ON_NODE"] = "4"  # by the launcher, for a task of Slurm
        seen = be(MACHINES.get(there, "cuda"), env)
        device, backend = load_lesson("10").choose_device(int(rank), int(ranks))
        chosen.add((device.type, backend, accelerate.make_accelerator()))
        if device.type != "cpu":
            taken.append(re.sub("MIG-.*", "a part", str(seen[device.index])))
    ((kind, backend, accelerator),) = chosen  # ranks that do not agree would never meet
    assert [kind, " ".join(taken), backend, accelerator] == expected
    if backend != "gloo":  # NCCL and XCCL take no two ranks on one GPU
        assert len(set(taken)) == int(ranks)


@pytest.mark.parametrize(
    ("kind", "masks"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-5ad10003"}),
        # HIP takes CUDA's variable, too, but its own wins.
        ("hip", {"CUDA_VISIBLE_DEVICES": "3,1"}),
        ("hip", {"CUDA_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "2"}),
        # Slurm sets ROCR's. What it leaves is counted from 0.
        ("hip", {"ROCR_VISIBLE_DEVICES": "2,3"}),
        ("xpu", {"CUDA_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "3,1"}),
    ],
)
def test_the_launcher_gives_gpus_by_names_that_the_masks_know(kind, masks, be):
    assert be(kind, masks)


MARK = load_lesson("test-profile").LOADING


def span(name, category, begin, end):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin}


# The CPU asks for the work in the first 20, 10 of them for the data, and the GPU does it later: it
# computes from 20 to 60 and from 80 to 90. c10d: and nccl: are the CPU's calls.
ON_GPU = [
    span("ProfilerStep#5", "user_annotation", 0, 100),
    span(MARK, "user_annotation", 0, 10),
    span(MARK, "gpu_user_annotation", 20, 30),
    span("aten::index_select", "cpu_op", 0, 10),
    span("aten::conv2d", "cpu_op", 10, 20),
    span("c10d::allreduce_", "cpu_op", 18, 20),
    span("nccl:all_reduce", "user_annotation", 18, 20),
    span("nccl:all_reduce", "gpu_user_annotation", 50, 80),
    span("index_kernel", "kernel", 20, 30),
    span("implicit_convolve_sgemm", "kernel", 30, 60),
    span("sgd_kernel", "kernel", 80, 90),
]
# On a GPU that ranks share. The bar begins while it still computes what is to be sent.
GLOO = [
    span("gloo:all_reduce", "user_annotation", 22, 80),
    span("gloo:all_reduce", "gpu_user_annotation", 60, 80),
    span("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 60, 65),
    span("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 78, 80),
]


@pytest.mark.parametrize(
    ("sent", "shares"),
    [
        ([span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 50, 80)], (10, 50, 30, 10, 21)),
        ([span("ncclDevKernel_Generic_4", "kernel", 50, 80)], (10, 50, 30, 10, 21)),  # of RCCL
        ([span("oneccl_allreduce_small<float>", "kernel", 50, 80)], (10, 50, 30, 10, 21)),
        (GLOO, (10, 50, 15, 0, 26)),  # it counts from the copy to the CPU
    ],
)
def test_what_sends_is_communication(sent, shares, tmp_path):
    """Of 100 microseconds: data, compute, communication, overlap, idle."""
    trace = tmp_path / "rank0.1.pt.trace.json"
    trace.write_text(json.dumps({"traceEvents": [*ON_GPU, *sent]}))
    found = load_lesson("test-profile").time_shares(trace)
    # One flag per microsecond, both ends of the time included.
    assert tuple(round(share * 101) for share in found.values()) == shares
