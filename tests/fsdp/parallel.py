"""A model that tensor parallelism cuts in every way that the wrapper takes, and its plain twin."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.engine.mesh import default_device
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import DIM, batch, build, loss_of, optimizer_of

MAX_NORM = 0.05  # below every norm here


class Block(nn.Module):
    """Cut on dim 0 and on dim 1; a norm whose gradients are partial sums; a bias that is whole.

    With 10 hidden numbers two ranks of tensor parallelism have 5 rows, which no pair divides.
    """

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.down(torch.tanh(self.up(x))))
        if isinstance(y, DTensor):
            y = y.redistribute(placements=[Replicate()]).to_local()
        return x + y


class Net(nn.Module):
    """Two blocks, and a root with plain parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    "norm": SequenceParallel(sequence_dim=0),
}


def parallel(mesh: DeviceMesh) -> nn.Module:
    """The model, with its blocks cut over ``mesh``; what they begin with is that of ``build``."""
    model = build(Net).to(mesh.device_type)
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    return model


def square(
    sizes: Sequence[int] = (2, 2), names: Sequence[str] = ("dp", "tp"), device: str = "cpu"
) -> DeviceMesh:
    return init_device_mesh(device, tuple(sizes), mesh_dim_names=tuple(names))


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cpu") if mesh.device_type == "cpu" else default_device()


def wrapped(mesh: DeviceMesh, module: nn.Module | None = None, **options: Any) -> FSDP:
    """``module``, or the model, wrapped block by block over the dims of ``mesh`` but the last."""
    *data, model = mesh.mesh_dim_names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return FSDP(
            parallel(mesh[model]) if module is None else module,
            device_mesh=mesh[tuple(data)] if len(data) > 1 else mesh[data[0]],
            device_id=device_of(mesh),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            **options,
        )


def data_rank(context: RankContext, mesh: DeviceMesh) -> int:
    """Which part of the data this rank has: the same for all ranks of tensor parallelism."""
    return context.rank // mesh.size(mesh.ndim - 1)


def train(  # noqa: PLR0913 - what a test varies
    model: FSDP,
    rank: int,
    *,
    steps: int = 2,
    first: int = 0,
    micro: int = 1,
    kind: str = "sgd",
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[float], torch.optim.Optimizer]:
    """Train with clipping; returns losses and norms, and the optimizer."""
    optimizer = optimizer or optimizer_of(model.parameters(), kind)
    seen = []
    for step in range(first, first + steps):
        for part in range(micro - 1):
            with model.no_sync():
                loss_of(model, batch(step, rank, part)).backward()
        loss = loss_of(model, batch(step, rank, micro - 1))
        loss.backward()
        seen += [loss.item(), model.clip_grad_norm_(MAX_NORM).item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen, optimizer


def train_plain(
    model: nn.Module,
    world: int,
    rank: int,
    *,
    steps: int = 2,
    micro: int = 1,
    kind: str = "sgd",
) -> tuple[list[float], torch.optim.Optimizer]:
    """The same without any sharding; losses are those of ``rank``."""
    optimizer, seen = optimizer_of(model.parameters(), kind), []
    for step in range(steps):
        for part in range(micro):
            for each in range(world):
                loss = loss_of(model, batch(step, each, part))
                (loss / world).backward()
                if each == rank and part == micro - 1:
                    seen.append(loss.item())
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, optimizer


def whole_parameters(model: FSDP) -> dict[str, torch.Tensor]:
    """The parameters as a summon shows them, put together over tensor parallelism."""
    with FSDP.summon_full_params(model, writeback=False):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


def assert_equal(got: Any, want: nn.Module, tolerance: float = 2e-6) -> None:
    """Every parameter of a wrapped model, or of whole ones, is that of the plain model."""
    found = whole_parameters(got) if isinstance(got, nn.Module) else got
    wanted = {name: p.detach() for name, p in want.named_parameters()}
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name].cpu(),
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
