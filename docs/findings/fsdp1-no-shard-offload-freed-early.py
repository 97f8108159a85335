"""FullyShardedDataParallel(NO_SHARD, CPUOffload): parameters are overwritten while they are read.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Needs an accelerator per rank; says so and passes without.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2
DIM = 1024


class Late(torch.autograd.Function):
    """The identity, after so much work that the host is far ahead of the device."""

    @staticmethod
    def forward(ctx, x):
        busy(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        busy(grad.device)
        return grad.view_as(grad)


def busy(device):
    much = torch.zeros(4096, 4096, device=device)
    for _ in range(20):
        much = much @ much


class Unit(nn.Linear):
    """Multiplies by one number."""

    def __init__(self, value):
        super().__init__(DIM, DIM, bias=False)
        self.weight.data = torch.eye(DIM) * value


class Model(nn.Module):
    """Two units, then a head that belongs to the root; the device has other work around them."""

    def __init__(self):
        super().__init__()
        self.units = nn.Sequential(Unit(2.0), Unit(3.0))
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight.data = torch.eye(DIM) * 5

    def forward(self, x):
        return Late.apply(self.head(self.units(Late.apply(x))))


def passed(device, strategy, *, original, offload):
    """Per round: output without gradients, output, gradients of the input and the parameters."""
    model = FullyShardedDataParallel(
        Model(),
        device_id=device,
        auto_wrap_policy=ModuleWrapPolicy({Unit}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        cpu_offload=CPUOffload(offload_params=offload),
    )
    rounds = []
    for _ in range(2):
        ones = torch.ones(1, DIM, device=device, requires_grad=True)
        output = model(ones)
        output.sum().backward()
        grads = sorted(p.grad.reshape(-1)[0].item() for p in model.parameters() if p.numel())
        with torch.no_grad():
            evaluated = model(ones)
        rounds.append([evaluated[0, 0].item(), output[0, 0].item(), ones.grad[0, 0].item(), *grads])
        model.zero_grad()
    return rounds


def main(rank, store):
    warnings.simplefilter("ignore")
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < WORLD:
        print(f"rank {rank}: fewer than {WORLD} accelerators: there is nothing to offload from")
        return
    torch.accelerator.set_device_index(rank)
    device = torch.device(torch.accelerator.current_accelerator().type, rank)
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrong = 0
    expected = [30.0, 30.0, 30.0, 6.0, 10.0, 15.0]
    for strategy, original, offload in (
        ("NO_SHARD", False, False),
        ("NO_SHARD", False, True),
        ("NO_SHARD", True, True),
        ("FULL_SHARD", False, True),
    ):
        for found in passed(device, strategy, original=original, offload=offload):
            wrong += found != expected
            print(
                f"torch {torch.__version__}, rank {rank}, {strategy}, use_orig_params={original},"
                f" offload_params={offload}: expected {expected}, actual {found}",
                flush=True,
            )
    dist.destroy_process_group()
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a unit computed with another unit's parameters")
