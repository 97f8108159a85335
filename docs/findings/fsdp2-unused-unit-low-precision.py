"""fully_shard: a unit that is never used ends a backward with a reduce dtype of its own.

Stand-alone: needs torch only. Prints what happens in float32 and in bfloat16; exit status 1 if the
deviation shows.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WORLD = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def trained(policy):
    model, mesh = Model(), init_device_mesh("cpu", (WORLD,))
    for unit in (model.used, model.unused, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    try:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.ones(2, 4)).float().square().sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "two micro-batches are accumulated"


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected, actual = trained(MixedPrecisionPolicy()), trained(low)
    if rank == 0:
        print(f"float32: {expected}\nbfloat16, reduced in float32: {actual}", flush=True)
    sys.exit(int(actual != expected))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: with a reduce dtype of its own an unused unit ends the backward")
