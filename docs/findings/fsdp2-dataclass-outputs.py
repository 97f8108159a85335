"""fully_shard: backward through a unit that returns a dataclass reads freed parameters.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on two accelerators if there are as many, else on CPU over gloo.
"""

import dataclasses
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2


@dataclasses.dataclass
class Hidden:
    value: Tensor


class Unit(nn.Module):
    """A linear layer whose result comes in a container of `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x):
        return self.kind(torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.unit = Unit(kind)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.unit(self.stem(x))
        return self.head(hidden.value if isinstance(hidden, Hidden) else hidden)


def same(value):
    return value


def device_of(rank):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= WORLD:
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")


def gradient(module, x):
    """The stem's gradient, which came through the unit, or the error."""
    try:
        module(x).square().mean().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    found = module.stem.weight.grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def main(rank, store):
    torch.set_num_threads(1)
    device = device_of(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh(device.type, (WORLD,))
    torch.manual_seed(1)
    x = torch.randn(4, 8).to(device)
    expected = gradient(Model(same).to(device), x)
    wrong = False
    for kind in (same, Hidden):
        module = Model(kind).to(device)
        fully_shard(module.unit, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh)
        actual = gradient(module, x)
        failed = isinstance(actual, str)
        wrong |= failed or not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)
        if rank == 0:
            shown = actual if failed else actual.norm().item()
            print(f"torch {torch.__version__}, {backend}, unit returns {kind.__name__}:")
            print(
                f"  norm of the stem's gradient expected {expected.norm().item()}, actual {shown}"
            )
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: an error in backward, or a wrong gradient")
