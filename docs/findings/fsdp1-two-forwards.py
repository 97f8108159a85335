"""FullyShardedDataParallel: two forwards before two backwards read freed parameters.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on CPU over gloo; sharding strategies as arguments, FULL_SHARD and NO_SHARD by default.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def loss(module, rank, index):
    torch.manual_seed(100 + 10 * rank + index)
    return module(torch.randn(8, 4)).square().mean() / 2


def reference():
    """Norm of the gradient that is the mean over ranks of both backwards."""
    module = model()
    for rank in range(WORLD):
        for index in range(2):
            (loss(module, rank, index) / WORLD).backward()
    return nn.utils.get_total_norm([p.grad for p in module.parameters()])


def main(rank, store, strategies):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    expected, wrong = reference().item(), False
    for strategy in strategies:
        wrapped = FullyShardedDataParallel(
            model(),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
        try:
            losses = [loss(wrapped, rank, index) for index in range(2)]
            for part in losses:
                part.backward()
            actual = wrapped.clip_grad_norm_(1e9).item()
            wrong |= abs(actual - expected) > 1e-4 * expected
        except RuntimeError as error:
            actual, wrong = f"RuntimeError: {error}", True
        print(f"rank {rank}, {strategy}: expected gradient norm {expected:.6f}, actual {actual}")
    sys.exit(int(wrong))


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["FULL_SHARD", "NO_SHARD"]
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(
                main, (f"{directory}/store", chosen), nprocs=WORLD, start_method="fork"
            )
        except mp.ProcessExitedException:
            sys.exit("deviation: gradients are not the mean of both backwards, or an error")
