"""fully_shard: gradients that wait unreduced are not dropped by zero_grad().

Stand-alone: needs torch only. Prints expected and actual gradient norms; exit status 1 if the
deviation shows.
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


def backward(model, scale):
    model(scale * torch.ones(2, 4)).square().sum().backward()


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    bare = nn.Linear(4, 4)
    wrapped = fully_shard(copy.deepcopy(bare), mesh=init_device_mesh("cpu", (WORLD,)))
    wrapped.set_requires_gradient_sync(False)
    backward(wrapped, 2.0)
    wrapped.set_requires_gradient_sync(True)
    wrapped.zero_grad()
    backward(wrapped, 1.0)
    backward(bare, 1.0)
    expected = nn.utils.get_total_norm([p.grad for p in bare.parameters()]).item()
    actual = nn.utils.get_total_norm([p.grad for p in wrapped.parameters()]).full_tensor().item()
    if rank == 0:
        print(
            f"gradient norm after zero_grad() and one backward:"
            f" expected {expected:.6f}, actual {actual:.6f}",
            flush=True,
        )
    dist.destroy_process_group()
    sys.exit(int(abs(actual - expected) > 1e-4 * expected))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: gradients that were dropped are part of the next ones")
