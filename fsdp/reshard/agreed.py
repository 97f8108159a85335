"""What the ranks of one side agree on: compared first, so that none writes what another denies.

Knows what ranks tell, not what they hold; whether that is the same is the judge's business.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch

from fsdp.engine.agreement import together
from fsdp.optim_state.judge import Facts, facts_of, ranks_differ
from fsdp.reshard.optimizer import Saved
from fsdp.reshard.side import Side, Told
from fsdp.reshard.telling import Group, own_rank, told_by, told_by_all

_Facts = dict[str, Facts]  # by name of the tensor, or of what has options


class Claim:
    """What a rank tells of one side, ready to be compared and to be sent.

    Args:
        told: what it tells; None if it is not of the side.

    Raises:
        TypeError: what the rank keeps cannot be pickled.
    """

    NUMBERS = 2

    def __init__(self, told: Side | None) -> None:
        self.side = None if told is None else _sendable(told)

    @cached_property
    def facts(self) -> _Facts:
        """What is compared between ranks: dtypes and values of states, and options."""
        if self.side is None:
            return {}
        groups = self.side.groups
        number = "none" if groups is None else str(len(groups))
        found: _Facts = {"the optimizers": {"parameter groups": number}}
        for index, group in enumerate(groups or ()):
            found[f"parameter group {index}"] = facts_of({}, group)
        for name, saved in self.side.states.items():
            found[name] = facts_of(saved.elements, saved.values)
        return found

    @property
    def numbers(self) -> tuple[int, int]:
        """Digests of the tensors and of what else is compared; zeros without a side."""
        if self.side is None:
            return 0, 0
        return number_of(self.side.tensors), number_of(sorted(self.facts.items()))


def number_of(told: Any) -> int:
    """Return a digest of what a rank tells, of 56 bits, that is not 0."""
    found = hashlib.sha256(repr(told).encode()).digest()[:7]
    return int.from_bytes(found, "big") + 1


def agreed_tensors(
    told: Side | None, numbers: Sequence[int], ranks: Sequence[int], group: Group
) -> tuple[Told, ...]:
    """Return what tensors the ranks of one side tell of, on all ranks.

    *Collective* only where the ranks differ, or not all of them are of the side.

    Args:
        told: what this rank tells; None if it is not of the side.
        numbers: ``number_of`` the tensors of every rank of ``group``; 0: it is not of the side.
        ranks: those of the side.
        group: contains them.

    Raises:
        ValueError: they tell of other tensors; names the first.
    """
    if len({*numbers} - {0}) > 1:
        every = told_by_all((told.tensors,) if told else None, group)
        return _on_all_meshes(ranks, [each for (each,) in filter(None, every)])
    if told is not None and 0 not in numbers:
        return told.tensors
    tensors: tuple[Told, ...] = told_by(ranks[0], told.tensors if told else None, group)
    return tensors


def agreed_side(
    claim: Claim, numbers: Sequence[Sequence[int]], ranks: Sequence[int], group: Group
) -> Side:
    """Return what the ranks of one side tell, in what they must have in common.

    States of optimizers are put together: what one of the ranks that hold elements has is there.
    Extra state of modules, and of states and options what is compared by its kind alone, may differ
    between ranks: it is this rank's own, and none outside of the side. ``of_first`` makes it one.

    *Collective* only where the ranks differ, or not all of them are of the side.

    Args:
        claim: of this rank.
        numbers: those of the claim of every rank of ``group``.
        ranks: those of the side.
        group: contains them.

    Raises:
        ValueError: they tell of other tensors, of other values in optimizer states or of other
            options; names the first.
    """
    mine = claim.side
    tensors = agreed_tensors(mine, [tensor for tensor, _ in numbers], ranks, group)
    side = replace(mine or Side(tensors=()), tensors=tensors)
    if len({facts for _, facts in numbers} - {0}) > 1:
        told = (claim.facts, mine.idle, mine.states) if mine is not None else None
        every = [each for each in told_by_all(told, group) if each is not None]
        _compare(ranks, [(facts, idle) for facts, idle, _ in every])
        side = replace(side, states=_merged([(states, idle) for _, idle, states in every]))
    return side


def of_first(side: Side, first: int, group: Group) -> Side:
    """Return ``side`` with the groups, states and objects of the rank ``first``, on all ranks.

    *Collective*.
    """
    told = pickle.dumps((side.groups, side.states, side.objects))
    sent = told_by(first, told if own_rank() == first else None, group)
    groups, states, objects = together(lambda: pickle.loads(sent), group)
    return replace(side, groups=groups, states=states, objects=objects)


def _sendable(told: Side) -> Side:
    """Return ``told`` as it can be sent: tensors would be unpickled onto this rank's device."""
    side = replace(told, objects=_on_host(dict(told.objects)))
    try:
        pickle.dumps((side.groups, side.states, side.objects))
    except Exception as error:  # whatever objects raise that cannot be pickled
        raise TypeError(
            f"what an optimizer or a module keeps cannot be pickled ({type(error).__name__}: "
            f"{error}); keep tensors, numbers, texts and containers of them"
        ) from error
    return side


