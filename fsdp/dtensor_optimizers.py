"""Optimizers of torch that DTensors cannot serve: refused before their first step.

A DTensor knows what it is a part of, so that most optimizers step on it as on a whole tensor,
with norms and all. Some use what DTensor lacks for shards, by torch's version or by the sizes: they
would raise in the middle of a step, or go wrong in silence. Where it works, nothing is refused.
Knows what torch's own classes do; any other optimizer is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer

from fsdp.engine.optimizer_guard import look_at_optimizers
from fsdp.engine.torch_private import dtensor_of, local_tensor, make_spec

_FLAT = "FullyShardedDataParallel"
_WHOLE = f"{_FLAT} with ShardingStrategy.NO_SHARD and use_orig_params=True"


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What an optimizer does to a parameter that DTensor may not serve.

    Attributes:
        does: in words.
        attempt: does it, with the options of a parameter group; raises RuntimeError.
        remedy: what to use instead.
    """

    does: str
    attempt: Callable[[DTensor, Mapping[str, Any]], object]
    remedy: str


def expect_served(param: nn.Parameter, name: str) -> None:
    """Let an optimizer that holds the DTensor ``param`` raise if DTensor cannot serve it.

    *Host cost*: nothing but for the classes of ``_NEEDS``, and for those once.
    """
    look_at_optimizers(param, name, _check)


def _check(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Try on each parameter of ``names`` what ``optimizer`` will do to it.

    *Collective*: none; where an operator that DTensor has makes one, all ranks make it.

    Raises:
        NotImplementedError: DTensor cannot do it; on all ranks, as it depends on global shapes.
    """
    need = next((need for kind, need in _NEEDS.items() if isinstance(optimizer, kind)), None)
    if need is None:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in names and isinstance(param, DTensor):
                _try(need, optimizer, group, param, names[param])


@torch.no_grad()
def _try(
    need: _Need, optimizer: Optimizer, group: Mapping[str, Any], param: DTensor, name: str
) -> None:
    try:
        need.attempt(param, group)
    except RuntimeError as error:
        reason, _, _ = str(error).partition("\n")
        raise NotImplementedError(
            f"{type(optimizer).__name__} {need.does}, which cannot be done to '{name}', a DTensor "
            f"of shape {tuple(param.shape)} with placements {param.placements}: {reason} "
            f"Use {need.remedy}."
        ) from error


def _read_norm(param: DTensor, _group: Mapping[str, Any]) -> None:
    """Raise for a shard; that ``item`` is wrong there depends on the rank, and cannot be tried."""
    if not all(placement.is_replicate() for placement in param.placements):
        raise RuntimeError("item() gives this rank's share of a norm.")


def _assign(param: DTensor, group: Mapping[str, Any]) -> None:
    if not group["capturable"]:  # which has torch choose between two tensors instead
        sign = param.sign()
        sign[sign.gt(0)] = 1.0


def _as_vector(param: DTensor, _group: Mapping[str, Any]) -> None:
    param.view(-1)


def _add_whole(param: DTensor, _group: Mapping[str, Any]) -> None:
    zeros = torch.zeros_like(param)
    spec = make_spec(
        param.device_mesh,
        [Replicate()] * param.device_mesh.ndim,
        shape=param.shape,
        stride=param.stride(),
        dtype=param.dtype,
    )
    whole = local_tensor(zeros).new_zeros(param.shape)  # where the parameter is, offloaded or not
    zeros.add_(dtensor_of(whole, spec, requires_grad=False))


_NEEDS: dict[type[Optimizer], _Need] = {
    torch.optim.Adafactor: _Need(
        does="reads norms of whole tensors as numbers",
        attempt=_read_norm,
        remedy=f"AdamW, or {_WHOLE}",
    ),
    torch.optim.LBFGS: _Need(
        does="sees a parameter as one vector",
        attempt=_as_vector,
        remedy=f"sizes of dim 0 that the ranks divide, or {_WHOLE}",
    ),
    torch.optim.Muon: _Need(
        does="adds to a parameter what it has computed from the whole of it",
        attempt=_add_whole,
        remedy=f"AdamW where more ranks than rows are, or {_WHOLE}",
    ),
    torch.optim.Rprop: _Need(
        does="assigns to the elements that a mask chooses",
        attempt=_assign,
        remedy=f"{_FLAT}, whose shards are plain tensors, or another optimizer",
    ),
}
