"""The unsharded oracle: one process, all ranks' data, the mean of their gradients.

Nothing here imports the package under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DIM = 10


class Residual(nn.Module):
    """A block with two uses of its input and sizes that no world divides."""

    def __init__(self, dim: int = DIM, hidden: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(torch.relu(self.up(x))))


class Stack(nn.Module):
    """Root with parameters of its own around blocks."""

    def __init__(self, blocks: int = 2, dim: int = DIM, hidden: int = 13) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Residual(dim, hidden) for _ in range(blocks))
        self.out = nn.Linear(dim, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale


def build(kind: Callable[..., nn.Module] = Stack, **kwargs: Any) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(7)
    return kind(**kwargs)


def batch(step: int, rank: int, micro: int = 0, dim: int = DIM) -> torch.Tensor:
    """Data that no two (step, rank, micro-batch) share."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4, dim, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().pow(2).mean()


def optimizer_of(params: Any, kind: str = "adamw") -> torch.optim.Optimizer:
    """Optimizers that decay: a zero gradient and none are told apart."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def train_plain(
    model: nn.Module,
    world: int,
    steps: int = 3,
    *,
    micro: int = 1,
    kind: str = "adamw",
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> list[float]:
    """Train without sharding; returns rank 0's losses."""
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad], kind)
    losses = []
    for step in range(steps):
        for part in range(micro):
            for rank in range(world):
                value = loss(model, batch(step, rank, part))
                (value / world).backward()
                if rank == 0:
                    losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_sharded(  # noqa: PLR0913 - each test names the few that it needs
    model: nn.Module,
    rank: int,
    steps: int = 3,
    *,
    micro: int = 1,
    kind: str = "adamw",
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    before_micro: Callable[[nn.Module, int], None] | None = None,
) -> list[float]:
    """Train a sharded model on this rank's data; returns this rank's losses."""
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad], kind)
    losses = []
    for step in range(steps):
        for part in range(micro):
            if before_micro is not None:
                before_micro(model, part)
            value = loss(model, batch(step, rank, part))
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_evaluating(model: nn.Module, rank: int, *, grad: bool, steps: int = 3) -> None:
    """Train with one more forward, with or without ``grad``, between each backward and its step."""
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        loss_of(model, batch(step, rank)).backward()
        with torch.set_grad_enabled(grad):
            model(batch(7, rank))
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(model: nn.Module, plain: nn.Module, tolerance: float = 2e-6) -> None:
    """Every parameter equals the oracle's, and none is missing."""
    got = {name: whole(p.detach()) for name, p in model.named_parameters()}
    want = dict(plain.named_parameters())
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name],
            value.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def busy(device: torch.device) -> torch.Tensor:
    """Give the device enough work that nothing which is asked of it now is done soon; zeros."""
    much = torch.zeros(4096, 4096, device=device)
    for _ in range(20):
        much = much @ much
    return much