def _on_host(value: Any) -> Any:
    """Return ``value`` with the tensors of plain containers on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_host(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    return value


def _compare(ranks: Sequence[int], told: Sequence[tuple[_Facts, frozenset[str]]]) -> None:
    """Refuse what two ranks tell otherwise; of an idle tensor a rank has no say.

    Raises:
        ValueError: names the first, and both ranks.
    """
    for name in dict.fromkeys(name for facts, _ in told for name in facts):
        heard = {
            rank: facts.get(name, {})
            for rank, (facts, idle) in zip(ranks, told, strict=True)
            if name not in idle
        }
        problem = ranks_differ(name, heard) if heard else None
        if problem is not None:
            raise ValueError(problem)


def _merged(told: Sequence[tuple[Mapping[str, Saved], frozenset[str]]]) -> dict[str, Saved]:
    """Put together what the ranks tell of states: what one of them has is there.

    Ranks without elements come last: what they keep counts only where nobody else keeps anything.
    """
    found: dict[str, Saved] = {}
    for last in (False, True):
        for name, saved in (
            (name, saved)
            for states, idle in told
            for name, saved in states.items()
            if (name in idle) is last
        ):
            before = found.get(name)
            if before is not None:
                elements = {**saved.elements, **before.elements}
                saved = Saved(
                    elements={key: elements[key] for key in sorted(elements)},
                    values={**saved.values, **before.values},
                )
            found[name] = saved
    return found


def _on_all_meshes(ranks: Sequence[int], told: Sequence[Sequence[Told]]) -> tuple[Told, ...]:
    """Put together what ranks tell that see a tensor on other meshes, each on that of its unit.

    Beside tensor parallelism a tensor that is not cut by it lies on as many meshes as that has
    ranks. They are replicas, as plain tensors are on all ranks.

    Raises:
        ValueError: anything else differs, or the meshes do not share out the ranks.
    """
    found: list[Told] = []
    for each in zip_longest(*told):
        first = each[0]
        alike = {other and replace(other, rows=()) for other in each}
        rows = sorted({row for other in each if other is not None for row in other.rows})
        if first is None or len(alike) > 1 or len({len(row) for row in rows}) > 1:
            raise ValueError(_first_difference(ranks, told))
        if any(other.rows != first.rows for other in each):
            held = [rank for row in rows for rank in row]
            own = all(any(r in row for row in o.rows) for r, o in zip(ranks, each, strict=True))
            if sorted(held) != sorted(ranks) or not own:
                raise ValueError(_first_difference(ranks, told))
        found.append(replace(first, rows=tuple(rows)))
    return tuple(found)


def _first_difference(ranks: Sequence[int], told: Sequence[Sequence[Told]]) -> str:
    """Say at which tensor two ranks differ; they must."""
    for rank, other in zip(ranks, told, strict=True):
        for ours, theirs in zip_longest(told[0], other):
            if ours != theirs:
                return (
                    f"rank {ranks[0]} has {ours or 'no more tensors'}, rank {rank} "
                    f"{theirs or 'no more tensors'}. Build the same model on all ranks."
                )
    raise AssertionError("nothing differs")
