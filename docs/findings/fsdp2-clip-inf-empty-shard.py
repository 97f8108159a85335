"""fully_shard: clipping by the maximum norm fails on a rank that owns nothing of a parameter.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)  # one row: rank 1 owns no element of weight or bias


def backward(module):
    torch.manual_seed(1)
    module(torch.randn(8, 4)).square().mean().backward()


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    bare = model()
    backward(bare)
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 1e9, float("inf")).item()
    wrapped = fully_shard(model(), mesh=init_device_mesh("cpu", (WORLD,)))
    backward(wrapped)
    try:
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9, float("inf"))
        actual = norm.full_tensor().item()
    except RuntimeError as error:
        print(f"rank {rank}: expected {expected:.6f}, actual {type(error).__name__}: {error}")
        sys.exit(1)
    print(f"rank {rank}: expected {expected:.6f}, actual {actual:.6f}")
    sys.exit(int(abs(actual - expected) > 1e-5 * expected))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: an error, or another norm")
