"""fully_shard: ranks that use different parameters add up each other's gradients.

Stand-alone: needs torch only. Prints expected and actual gradients; exit status 1 if the deviation
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


class Routed(nn.Module):
    """Rank 0 takes the one branch, and rank 1 the other."""

    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.ones(4))
        self.right = nn.Parameter(torch.ones(4))

    def forward(self, x, rank):
        return (x * (self.right if rank else self.left)).sum()


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrapped = fully_shard(Routed(), mesh=init_device_mesh("cpu", (WORLD,)))
    wrapped(torch.full((4,), 10.0 if rank else 2.0), rank).backward()
    wrong = False
    for name, expected in (("left", 1.0), ("right", 5.0)):  # the means of (2, none), (none, 10)
        gradient = getattr(wrapped, name).grad
        own = None if gradient is None else gradient.to_local()
        actual = "none" if own is None else " ".join(f"{value:g}" for value in own.tolist())
        wrong |= own is None or bool((own != expected).any())
        print(
            f"rank {rank}: gradient of its rows of {name}:"
            f" expected {expected:g} {expected:g}, actual {actual}",
            flush=True,
        )
    dist.destroy_process_group()
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: gradients of different parameters were added up")
