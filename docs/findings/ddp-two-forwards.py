"""DistributedDataParallel: after two forwards, the second backward is not reduced.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss(module, rank, index):
    torch.manual_seed(100 + 10 * rank + index)
    return module(torch.randn(8, 4)).square().mean() / 2


def mean_gradient():
    module = model()
    for rank in range(WORLD):
        for index in range(2):
            (loss(module, rank, index) / WORLD).backward()
    return module.weight.grad


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrapped = DistributedDataParallel(model())
    losses = [loss(wrapped, rank, index) for index in range(2)]
    for part in losses:
        part.backward()
    expected, actual = mean_gradient(), wrapped.module.weight.grad
    print(f"rank {rank}: expected {expected.tolist()}\nrank {rank}: actual   {actual.tolist()}")
    wrong = not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the ranks' gradients are not the mean of both backwards")
