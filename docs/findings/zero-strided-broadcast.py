"""ZeroRedundancyOptimizer over NCCL: no step with transposed parameters.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on two accelerators if there are as many, else on CPU over gloo, where it passes.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def transposed(layer):
    """The layer with a weight that lies in memory as its transpose."""
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def models():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, bias=False)
    return {
        "contiguous": (nn.Linear(6, 4, bias=False), (2, 6)),
        "channels_last": (conv.to(memory_format=torch.channels_last), (2, 3, 5, 5)),
        "transposed": (transposed(nn.Linear(6, 4, bias=False)), (2, 6)),
    }


def device_of(rank):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= WORLD:
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")


def stepped(device, module, shape):
    """The error of one step, or None."""
    wrapped = DistributedDataParallel(module.to(device))
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
    )
    wrapped(torch.ones(shape, device=device)).square().mean().backward()
    try:
        optimizer.step()
    except ValueError as error:
        return f"ValueError: {error}"
    return None


def main(rank, store):
    torch.set_num_threads(1)
    device = device_of(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {name: stepped(device, module, shape) for name, (module, shape) in models().items()}
    for name, error in found.items():
        print(
            f"torch {torch.__version__}, {backend}, rank {rank}, {name} weight:"
            f" expected a step, actual {error or 'a step'}"
        )
    dist.destroy_process_group()
    sys.exit(int(any(found.values())))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the optimizer does not step")
