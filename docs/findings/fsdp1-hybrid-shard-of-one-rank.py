"""FullyShardedDataParallel(HYBRID_SHARD): replicas of one rank are never synchronised.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

WORLD = 2


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss(module, rank):
    torch.manual_seed(100 + rank)
    return module(torch.randn(8, 4)).square().mean()


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    bare = model()
    for other in range(WORLD):
        (loss(bare, other) / WORLD).backward()
    expected = torch.cat([p.grad.flatten() for p in bare.parameters()])
    wrapped = FullyShardedDataParallel(
        model(),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard")),
    )
    loss(wrapped, rank).backward()
    actual = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    print(f"rank {rank}: expected {expected.tolist()}\nrank {rank}: actual   {actual.tolist()}")
    sys.exit(int(not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the ranks' gradients are not their mean")
