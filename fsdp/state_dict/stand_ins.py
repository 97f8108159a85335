"""Parameters without memory of their own, which hold the places of the original ones for a while.

While modules are saved or loaded, they must have parameters of the right names and shapes; what
is in them is not needed where a state has another form. Knows one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import local_tensor
from fsdp.flat_exposure import FlatExposure
from fsdp.flat_parameter import flat_params
from fsdp.original_exposure import OriginalExposure


class StandIns:
    """One element of memory for each parameter of a group, shown in the shape of the parameter."""

    def __init__(self, group: FSDPParamGroup) -> None:
        exposure = group.options.exposure
        assert isinstance(exposure, (FlatExposure, OriginalExposure))
        self._exposure = exposure
        self._params = flat_params(group.shard.plain)
        device = group.shard.data.device
        self._shown = [
            torch.zeros(1, dtype=param.dtype, device=device).as_strided(
                param.shape, [0] * len(param.shape)
            )
            for param in self._params
        ]
        self._index = {
            shown.untyped_storage().data_ptr(): index for index, shown in enumerate(self._shown)
        }

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Register them under the original names for the body."""
        self._exposure.show_full(self._params, self._shown)
        try:
            yield
        finally:
            self._exposure.hide_full(self._params)

    def index_of(self, value: Any) -> int | None:
        """Return for which parameter ``value`` stands; None if for none."""
        if isinstance(value, DTensor):
            value = local_tensor(value)
        elif type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            return None
        return self._index.get(value.untyped_storage().data_ptr())
