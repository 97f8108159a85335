"""fully_shard: a first forward in inference mode makes training fail.

Stand-alone: needs torch only. Prints what the first training step does after each kind of
evaluation; exit status 1 if the deviation shows.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def outcome(model, *, mode):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    inputs = torch.ones(2, 4)
    with MODES[mode]():
        model(inputs)
    try:
        model(inputs).square().sum().backward()
    except RuntimeError as error:
        return str(error).partition(".")[0]
    optimizer.step()
    return "a step"


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrong = False
    for mode in MODES:
        expected = outcome(copy.deepcopy(bare), mode=mode)
        for reshard in (True, False):
            sharded = copy.deepcopy(bare)
            for layer in sharded:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
            actual = outcome(sharded, mode=mode)
            wrong = wrong or actual != expected
            if rank == 0:
                print(f"after {mode}, reshard_after_forward={reshard}")
                print("  expected", expected)
                print("  actual  ", actual, flush=True)
    dist.destroy_process_group()
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: no training after a first forward in inference mode")
