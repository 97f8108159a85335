"""DTensor: item() of a norm, sum, mean or maximum gives this rank's share, not the whole.

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
from torch.distributed.tensor import Shard, distribute_tensor

WORLD = 2
VALUES = torch.arange(1.0, 7.0)
GRADIENT = torch.tensor([1.0, 2.0, 3.0, 40.0, 50.0, 60.0])


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(VALUES.clone())


def stepped(module):
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.1)
    optimizer.step()
    return module.weight.detach()


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    whole, sharded = Scale(), fully_shard(Scale(), mesh=mesh)
    wrong = 0
    for name in ("norm", "sum", "mean", "max"):
        expected = getattr(whole.weight.detach(), name)().item()
        found = getattr(sharded.weight.detach(), name)()
        actual, full = found.item(), found.full_tensor().item()
        print(
            f"rank {rank}: {name}: expected {expected:.4f}, item() {actual:.4f}, whole {full:.4f}"
        )
        wrong += abs(actual - expected) > 1e-4
    whole.weight.grad = GRADIENT
    sharded.weight.grad = distribute_tensor(GRADIENT, mesh, [Shard(0)])
    expected, actual = stepped(whole), stepped(sharded).full_tensor()
    if rank == 0:
        print(f"Adafactor: expected {expected.tolist()}\n           actual   {actual.tolist()}")
    wrong += not torch.allclose(actual, expected, atol=1e-4)
    dist.barrier()  # or the first rank to leave would end the other
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a share was taken for the whole")
