"""ZeroRedundancyOptimizer(parameters_as_bucket_view=True): gradients of strided weights permuted.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on two accelerators if there are as many, else on CPU over gloo.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


class Transposed(nn.Module):
    """Its weight, shape (2, 3), lies in memory as (3, 2)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 2).t())

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def loss(module, rank):
    torch.manual_seed(1 + rank)
    x = torch.randn(8, 3).to(module_device(module))
    return module(x).square().mean()


def module_device(module):
    return next(module.parameters()).device


def mean_gradient(device):
    module = Transposed().to(device)
    for rank in range(WORLD):
        (loss(module, rank) / WORLD).backward()
    return module.weight.grad


def device_of(rank):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= WORLD:
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = device_of(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
    )
    wrapped = DistributedDataParallel(Transposed().to(device))
    parameter = wrapped.module.weight
    before = parameter.stride()
    ZeroRedundancyOptimizer(
        wrapped.parameters(),
        optimizer_class=torch.optim.SGD,
        parameters_as_bucket_view=True,
        lr=0.1,
    )
    loss(wrapped, rank).backward()
    expected, actual = mean_gradient(device), parameter.grad
    if rank == 0:
        print(f"torch {torch.__version__}, {device.type}")
        print(f"parameter: stride {before} before the optimizer, {parameter.stride()} after")
        print(f"gradient expected {expected.tolist()}, stride {expected.stride()}")
        print(f"gradient actual   {actual.tolist()}, stride {actual.stride()}")
    wrong = not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the gradient has its elements in other places")
