"""fully_shard: after no_sync, a unit called twice in one forward is reduced twice.

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
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 2


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.unit = nn.Linear(8, 8)

    def forward(self, x):
        return self.unit(torch.tanh(self.unit(self.stem(x))))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.namespace == "c10d" and "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    module = Twice()
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(module.unit, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.set_requires_gradient_sync(False)
    module(torch.randn(4, 8)).square().mean().backward()
    module.set_requires_gradient_sync(True)
    loss = module(torch.randn(4, 8)).square().mean()
    with Counting() as counting:
        loss.backward()
    print(f"rank {rank}: expected 2 reduce-scatters (unit, root), actual {counting.calls}")
    sys.exit(int(counting.calls != 2))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: more reductions than units")
