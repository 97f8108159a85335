"""What the ranks of one side agree on: compared first, so that none writes what another denies.

Knows what ranks tell, not what they hold; whether that is the same is the judge's business.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from fsdp.engine.agreement import together
from fsdp.optim_state.judge import Facts, facts_of, ranks_differ
from fsdp.reshard.optimizer import Saved
from fsdp.reshard.side import Side, Told
from fsdp.reshard.telling import Group, told_by, told_by_all

_Facts = dict[str, Facts]  # by name of the tensor, or of what has options


def agreed_tensors(told: Side | None, ranks: Sequence[int], group: Group) -> Side:
    """Return what tensors the ranks of one side tell of, on all ranks, and nothing else.

    Args:
        told: what this rank tells; None if it is not of the side.
        ranks: those of the side.
        group: contains them.

    Raises:
        ValueError: they tell of other tensors; names the first.
    """
    digests = told_by_all(told.digest() if told else None, group)
    if len({digest for digest in digests if digest is not None}) > 1:
        every = told_by_all((told.tensors,) if told else None, group)
        return Side(tensors=_on_all_meshes(ranks, [each for (each,) in filter(None, every)]))
    tensors = told_by(ranks[0], told.tensors if told else None, group)
    return Side(tensors=tensors)


def agreed_side(told: Side | None, ranks: Sequence[int], group: Group) -> Side:
    """Return what the ranks of one side tell, on all ranks.

    States of optimizers are put together: what one of the ranks that hold elements has is there.
    Options of groups are those of all; extra state of modules is that of the first rank. Nothing of
    it is shared with the model or the optimizers: training may go on.

    Raises:
        ValueError: they tell of other tensors, of other values in optimizer states or of other
            options; names the first.
        TypeError: what a rank keeps cannot be pickled.
    """
    tensors = agreed_tensors(told, ranks, group).tensors
    mine = together(lambda: _packed(told), group)
    digests = told_by_all(mine[:2] if mine is not None else None, group)
    present = [digest for digest in digests if digest is not None]
    groups, states, objects = _unpacked(ranks[0], mine, group)
    if len(set(present)) > 1:
        facts = told_by_all((_facts(told), told.idle) if told else None, group)
        _compare(ranks, [each for each in facts if each is not None])
        every = told_by_all((mine[2], told.idle) if mine and told else None, group)
        states = _merged([(pickle.loads(each[0]), each[1]) for each in every if each])
    return Side(tensors=tensors, states=states, groups=groups, objects=objects)


def _packed(told: Side | None) -> tuple[str, str, bytes, bytes] | None:
    """Return digests of what is compared, then what travels; None if nothing is told."""
    if told is None:
        return None
    try:
        states = pickle.dumps(dict(told.states))
        # To the CPU: other ranks would unpickle onto this rank's device.
        rest = pickle.dumps((told.groups, _on_host(dict(told.objects))))
    except Exception as error:  # whatever objects raise that cannot be pickled
        raise TypeError(
            f"what an optimizer or a module keeps cannot be pickled ({type(error).__name__}: "
            f"{error}); keep tensors, numbers, texts and containers of them"
        ) from error
    facts = repr(sorted(_facts(told).items()))
    return hashlib.sha256(facts.encode()).hexdigest(), str(len(told.states)), states, rest


def _on_host(value: Any) -> Any:
    """Return ``value`` with the tensors of plain containers on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_host(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    return value


def _unpacked(
    first: int, mine: tuple[str, str, bytes, bytes] | None, group: Group
) -> tuple[Any, Mapping[str, Saved], Mapping[str, Any]]:
    """Return groups, states and objects of the first rank."""
    states, rest = told_by(first, mine[2:] if mine is not None else None, group)

    def loaded() -> tuple[Any, Mapping[str, Saved], Mapping[str, Any]]:
        groups, objects = pickle.loads(rest)
        return groups, pickle.loads(states), objects

    return together(loaded, group)


def _facts(told: Side) -> _Facts:
    """Return what is compared between ranks: dtypes and values of states, and options."""
    groups = told.groups
    number = "none" if groups is None else str(len(groups))
    found: _Facts = {"the optimizers": {"parameter groups": number}}
    for index, group in enumerate(groups or ()):
        found[f"parameter group {index}"] = facts_of({}, group)
    for name, saved in told.states.items():
        found[name] = facts_of(saved.elements, saved.values)
    return found


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
