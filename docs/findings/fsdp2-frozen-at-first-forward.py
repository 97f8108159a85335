"""fully_shard: a unit that was frozen in the first forward cannot train in mixed precision.

Stand-alone: needs torch only. Prints what a step does once the unit is unfrozen; exit status 1 if
the deviation shows.
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


def outcome(mesh, *, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model[0].requires_grad_(not frozen)
    model(torch.ones(2, 4)).square().sum().backward()
    model[0].requires_grad_(True)
    try:
        model(torch.ones(2, 4)).square().sum().backward()
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return f"a gradient of {model[0].weight.grad.dtype}"


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    expected, actual = outcome(mesh, frozen=False), outcome(mesh, frozen=True)
    if rank == 0:
        print("expected, as if never frozen:", expected)
        print("actual:", actual, flush=True)
    dist.destroy_process_group()
    sys.exit(int(actual != expected))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: what was frozen in the first forward has lost its dtypes")
