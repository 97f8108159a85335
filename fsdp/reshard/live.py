"""Resharding inside a job: from one sharded model and its optimizers into another.

The ranks tell each other what they have, refuse what does not fit before anything moves, and then
carry out one plan for parameters, buffers and optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp.engine.agreement import exchanged, together
from fsdp.engine.mesh import message_device
from fsdp.reshard.agreed import Claim, agreed_side, agreed_tensors, number_of, of_first
from fsdp.reshard.ends import Giving
from fsdp.reshard.optimizer import Values
from fsdp.reshard.plan import Plan
from fsdp.reshard.side import Local, Side, put_extra_states
from fsdp.reshard.telling import ranks_of
from fsdp.reshard.transport import LIMIT, Transport

Optimizers = Optimizer | Iterable[Optimizer] | None


def reshard(
    source: nn.Module | None,
    target: nn.Module | None,
    source_optimizers: Optimizers = None,
    target_optimizers: Optimizers = None,
    *,
    group: dist.ProcessGroup | None = None,
    limit: int = LIMIT,
) -> None:
    """Copy parameters, buffers and optimizer states from one model into another.

    Both are the same plain model, sharded or wrapped in any two ways over any two sets of ranks:
    flat parameters, DTensors, replicas, plain modules, each beside tensor parallelism or not;
    other worlds, meshes, strategies and wrap plans.
    Afterwards the target is as the source was, with the source's optimizer options; what the
    target's optimizers kept before is gone. Extra state of modules may differ between ranks of the
    source; that of the first is taken.

    Args:
        source: None on ranks that are not among those of the source.
        target: None on ranks that are not among those of the target.
        source_optimizers: one or several; on all ranks of the source or on none.
        target_optimizers: the same of the target.
        group: contains all ranks of both; None: the default one.
        limit: bytes that a rank receives, and that it sends to each replica, in one round.

    *Collective* over ``group``. *Memory*: one round, and one copy of what does not lie in memory in
    the order of its elements. *Blocks* the host.

    Raises:
        ValueError: the models differ in names, shapes or dtypes, or what the optimizers train or
            keep does, or ranks of the source have other options or values (step counts) in their
            optimizers; on all ranks, before anything was changed.
        TypeError: what an optimizer or module of the source keeps cannot be pickled; likewise.
        RuntimeError: a model is in forward or backward, or inside ``summon_full_params``; likewise.
        NotImplementedError: tensors or states that are not cut along their dims; likewise.
    """
    present = exchanged(lambda: ((), (source is not None, target is not None)), group, 2)[1]
    ranks = ranks_of(group)
    sources = [rank for rank, (here, _) in zip(ranks, present, strict=True) if here]
    targets = [rank for rank, (_, here) in zip(ranks, present, strict=True) if here]
    if not sources or not targets:
        raise ValueError(
            f"no rank of the group has a {'target' if sources else 'source'}; pass the model on "
            "the ranks that have it, and None on the others"
        )

    def look() -> tuple[tuple[Local | None, Local | None, Claim, Side | None], tuple[int, ...]]:
        one = Local(source, source_optimizers, sources) if source is not None else None
        other = Local(target, target_optimizers, targets) if target is not None else None
        claim, told = Claim(one.told if one else None), other.told if other else None
        return (one, other, claim, told), (*claim.numbers, number_of(told.tensors) if told else 0)

    (mine, wanted, claim, told), numbers = exchanged(look, group, Claim.NUMBERS + 1)
    claims = [own for *own, _ in numbers]
    source_side = of_first(agreed_side(claim, claims, sources, group), sources[0], group)
    target_tensors = agreed_tensors(told, [own for *_, own in numbers], targets, group)
    target_side = Side(tensors=target_tensors)

    def fit() -> tuple[Plan, _Ends]:
        plan = Plan(source_side.dealt(), target_side.dealt())
        _check_dtypes(source_side, target_side)
        return plan, _Ends(plan, source_side, mine, wanted)

    plan, ends = together(fit, group)
    Transport(plan, group, message_device(group), limit=limit).run(ends)
    ends.finish()


class _Ends(Giving):
    """The two models at this rank, as ends of the transport."""

    def __init__(
        self, plan: Plan, source_side: Side, source: Local | None, target: Local | None
    ) -> None:
        super().__init__(plan.names, source_side, source)
        self._target = target
        self._states: dict[torch.Tensor, dict[str, Any]] = {}
        self._groups: list[Values] = []
        if target is not None:
            self._make_states(target)

    def _make_states(self, target: Local) -> None:
        side, view = self.side, target.view
        if (side.groups is None) is not (not view.optimizers):
            have, lack = ("target", "source") if view.optimizers else ("source", "target")
            raise ValueError(
                f"the {have} has optimizers and the {lack} has none; pass them for both, or for "
                "neither"
            )
        if side.groups is None:
            return
        self._groups = view.matched_groups(side.groups)
        wanted = view.wanted(side.states)
        view.check_kind(self._groups, wanted)
        for piece in target.pieces:
            saved = wanted.get(piece.holder)
            if saved is not None and piece.holder not in self._states:
                blank = {key: view.blank(piece, d) for key, d in saved.elements.items()}
                self._states[piece.holder] = {**saved.values, **blank}

    def _goals(self, number: int) -> list[torch.Tensor]:
        assert self._target is not None
        piece = self._target.by_name[self.names[number]]
        own = piece.view(piece.holder)
        state = self._states.get(piece.holder)
        if state is None:
            assert not self.keys(number) or not own.numel(), f"no state was made for {piece.name}"
            return [own, *(own.new_empty(0) for _ in self.keys(number))]
        return [own, *(piece.view(state[key]) for key in self.keys(number))]

    def open(self, number: int) -> Sequence[torch.Tensor]:
        """Return the target's own memory, or a copy where it has another order or dtype."""
        return [
            goal.view(-1)
            if goal.dtype == dtype and goal.is_contiguous()
            else torch.empty(goal.numel(), dtype=dtype, device=goal.device)
            for goal, dtype in zip(self._goals(number), self.riders(number), strict=True)
        ]

    def close(self, number: int, filled: Sequence[torch.Tensor]) -> None:
        """Copy what was filled to where it belongs, if it is not there."""
        for goal, tensor in zip(self._goals(number), filled, strict=True):
            if tensor.data_ptr() != goal.data_ptr():
                goal.copy_(tensor.view(goal.shape))

    def finish(self) -> None:
        """Give the target's optimizers and modules what is no tensor."""
        if self._target is None:
            return
        view = self._target.view
        for holder in view.holders():
            view.put(holder, self._states.get(holder, {}))
        if self.side.groups is not None:
            view.put_groups(self._groups)
        put_extra_states(self._target.model, self.side.objects)


def _check_dtypes(source: Side, target: Side) -> None:
    wanted = {told.names[0]: told.dtype for told in target.tensors}
    for told in source.tensors:
        if wanted[told.names[0]] != told.dtype:
            raise ValueError(
                f"'{told.names[0]}' has dtype {told.dtype} in the source and "
                f"{wanted[told.names[0]]} in the target; cast one of the models first"
            )
