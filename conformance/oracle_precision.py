"""What a wrapper that computes in a low dtype does to numbers, as the oracle does it too.

Master weights stay in their own dtype. A forward uses copies of them in the low dtype, gradients
come in that dtype, wait and are reduced in declared ones, and step the master weights. Imports no
wrapper.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance import models
from conformance.adapter import Conventions
from conformance.tolerance import ULPS

LOW = (torch.bfloat16, torch.float16)
"""Dtypes whose rounding a wrapper is judged with; any other is that of the run."""

LOWERED = ("computes_as", "accumulates_as", "reduced_as", "buffers_as", "returns_as")
"""The conventions that name the dtypes of passes."""


def low(name: str) -> torch.dtype | None:
    """The low dtype called `name`; ``None`` for any other."""
    return next((dtype for dtype in LOW if str(dtype) == f"torch.{name}"), None)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a wrapper's passes; ``None`` is the dtype of the master weights.

    Attributes:
        computed: of parameters in forward and backward, and of inputs that are cast.
        waiting: of gradients that wait for the last micro-batch.
        reduced: of the reduction.
        buffers: of floating buffers.
        inputs: whose floating inputs are cast: "none", "root" or "units".
        returned: of what the root returns, "parameter" if it is not cast.
    """

    computed: torch.dtype | None
    waiting: torch.dtype | None
    reduced: torch.dtype | None
    buffers: torch.dtype | None
    inputs: str
    returned: str

    @classmethod
    def of(cls, conventions: Conventions) -> Precision:
        """As an adapter declares it."""
        computed = low(conventions.computes_as)
        return cls(
            computed=computed,
            waiting=low(conventions.accumulates_as),
            reduced=low(conventions.reduced_as),
            buffers=low(conventions.buffers_as),
            inputs="none" if computed is None else conventions.casts_inputs,
            returned="parameter" if computed is None else conventions.returns_as,
        )

    @property
    def lowers(self) -> bool:
        """Whether anything is computed in a low dtype."""
        return any((self.computed, self.waiting, self.reduced, self.buffers))

    def prepare(self, model: nn.Module, units: tuple[type[nn.Module], ...]) -> None:
        """Cast buffers, what units take and what the root returns, as declared."""
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        if self.buffers is not None:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = cast(buffer, self.buffers)
        for module in model.modules():
            if module is not model and not isinstance(module, units):
                continue
            if self.inputs == "units" or (self.inputs == "root" and module is model):
                assert self.computed is not None
                module.register_forward_pre_hook(
                    partial(_cast_inputs, self.computed), with_kwargs=True
                )
        if self.returned != "parameter":
            dtype = low(self.returned) or own
            model.register_forward_hook(partial(_cast_outputs, dtype))

    @contextmanager
    def computing(self, module: nn.Module, exact: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Inside, `module` has copies of its floating parameters in the low dtype.

        With `exact`, the values that parameters were built with and that know no rounding, others
        go to the other neighbour where a bound's least error would make them do so.
        """
        if self.computed is None:
            yield
            return
        copies: dict[int, Tensor] = {}
        for index, parameter in enumerate(module.parameters()):
            copies[id(parameter)] = cast(parameter, self.computed)
            if exact is not None and not torch.equal(parameter, exact[index]):
                copies[id(parameter)] = rounded_otherwise(parameter, self.computed)
        replaced = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        for owner, name, parameter in replaced:
            owner._parameters[name] = copies[id(parameter)]  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name, parameter in replaced:
                owner._parameters[name] = parameter

    def arrived(self, gradient: Tensor | None) -> Tensor | None:
        """One rank's `gradient` of one backward, in the dtype in which it waits for the next."""
        return gradient if gradient is None or self.waiting is None else gradient.to(self.waiting)

    def sent(self, gradient: Tensor | None, own: torch.dtype) -> Tensor | None:
        """One rank's gradient in the dtype of the reduction; `own` is the master weights'."""
        return None if gradient is None else gradient.to(self.reduced or own)


def cast(tensor: Any, dtype: torch.dtype) -> Any:
    """`tensor` in `dtype` if it is a floating one."""
    floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
    return tensor.to(dtype) if floating else tensor


def in_full(module: nn.Module) -> nn.Module:
    """A copy of `module`, after `Precision.prepare`, that computes with its master weights."""
    full = copy.deepcopy(module)
    own = next((p.dtype for p in full.parameters() if p.is_floating_point()), torch.float32)
    for part in full.modules():
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
        part._buffers.update({name: cast(buffer, own) for name, buffer in part._buffers.items()})
    return full


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    moved: tuple[Any, dict[str, Any]] = models.map_tensors(
        lambda tensor: cast(tensor, dtype), (args, kwargs)
    )
    return moved


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return models.map_tensors(lambda tensor: cast(tensor, dtype), output)


def rounded_otherwise(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """`parameter` in `dtype`; what lies next to a boundary of rounding goes to the other side.

    Gradients pass as through an ordinary cast.
    """
    nearest: Tensor = cast(parameter, dtype)
    if nearest.dtype != dtype or not parameter.numel():
        return nearest
    master = parameter.detach()
    off = ULPS * torch.finfo(master.dtype).eps * master.abs().max()
    above, below = (master + off).to(dtype), (master - off).to(dtype)
    other = torch.where(above == nearest.detach(), below, above)
    # the difference of neighbours is exact, and so is the sum
    return nearest + (other - nearest.detach())


def nudged(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """`gradient`, half of its elements replaced by a neighbour: as another order would round."""
    bits = gradient.view(torch.int16).clone()
    drawn = torch.randint(0, 4, bits.shape, generator=generator).to(bits.device)
    step = (drawn == 3).to(torch.int16) - (drawn == 0).to(torch.int16)
    bits += step * (gradient != 0)
    return bits.view(gradient.dtype)
