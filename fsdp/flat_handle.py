"""Which elements of which original parameters lie in a range of a flat parameter. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp.engine.param_group import FSDPParamGroup
from fsdp.flat_parameter import flat_params


class ShardParamInfo(NamedTuple):
    """What a range of the flat parameter holds of one original parameter; ends are inclusive.

    All but the first are None if it holds nothing.
    """

    in_shard: bool
    offset_in_shard: int | None = None
    numel_in_shard: int | None = None
    intra_param_start_idx: int | None = None
    intra_param_end_idx: int | None = None


class FlatParamShardMetadata(NamedTuple):
    """The original parameters of which a rank holds anything, in order.

    ``param_offsets`` are the first and the last element (inclusive) of each that it holds,
    counted in the order in which the parameter lies in memory.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class FlatParamHandle:
    """The group of one unit, seen as a flat parameter.

    Args:
        group: the group.
        names: of its parameters, below the unit.
        flat_param: the registered flat parameter; None with original parameters.
    """

    def __init__(
        self, group: FSDPParamGroup, names: Sequence[str], flat_param: torch.nn.Parameter | None
    ) -> None:
        self._layout = group.shard.layout
        self._params = flat_params(group.shard.plain)
        self._names = names
        self._rank = group.mesh_info.shard_rank
        self.flat_param = flat_param

    @property
    def unsharded_numel(self) -> int:
        """Elements of the flat parameter with gaps, without the padding of its end."""
        starts = self._layout.unsharded_offsets
        ends = [start + p.shape.numel() for start, p in zip(starts, self._params, strict=True)]
        return max(ends, default=0)

    def in_range(self, first: int, last: int) -> tuple[ShardParamInfo, ...]:
        """Return what elements ``first`` to ``last`` (inclusive) of the whole hold of each."""
        found = []
        for param, start in zip(self._params, self._layout.unsharded_offsets, strict=True):
            begin = max(first, start)
            end = min(last, start + param.shape.numel() - 1)
            if begin > end:
                found.append(ShardParamInfo(False))
                continue
            numel = end - begin + 1
            found.append(ShardParamInfo(True, begin - first, numel, begin - start, end - start))
        return tuple(found)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return what this rank holds."""
        first = self._rank * self._layout.shard_numel
        infos = self.in_range(first, first + self._layout.shard_numel - 1)
        held = [
            (name, param, (info.intra_param_start_idx, info.intra_param_end_idx))
            for name, param, info in zip(self._names, self._params, infos, strict=True)
            if info.intra_param_start_idx is not None and info.intra_param_end_idx is not None
        ]
        return FlatParamShardMetadata(
            param_names=tuple(name for name, _, _ in held),
            param_shapes=tuple(param.shape for _, param, _ in held),
            param_strides=tuple(param.stride for _, param, _ in held),
            param_contiguities=tuple(param.contiguous for _, param, _ in held),
            param_numels=tuple(param.shape.numel() for _, param, _ in held),
            param_offsets=tuple(offsets for _, _, offsets in held),
        )
