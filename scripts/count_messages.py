"""Count what lesson 16's transformer gives to all_reduce, on ranks that you don't have.

Usage: scripts/count_messages.py 128x8 [--width 4096] [--layers 32] [--characters 4096]

128x8 is data x tensor: 1,024 ranks, of which 8 share each layer. This process is one of them. The
others don't exist, because PyTorch's fake backend sends nothing, and tensors on the device "meta"
have a shape but no numbers. So the counts are right, but take no memory. All numbers are float32.
"""

import argparse
import os
import re
import sys

import torch
import torch.distributed as dist
from catalog import load
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

LESSON = load("day2/16_transformer_tensor_parallel.py")


def count(data, tensor):
    """Return what by_formula in lesson 16 returns, counted in one step of a model in parts."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=data * tensor)
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = LESSON.Net()
        text = torch.zeros(1, LESSON.LENGTH, dtype=torch.int64)
    if tensor > 1:
        LESSON.split_by_hand(model, mesh)
    optimizer = torch.optim.SGD(model.parameters())
    with LESSON.Messages() as messages:
        LESSON.train_one_epoch(model, [(text, text)], optimizer, mesh, torch.device("meta"))
    dist.destroy_process_group()
    return [sum(x.numel() for x in model.parameters()), *messages.sizes]


def parse_args():
    """Return the arguments; exit if the ranks cannot share the heads of the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("mesh", help="data x tensor, such as 128x8")
    add("--width", type=int, default=4096, help="numbers per character (4096)")
    add("--layers", type=int, default=32, help="of the model (32)")
    add("--characters", type=int, default=4096, help="of a tensor group in a step (4096)")
    args = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", args.mesh):
        parser.error(f"the mesh must be like 128x8, not {args.mesh}")
    args.mesh = [int(number) for number in args.mesh.split("x")]
    if min(args.layers, args.characters) < 1 or args.width % (LESSON.HEAD * args.mesh[1]):
        parser.error(f"the width must be a multiple of {LESSON.HEAD} x {args.mesh[1]}")
    return args


def main():
    """Print what one rank has, and gives to all_reduce in a step. Return the exit status."""
    args = parse_args()
    data, tensor = args.mesh
    LESSON.WIDTH, LESSON.LAYERS, LESSON.LENGTH = args.width, args.layers, args.characters
    right = LESSON.by_formula(data, tensor, data)
    try:
        parameters, *sizes = counted = count(data, tensor)
    except NotImplementedError:  # torch 2.6
        print(f"torch {torch.__version__} cannot send tensors without numbers. Use a newer one.")
        return os.EX_UNAVAILABLE
    print(f"{data * tensor:,} ranks, mesh {data} x {tensor}: {parameters:,} parameters a rank")
    across = 4 * args.layers if tensor > 1 else 0
    for what, some in (("tensor", sizes[:across]), ("data", sizes[across:])):
        each = f", each {some[0] / 1e6:,.1f} MB" if some else ""
        gigabytes = sum(some) / 1e9
        print(f"{what} group, a step: {len(some)} all_reduce, {gigabytes:,.2f} GB{each}")
    return LESSON.prove("counted without sending, and as the formula says", counted == right)


if __name__ == "__main__":
    sys.exit(main())
