"""States under the names of the plain model, cut into what this rank's optimizer holds.

In two stages: ``examine`` looks at everything and refuses, ``cut`` makes the tensors. Knows one
member of one unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdp.engine.layout import Fragment
from fsdp.flat_parameter import FlatParam
from fsdp.optim_state.judge import same, text_of
from fsdp.optim_state.vocabulary import FSDPParamInfo, Member, _PosDimTensorInfo
from fsdp.state_dict.form import form_told


class Source(Protocol):
    """Where whole values come from. What it does may be collective: every rank asks alike."""

    def tensor(self, value: Any, info: FSDPParamInfo) -> torch.Tensor:
        """Return a whole value in any form as a plain tensor."""

    def run(
        self, info: FSDPParamInfo, member: Member, values: Sequence[Any]
    ) -> torch.Tensor | None:
        """Return this rank's run of the values of a member; None: ask for whole ones."""


_TENSORS = (torch.Tensor, _PosDimTensorInfo)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one member is to have.

    Attributes:
        info: its unit.
        member: the member.
        tensors: state name -> the whole value of each parameter, in any form; None: zeros.
        others: state name -> value.
    """

    info: FSDPParamInfo
    member: Member
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield what all ranks must have in common."""
        names = self.member.key.unflat_param_names
        for state, values in self.tensors.items():
            for name, value in zip(names, values, strict=True):
                if value is not None:
                    form = form_told(value) if isinstance(value, torch.Tensor) else "whole tensor"
                    yield f"{state} of '{name}' {tuple(value.shape)} {value.dtype} {form}"
        for state, value in self.others.items():
            yield f"{state} of '{names[0]}' {text_of(value)}"


def examine(info: FSDPParamInfo, member: Member, state: Mapping[str, Any]) -> Part | None:
    """Return what ``state`` has for ``member``; None for no entry at all.

    Raises:
        ValueError: the entries do not fit the parameters, or not together in a flat one.
        RuntimeError: there are entries for a flat parameter, but nothing in them.
    """
    names = member.key.unflat_param_names
    entries = [state.get(name) for name in names]
    given = [entry for entry in entries if entry is not None]
    if not given:
        return None
    if any(set(entry) != set(given[0]) for entry in given):
        raise ValueError(
            f"Differing optimizer state names for the unflattened parameters: {list(names)}: "
            f"{[sorted(entry) for entry in given]}"
        )
    if not given[0]:
        if len(names) == 1:
            return None
        raise RuntimeError(
            f"The state of {member.key} is empty. A parameter without state has no entry."
        )
    part = Part(info=info, member=member)
    for name in sorted(given[0]):
        values = [None if entry is None else entry[name] for entry in entries]
        known = [value for value in values if value is not None]
        if not known:
            part.others[name] = None
        elif _kind(known[0]) == "tensor":
            _check_kinds(name, known, names)
            _check_tensors(part, name, values)
            part.tensors[name] = values
        else:
            _check_kinds(name, known, names)
            part.others[name] = _common(name, values, names)
    return part


def cut(part: Part, source: Source) -> dict[str, Any]:
    """Return the entry of this rank's optimizer; empty if it holds nothing of the member.

    Args:
        part: what there is.
        source: gives values; asked for every one of them on every rank.

    *Memory*: what ``source`` gives, for one value at a time, beside the result.
    """
    member, params = part.member, part.info.params
    layout, rank = part.info.group.shard.layout, part.info.mesh.shard_rank
    device = params[member.indices[0]].local.device
    found: dict[str, Any] = {}
    for state, values in part.tensors.items():
        if member.is_whole:
            param = params[member.indices[0]]
            value = param.inside(source.tensor(values[0], part.info))
            found[state] = _as_stored(param, value).to(device, copy=True)
            continue
        run = source.run(part.info, member, values)
        if run is not None:
            found[state] = run
            continue
        dtype = next(value.dtype for value in values if value is not None)
        own = torch.zeros(member.numel, dtype=dtype, device=device)
        for index, value in zip(member.indices, values, strict=True):
            if value is not None:
                piece = layout.piece(index, rank)
                target = own.narrow(0, piece.offset - member.offset, piece.numel)
                whole = source.tensor(value, part.info)
                _place(target, params[index], params[index].inside(whole), piece)
                del whole  # or it would be there while the next one is fetched
        found[state] = own
    if not member.numel:
        return {}
    return found | {state: _copied(value) for state, value in part.others.items()}


def _place(target: torch.Tensor, param: FlatParam, whole: torch.Tensor, piece: Fragment) -> None:
    """Copy this rank's run of the ``whole`` of its part of a value; nothing of it stays."""
    if piece.numel:
        target.copy_(param.in_order(whole).reshape(-1)[piece.start : piece.stop])


def _as_stored(param: FlatParam, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the strides of ``param``, as steps on it would have made it."""
    if value.shape != param.shape:
        return value
    return param.restored(param.in_order(value).reshape(-1))


def _kind(value: Any) -> str:
    if not isinstance(value, _TENSORS):
        return "value"
    return "tensor" if len(value.shape) else "scalar tensor"


def _check_kinds(state: str, values: Sequence[Any], names: Sequence[str]) -> None:
    kinds = sorted({_kind(value) for value in values})
    if len(kinds) > 1:
        raise ValueError(
            f"Differing optimizer state types for state {state} of the unflattened parameters "
            f"{list(names)}: {kinds}"
        )


def _check_tensors(part: Part, state: str, values: Sequence[Any]) -> None:
    if part.member.is_whole:
        return  # its state may be anything
    dtypes = {value.dtype for value in values if value is not None}
    if len(dtypes) > 1:
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have "
            f"positive-dimension tensor state with the same dtype but got dtypes "
            f"{sorted(map(str, dtypes))} for state {state} and unflattened parameter names "
            f"{list(part.member.key.unflat_param_names)}"
        )
    for index, value in zip(part.member.indices, values, strict=True):
        shape = part.info.params[index].outer_shape
        if value is not None and torch.Size(value.shape) != shape:
            raise ValueError(
                "Tensor optimizer state does not have same shape as its parameter: "
                f"{tuple(value.shape)} {tuple(shape)} for state {state} of "
                f"'{part.info.names[index]}'"
            )


def _common(state: str, values: Sequence[Any], names: Sequence[str]) -> Any:
    first = values[0]
    if any(value is None or not same(first, value) for value in values):
        shown = dict(zip(names, values, strict=True))
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have scalar state "
            f"with the same value and dtype but got {shown} for state {state}"
        )
    return first


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
