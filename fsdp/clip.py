"""The norm of gradients spread over ranks, and clipping to it. Plain tensors and groups."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

_EPSILON = 1e-6
Groups = tuple[dist.ProcessGroup, ...]


def clip_sharded(
    sharded: Mapping[Groups, Sequence[torch.Tensor]],
    replicated: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is ``max_norm`` at most.

    Args:
        sharded: gradients of which each rank has other elements, by the groups over which they
            are spread: over one, or cut twice over two.
        replicated: parameters that every rank has whole; they count once.
        max_norm: the bound.
        norm_type: p of the p-norm; inf for the largest element.
        device: where the norms are reduced.
        dtype: in which; the same on all ranks, so not one that is told from this rank's gradients.

    Returns:
        The norm before, in the widest dtype of the gradients.

    *Collective*: one all-reduce of one number per group of each key, on ranks without gradients as
    well.
    """
    if not sharded:
        return nn.utils.clip_grad_norm_(replicated, max_norm, norm_type)
    own = [param.grad for param in replicated if param.grad is not None]
    parts = []
    for groups, local in sharded.items():
        part = norm_of(local, norm_type, device, dtype)
        largest = math.isinf(norm_type)
        if not largest:
            part = part**norm_type
        for group in groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        parts.append(part)
    if replicated:
        part = norm_of(own, norm_type, device, dtype)
        parts.append(part if math.isinf(norm_type) else part**norm_type)
    if math.isinf(norm_type):
        total = torch.stack(parts).amax()
    else:
        total = torch.stack(parts).sum() ** (1.0 / norm_type)
    everything = [*(g for local in sharded.values() for g in local), *own]
    _scale(everything, total, max_norm)
    return _as_promoted(total, everything)


def norm_of(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the norm of all ``gradients`` together in ``dtype`` on ``device``; zero if none."""
    # there is no largest element of none
    alike = _alike(gradient for gradient in gradients if gradient.numel())
    if not alike:
        return torch.zeros((), device=device, dtype=dtype)
    norms = []
    for some in alike:
        wide = torch.promote_types(some[0].dtype, dtype)  # norms cannot narrow
        each = torch._foreach_norm(some, norm_type, dtype=wide)
        norms.append(torch.stack(each).to(device, dtype))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    return norm


def _alike(gradients: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return ``gradients`` by device and dtype, so that one call does for many."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(found.values())


def _scale(gradients: Sequence[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for some in _alike(gradients):
        torch._foreach_mul_(some, factor.to(some[0].device, some[0].dtype))


def _as_promoted(total: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        warnings.warn(
            "Called FSDP.clip_grad_norm_() on a rank with no gradients -- returning the total "
            "norm in the default dtype torch.float32",
            stacklevel=5,  # the caller of the wrapper's method, which runs without gradients
        )
        return total
    dtype = gradients[0].dtype
    for other in dict.fromkeys(gradient.dtype for gradient in gradients):
        dtype = torch.promote_types(dtype, other)
    return total.to(dtype)
