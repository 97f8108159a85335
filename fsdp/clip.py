"""The norm of gradients spread over ranks, and clipping to it. Plain tensors and groups."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

_EPSILON = 1e-6


def clip_sharded(
    sharded: Mapping[dist.ProcessGroup, Sequence[nn.Parameter]],
    replicated: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is ``max_norm`` at most.

    Args:
        sharded: by group, parameters of which each rank of the group has other elements.
        replicated: parameters that every rank has whole; they count once.
        max_norm: the bound.
        norm_type: p of the p-norm; inf for the largest element.
        device: where the norms are reduced.

    Returns:
        The norm before, in the widest dtype of the gradients.

    *Collective*: one all-reduce of one number per group, on ranks without gradients as well.
    """
    if not sharded:
        return nn.utils.clip_grad_norm_(replicated, max_norm, norm_type)
    gradients = [_gradients(params) for params in sharded.values()]
    own = _gradients(replicated)
    parts = []
    for group, local in zip(sharded, gradients, strict=True):
        part = norm_of(local, norm_type, device)
        if math.isinf(norm_type):
            dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group)
        else:
            part = part**norm_type
            dist.all_reduce(part, group=group)
        parts.append(part)
    if replicated:
        part = norm_of(own, norm_type, device)
        parts.append(part if math.isinf(norm_type) else part**norm_type)
    if math.isinf(norm_type):
        total = torch.stack(parts).amax()
    else:
        total = torch.stack(parts).sum() ** (1.0 / norm_type)
    everything = [*(g for local in gradients for g in local), *own]
    _scale(everything, total, max_norm)
    return _as_promoted(total, everything)


def norm_of(
    gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the norm of all ``gradients`` together in float32 on ``device``; zero if none."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = [_norm(gradient, norm_type).to(device) for gradient in gradients]
    return _norm(torch.stack(norms), norm_type)


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)  # the largest element of none
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32)
    return norm


def _gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad.detach() for param in params if param.grad is not None]


def _scale(gradients: Sequence[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    factors = {device: factor.to(device) for device in {g.device for g in gradients}}
    for gradient in gradients:
        gradient.mul_(factors[gradient.device].to(gradient.dtype))


def _as_promoted(total: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        warnings.warn(
            "Called FSDP.clip_grad_norm_() on a rank with no gradients -- returning the total "
            "norm in the default dtype torch.float32",
            stacklevel=4,
        )
        return total
    dtype = gradients[0].dtype
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    return total.to(dtype)
