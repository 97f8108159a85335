"""An engine of DeepSpeed's shape in forty lines: it owns backward, step and checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Engine(nn.Module):
    """Sums gradients over ranks, divides the loss for accumulation, clips inside `step`."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, accumulation: int) -> None:
        super().__init__()
        self.module, self.optimizer, self.accumulation = module, optimizer, accumulation
        self.clipping: tuple[float, float] | None = None  # (threshold, p)
        self.grad_norm: Tensor | None = None
        self.micro_batches = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()
        self.micro_batches += 1
        if self.micro_batches % self.accumulation == 0:
            for p in (p for p in self.module.parameters() if p.requires_grad):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)

    def step(self) -> None:
        if self.micro_batches % self.accumulation == 0:
            if self.clipping is not None:
                self.grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), *self.clipping)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save_checkpoint(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        states = (self.module.state_dict(), self.optimizer.state_dict())
        torch.save(states, directory / f"rank{dist.get_rank()}.pt")

    def load_checkpoint(self, directory: Path) -> None:
        model, optimizer = torch.load(directory / f"rank{dist.get_rank()}.pt")
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
