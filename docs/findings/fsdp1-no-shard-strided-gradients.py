"""FullyShardedDataParallel(NO_SHARD, use_orig_params): gradients of strided parameters permuted.

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
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

WORLD = 2


class Transposed(nn.Module):
    """Its weight, shape (2, 3), lies in memory as (3, 2)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 2).t())

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def backward(module):
    torch.manual_seed(1)
    module(torch.randn(8, 3)).square().mean().backward()


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    bare = Transposed()
    backward(bare)
    wrapped = FullyShardedDataParallel(
        Transposed(),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    backward(wrapped)
    (parameter,) = wrapped.parameters()
    expected, actual = bare.weight.grad, parameter.grad
    if rank == 0:
        print(f"parameter: shape {tuple(parameter.shape)}, stride {parameter.stride()}")
        print(f"gradient expected {expected.tolist()}, stride {expected.stride()}")
        print(f"gradient actual   {actual.tolist()}, stride {actual.stride()}")
    sys.exit(int(actual.shape != expected.shape or not torch.allclose(actual, expected)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the gradient has its elements in other places")
