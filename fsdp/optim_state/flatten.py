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
    states = given[0].keys()
    if any(entry.keys() != states for entry in given[1:]):
        raise ValueError(
            f"Differing optimizer state names for the unflattened parameters: {list(names)}: "
            f"{[sorted(entry) for entry in given]}"
        )
    if not states:
        if len(names) == 1:
            return None
        raise RuntimeError(
            f"The state of {member.key} is empty. A parameter without state has no entry."
        )
    part = Part(info=info, member=member)
    for name in sorted(states):
        values = [None if entry is None else entry[name] for entry in entries]
        kind = _kind_of_all(name, values, names)
        if kind == "tensor":
            _check_tensors(part, name, values)
            part.tensors[name] = values
        else:
            part.others[name] = None if kind is None else _common(name, values, names)
    return part


def cut(part: Part, source: Source) -> dict[str, Any]:
    """Return the entry of this rank's optimizer; empty if it holds nothing of the member.

    Args:
        part: what there is.
        source: gives values; asked for every one of them on every rank.

    *Memory*: what ``source`` gives, for one value at a time, beside the result.
    """
    info, member = part.info, part.member
    found: dict[str, Any] = {}
    for state, values in part.tensors.items():
        if member.is_whole:
            param = info.params[member.indices[0]]
            value = param.inside(source.tensor(values[0], info))
            found[state] = _as_stored(param, value).to(param.local.device, copy=True)
            continue
        run = source.run(info, member, values)
        found[state] = _run(part, values, source) if run is None else run
    if not member.numel:
        return {}
    return found | {state: _copied(value) for state, value in part.others.items()}


def _run(part: Part, values: Sequence[Any], source: Source) -> torch.Tensor | None:
    """Return this rank's elements (n,) of one state of a member; None for no elements."""
    info, member = part.info, part.member
    given = [
        (index, value)
        for index, value in zip(member.indices, values, strict=True)
        if value is not None
    ]
    device = info.params[member.indices[0]].local.device
    own = None  # what is one run of one value needs no zeros around it
    if all(info.pieces[index].numel != member.numel for index, _ in given):
        own = torch.zeros(member.numel, dtype=given[0][1].dtype, device=device)
    for index, value in given:
        param, piece = info.params[index], info.pieces[index]
        whole = param.inside(source.tensor(value, info))
        if piece.numel:
            run = _elements(param, whole, piece)
            if own is None:
                own = _plain_copy(run, device)
            else:
                own.narrow(0, piece.offset - member.offset, piece.numel).copy_(run)
            del run
        del whole  # or it would be there while the next one is fetched
    return own


def _elements(param: FlatParam, whole: torch.Tensor, piece: Fragment) -> torch.Tensor:
    """Return this rank's run (n,) of the ``whole`` of its part of a value."""
    run = param.in_order(whole).reshape(-1)
    return run if piece.numel == run.numel() else run[piece.start : piece.stop]


def _plain_copy(run: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the elements of ``run`` (n,) in a plain tensor, whatever it is."""
    if type(run) is torch.Tensor:
        return run.clone() if run.device == device else run.to(device)
    own = torch.empty(run.shape, dtype=run.dtype, device=device)
    own.copy_(run)  # which returns a tensor of the type of ``run``
    return own


def _as_stored(param: FlatParam, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the strides of ``param``, as steps on it would have made it."""
    if value.shape != param.shape:
        return value
    return param.restored(param.in_order(value).reshape(-1))


def _kind(value: Any) -> str:
    if not isinstance(value, _TENSORS):
        return "value"
    return "tensor" if len(value.shape) else "scalar tensor"


def _kind_of_all(state: str, values: Sequence[Any], names: Sequence[str]) -> str | None:
    """Return the kind of the values; None if there are none."""
    kinds = {_kind(value) for value in values if value is not None}
    if len(kinds) > 1:
        raise ValueError(
            f"Differing optimizer state types for state {state} of the unflattened parameters "
            f"{list(names)}: {sorted(kinds)}"
        )
    return kinds.pop() if kinds else None


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
        if value is not None and value.shape != shape:
            raise ValueError(
                "Tensor optimizer state does not have same shape as its parameter: "
                f"{tuple(value.shape)} {tuple(shape)} for state {state} of "
                f"'{part.info.names[index]}'"
            )


def _common(state: str, values: Sequence[Any], names: Sequence[str]) -> Any:
    first = values[0]
    if first is None or any(value is None or not same(first, value) for value in values[1:]):
        shown = dict(zip(names, values, strict=True))
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have scalar state "
            f"with the same value and dtype but got {shown} for state {state}"
        )
    return first


def _copied(value: Any) -> Any:
    """Return a value that the optimizer may take for its own, tensors in host memory."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.is_cpu else value.cpu()
