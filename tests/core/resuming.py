"""Adapters whose second job goes wrong, or tells who it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from conformance.adapter import (
    BuildConfig,
    OptimizerFactory,
    Refusal,
    StateKind,
    Wrapped,
)
from conformance.adapters.torch_ddp import DataParallelAdapter


class Troubled(DataParallelAdapter):
    """Says the number of its process at every build; a variant is a trouble with two ranks."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "refuses": {"trouble": "refuse"},
        "raises": {"trouble": "raise"},
        "dies": {"trouble": "die"},
        "cannot save": {"trouble": "save"},
        "cannot build": {"trouble": "build"},
        "leaves": {"trouble": "leave"},
        "is gone": {"trouble": "exit"},
    }

    def configure(self, options: Mapping[str, Any]) -> None:
        """Remember the trouble."""
        self.trouble = options.get("trouble", "")

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap, unless this variant refuses the ranks of the second job."""
        if self.trouble == "refuse" and config.world_size == 2:
            raise Refusal("two ranks are one too many")
        if self.trouble == "build":
            raise ValueError("my wrapper wants a config file")
        if self.trouble == "leave":
            raise SystemExit(3)
        if self.trouble == "exit":
            os._exit(3)
        wrapped, _ = self.wrap(model, config, {})
        return Wrapped(
            module=wrapped,
            optimizer=make_optimizer(wrapped.parameters()),
            native=wrapped,
            remarks=(str(os.getpid()),),
        )

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The state, unless this variant has none."""
        if self.trouble == "save":
            raise ValueError("nothing to save")
        return super().optim_state(w, kind, cpu=cpu, rank0_only=rank0_only)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load, or what the variant does instead."""
        if dist.get_rank() == 1 and self.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "raise":
            raise ValueError("cannot load that")
        super().load_model_state(w, kind, state)
