"""Whole gradients beside whole parameters, for a while. Only where originals are registered.

Knows one unit's group; the whole parameters themselves are in ``full_params.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import gather_now
from fsdp.flat_parameter import FlatParam, flat_params, set_gradient
from fsdp.original_exposure import OriginalExposure, original_of

Gradients = list[torch.Tensor | None]


class WholeGradients:
    """The gradients of one group, gathered.

    A parameter without a gradient on any rank has none. One that has none on this rank alone
    counts as zero here, and has none again afterwards.

    *Collective* over the shard group: an all-reduce of one number per parameter and an all-gather.
    *Memory*: the whole gradients.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        exposure = group.options.exposure
        assert isinstance(exposure, OriginalExposure)
        self._group, self._exposure = group, exposure
        self._params = flat_params(group.shard.plain)
        self._own: Gradients = [exposure.own_gradient(param) for param in self._params]
        with torch.no_grad():
            self._wholes = self._gather()

    def _gather(self) -> Gradients:
        info, device = self._group.mesh_info, self._group.options.device
        layout = self._group.shard.layout
        there = torch.tensor([own is not None for own in self._own], dtype=torch.int32)
        there = there.to(device)
        dtype = self._exposure.gradient_dtype(self._params[0])
        shard = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
        for index, own in enumerate(self._own):
            if own is not None:
                piece = layout.piece(index, info.shard_rank)
                shard.narrow(0, piece.offset, piece.numel).copy_(own)
        if info.shard_size > 1:
            dist.all_reduce(there, group=info.shard_group)
        full = gather_now(shard, info.shard_group)
        starts = layout.unsharded_offsets
        return [
            param.restored(full.narrow(0, start, param.shape.numel())) if known else None
            for param, start, known in zip(self._params, starts, there.tolist(), strict=True)
        ]

    def show(self) -> None:
        """Set them on the parameters, which are whole now."""
        for param, whole in zip(self._params, self._wholes, strict=True):
            if whole is None:
                continue
            if param.outer is None:
                set_gradient(original_of(param), whole)
            else:
                # A DTensor cannot have a gradient of another dtype.
                _visible(param).grad = param.shown(whole.to(param.dtype))

    def write_back(self) -> None:
        """Take this rank's elements of what the user has left; ``hide_full`` sets them."""
        layout, rank = self._group.shard.layout, self._group.mesh_info.shard_rank
        for index, (param, own) in enumerate(zip(self._params, self._own, strict=True)):
            found, piece = _visible(param).grad, layout.piece(index, rank)
            if found is None or not piece.numel:
                self._exposure.set_own_gradient(param, None)
                continue
            found = found.detach()
            if param.outer is not None:
                found = param.inside(found).to(self._exposure.gradient_dtype(param))
            run = param.in_order(found).reshape(-1)[piece.start : piece.stop]
            if own is None and not run.any():
                continue  # zeros that stood for none
            target = torch.empty(piece.numel, dtype=run.dtype, device=param.local.device)
            self._exposure.set_own_gradient(param, target.copy_(run))


def _visible(param: FlatParam) -> torch.Tensor:
    """Return the parameter on which users see and set the whole gradient of ``param``."""
    found = None if param.outer is None else param.registered()
    return original_of(param) if found is None else found
