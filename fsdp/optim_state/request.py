"""What a call is about: the form that is wanted, and what the optimizer has. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp.engine.agreement import Topic
from fsdp.optim_state.names import Names, ParamKey

ASKED = Topic(
    what="request for an optimizer state",
    parts="settings",
    remedy="Set the same state_dict_type, with the same configs, on all ranks.",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a state is wanted, or given.

    Attributes:
        sharded: whether large tensors are chunks, one per rank, or whole.
        offload: whether tensors are in host memory.
        rank0_only: whether the first rank alone gets the result, or has the input.
        group: whose first rank that is; default, the root unit's ranks.
    """

    sharded: bool = False
    offload: bool = True
    rank0_only: bool = False
    group: dist.ProcessGroup | None = None

    def is_first(self, names: Names) -> bool:
        """Whether this rank is the first, or the first beside others in tensor parallelism."""
        if self.group is not None:
            return dist.get_rank(self.group) == 0
        return names.units[0]._is_first_rank()

    def is_source(self, names: Names) -> bool:
        """Whether this rank is the one from which all others get a state."""
        beside = () if self.group is not None else names.model_groups
        return self.is_first(names) and all(dist.get_rank(group) == 0 for group in beside)

    def helps(self, names: Names) -> bool:
        """Whether a rank beside this one, in tensor parallelism, is the first of the group."""
        if self.group is None:
            return False  # such ranks are first together
        first = dist.get_process_group_ranks(self.group)[0]
        return any(first in dist.get_process_group_ranks(each) for each in names.model_groups)

    @property
    def stays(self) -> bool:
        """Whether a save leaves whole tensors where they were gathered, on every rank."""
        return not (self.sharded or self.offload or self.rank0_only)

    @property
    def form(self) -> str:
        """What a save makes: ranks exchange other things for another form."""
        return "large tensors in chunks" if self.sharded else "whole tensors"

    @property
    def source(self) -> str:
        """From where a load takes whole tensors: other ranks wait for one that asks otherwise."""
        if not self.rank0_only:
            return "a state on every rank (rank0_only=False)"
        over = "the given group" if self.group is not None else "all ranks of the model"
        return f"a state on the first rank alone (rank0_only=True), sent over {over}"

    def saves(self, names: Names) -> bool:
        """Whether this rank gets the result."""
        return self.sharded or not self.rank0_only or self.is_first(names)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What an optimizer has.

    Attributes:
        state: its state dict: "state" by its keys, and "param_groups" or not.
        params: what its keys stand for.
    """

    state: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[ParamKey, nn.Parameter] = field(default_factory=dict)
