"""Liberties in what a user sees: the optimizer's class, names, orders, where parameters lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import BuildConfig, OptimizerFactory, StateKind, Wrapped
from conformance.adapters.odd.by_hand import ByHand

PADDING = 7
"""Elements between two parameters in the flat buffer: nobody's alignment."""


class Proxy:
    """Stands before an optimizer, and is none by its class.

    Args:
        optimizer: whose attributes it shows.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class OptimizerBehindAProxy(ByHand):
    """What steps is no subclass of ``torch.optim.Optimizer``."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Put the proxy before it."""
        w = super().build(model, make_optimizer, config)
        return replace(w, optimizer=cast(Optimizer, Proxy(w.optimizer)))


class OtherKeyOrder(ByHand):
    """State dicts list their entries from the last to the first."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Reversed."""
        return _reversed(super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only))

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Reversed, in every level that is a mapping."""
        return _reversed(super().optim_state(w, kind, cpu=cpu, rank0_only=rank0_only))


def _reversed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: _reversed(value) if isinstance(value, Mapping) else value
        for key, value in reversed(list(state.items()))
    }


class OwnFlatBuffer(ByHand):
    """All parameters are views of one buffer, with gaps between them."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Move them there, strides and all, before the optimizer is made."""
        parameters = list(model.parameters())
        total = sum(p.numel() + PADDING for p in parameters)
        flat = torch.full((total,), torch.nan, device=config.device)
        offset = 0
        for parameter in parameters:
            view = flat.as_strided(parameter.shape, parameter.stride(), offset)
            view.copy_(parameter.detach())
            parameter.data = view
            offset += parameter.numel() + PADDING
        return super().build(model, make_optimizer, config)


class Outer(nn.Module):
    """A wrapper module that hands everything on.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hidden_inside = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the user's module returns."""
        return self.hidden_inside(*args, **kwargs)


class ExtraPrefix(ByHand):
    """Names begin with that of the module inside; the adapter takes it off."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap after the optimizer is made."""
        w = super().build(model, make_optimizer, config)
        return replace(w, module=Outer(model))

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The outer module's, without the prefix."""
        state: dict[str, Tensor] = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        outer = {f"hidden_inside.{key}" for key in state}
        assert not state or outer == set(w.module.state_dict())
        return state
