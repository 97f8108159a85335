"""DistributedDataParallel(static_graph=True): a first backward inside no_sync fails an assertion.

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
    wrapped = DistributedDataParallel(model(), static_graph=True)
    expected = mean_gradient()
    try:
        with wrapped.no_sync():
            loss(wrapped, rank, 0).backward()
        loss(wrapped, rank, 1).backward()
    except RuntimeError as error:
        print(f"rank {rank}: expected {expected.tolist()}\nrank {rank}: actual   {error}")
        sys.exit(1)
    actual = wrapped.module.weight.grad
    print(f"rank {rank}: expected {expected.tolist()}\nrank {rank}: actual   {actual.tolist()}")
    sys.exit(int(not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: an error, or gradients that are not the mean of both backwards")
