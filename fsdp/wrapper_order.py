"""In which order the units of a tree run, and that it stays the same on all ranks and for ever.

Recorded for the forward prefetch, which follows it, and, with the debug level DETAIL of
``torch.distributed``, to compare it between ranks.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp.engine.torch_private import gather_now, graph_task
from fsdp.wrapper_unit import WrappedUnit, units_of


class ForwardOrder:
    """The order of the first forward, and of the first iteration.

    Args:
        root: of the tree.
    """

    def __init__(self, root: WrappedUnit) -> None:
        self._root = root
        self._units = [unit for unit in units_of(root) if unit._state.groups]
        level = dist.get_debug_level()  # type: ignore[attr-defined]
        self._compares = level == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
        self._prefetches = any(unit._arguments.forward_prefetch for unit in self._units)
        self._forward: list[WrappedUnit] = []  # the first one
        self._iteration: list[WrappedUnit] = []  # the first one, in training
        self._place = 0  # in the present iteration
        self._present = 0  # its number
        self._first: int | None = None  # the number of the first one
        self._warned = False

    @property
    def needed(self) -> bool:
        """Whether anything is left to record or to compare."""
        return self._compares or self._prefetches

    def before_forward(self, unit: WrappedUnit) -> None:
        """Note that ``unit`` is about to gather.

        *Collective* in the first iteration, if orders are compared: an all-gather of one number
        per unit.

        Raises:
            RuntimeError: the ranks are about to gather different units.
        """
        if not unit._state.groups or graph_task() != -1:
            return
        if self._prefetches:
            self._forward.append(unit)
        if not self._compares or not unit.training:
            return
        number = self._root._state.context.backwards
        if self._first is None:
            self._first = number
        if number == self._first:
            self._compare_ranks(unit)
            self._iteration.append(unit)
        elif not self._warned:
            self._compare_iterations(unit, number)

    def _compare_ranks(self, unit: WrappedUnit) -> None:
        state = self._root._state
        for group in state.mesh_info.groups:
            own = torch.tensor([self._units.index(unit)], dtype=torch.int64, device=state.device)
            indices = gather_now(own, group).tolist()
            other = next((r for r, index in enumerate(indices) if index != indices[0]), None)
            if other is not None:
                first, second = (_names(self._units[indices[r]]) for r in (0, other))
                raise RuntimeError(
                    f"Forward order differs across ranks: rank {dist.get_global_rank(group, 0)} is "
                    f"all-gathering parameters for {first} while rank "
                    f"{dist.get_global_rank(group, other)} is all-gathering parameters for {second}"
                )

    def _compare_iterations(self, unit: WrappedUnit, number: int) -> None:
        if number != self._present:
            self._present, self._place = number, 0
        place, self._place = self._place, self._place + 1
        if place >= len(self._iteration):
            expected = "no more parameters"
        elif self._iteration[place] is not unit:
            expected = str(_names(self._iteration[place]))
        else:
            return
        self._warned = True
        warnings.warn(
            "Forward order differs from that of the first iteration on rank "
            f"{dist.get_rank()}: expected to all-gather {expected} but trying to all-gather "
            f"{_names(unit)}. If other ranks do not differ alike, collectives hang or give wrong "
            "results.",
            stacklevel=6,
        )

    def after_forward(self) -> None:
        """Let each unit gather the one that came next in the first forward of the root."""
        if not self._prefetches:
            return
        self._prefetches = False
        for unit, following in itertools.pairwise(dict.fromkeys(self._forward)):
            if unit._arguments.forward_prefetch:
                unit._state.forward_prefetch = [following._state]
        self._forward.clear()


def _names(unit: WrappedUnit) -> Sequence[str]:
    return [param.fqn for group in unit._state.groups for param in group.fsdp_params]
