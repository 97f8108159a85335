"""The gradient on a rank that holds no row of a parameter: a tensor of no elements with a norm.

The norm of no elements is the identity of the reduction that follows (zero, or infinity for a
minimum), but torch refuses to compute the maximum norm of an empty tensor. The rank would raise
and the others wait for it. This tensor answers, so `torch.nn.utils.clip_grad_norm_` can be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fsdp.engine.torch_private import without_dispatch

_ops = torch.ops.aten
_NORMS = frozenset({_ops._foreach_norm.Scalar, _ops.linalg_vector_norm.default})


class EmptyShard(torch.Tensor):
    """An ordinary tensor of no elements whose norms are defined; every result is a plain tensor."""

    @classmethod
    def of(cls, empty: torch.Tensor) -> torch.Tensor:
        """Return ``empty``, which has no elements, as such a tensor over the same memory."""
        return torch.Tensor._make_subclass(cls, empty)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the class
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer norms; hand everything else on."""
        kwargs = dict(kwargs or {})
        with without_dispatch():
            if func not in _NORMS:
                return func(*args, **kwargs)
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            if func is _ops.linalg_vector_norm.default:
                return _norm_of_nothing(args[0], order, kwargs)
            return _foreach_norm(args[0], order, kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _norm_of_nothing(tensor: torch.Tensor, order: float, kwargs: Mapping[str, Any]) -> torch.Tensor:
    value = math.inf if order < 0 else 0.0
    return torch.full((), value, dtype=kwargs.get("dtype") or tensor.dtype, device=tensor.device)


def _foreach_norm(
    tensors: Sequence[torch.Tensor], order: float, kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the norm of each; those that hold something are computed together."""
    full = [tensor for tensor in tensors if tensor.numel()]
    found = iter(_ops._foreach_norm.Scalar(full, order, **kwargs) if full else ())
    return [
        next(found) if tensor.numel() else _norm_of_nothing(tensor, order, kwargs)
        for tensor in tensors
    ]
