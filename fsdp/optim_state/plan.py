"""What a unit has of each state once all ranks are heard: the same on every rank.

Pure functions of the layout and of what ranks have told. No collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp.optim_state.vocabulary import FSDPParamInfo, Member, Opaque, StateInfo, _OptimStateKey

Infos = Mapping[_OptimStateKey, StateInfo]


def common_keys(
    reports: Sequence[Sequence[_OptimStateKey]], *, merged: bool
) -> list[_OptimStateKey]:
    """Return the keys to save, in order.

    Args:
        reports: the keys of each rank.
        merged: with original parameters, of which a rank may hold nothing: those of any rank,
            sorted. Without: those of the first rank.

    Raises:
        RuntimeError: not ``merged``, and a rank lacks one of the first rank's.
    """
    if merged:
        return sorted({key for keys in reports for key in keys})
    wanted = list(reports[0])
    lacking = []
    for rank, keys in enumerate(reports):
        known = set(keys)
        missing = [key.unflat_param_names for key in wanted if key not in known]
        if missing:
            lacking.append(f"\nRank {rank} is missing states for the parameters: {missing}")
    if lacking:
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by "
            "rank 0's optimizer but some ranks are missing some of those states" + "".join(lacking)
        )
    return wanted


def plan_unit(
    info: FSDPParamInfo, keys: Sequence[_OptimStateKey], reports: Sequence[Infos]
) -> dict[Member, StateInfo]:
    """Return what each member of a unit has, on whichever rank; members without state are left out.

    Args:
        info: the unit.
        keys: those to save.
        reports: by rank of the shard group.

    Raises:
        RuntimeError: a trained parameter has no state although others of the unit have.
        AssertionError: ranks differ in what they must have in common.
    """
    wanted = set(keys)
    found = {m: _whole(info, m, reports) for m in info.members if m.key in wanted}
    if not any(found.values()):
        return {}
    for member in info.members:
        trained = any(info.param_requires_grad[index] for index in member.indices)
        if member not in found and trained:
            known = sorted(name for m in found for name in m.key.unflat_param_names)
            raise RuntimeError(
                f"{member.key.unflat_param_names[0]} is not in the optimizer state. The unit has "
                f"the parameters {sorted(info.names)}, and the optimizer has state of {known}. "
                "Give all trained parameters of a unit to the optimizer, or freeze this one."
            )
    _check_dtypes(info, found)
    return {member: whole for member, whole in found.items() if whole}


def state_names(plan: Mapping[Member, StateInfo]) -> list[str]:
    """Return the names of the states that have to be gathered, in order."""
    return sorted({name for whole in plan.values() for name in whole.tensors})


def _whole(info: FSDPParamInfo, member: Member, reports: Sequence[Infos]) -> StateInfo:
    """Return what the ranks that hold elements of ``member`` have, each thing once.

    What the others have is ignored: their steps did nothing.
    """
    name = member.key.unflat_param_names[0]
    whole = StateInfo()
    first: dict[str, int] = {}
    owners = info.owners(member) if info.is_sharded else [0]
    told = {rank: reports[rank].get(member.key, StateInfo()) for rank in owners}
    for rank, heard in told.items():
        for state, tensor in heard.tensors.items():
            known = whole.tensors.setdefault(state, tensor)
            if known.dtype != tensor.dtype:
                raise AssertionError(
                    f"rank {rank} has '{state}' of '{name}' in {tensor.dtype}, rank "
                    f"{first[state]} in {known.dtype}; one state has one dtype on all ranks"
                )
            first.setdefault(state, rank)
        for state, value in {**heard.scalar_tensors, **heard.non_tensors}.items():
            kept: dict[str, Any] = (
                whole.scalar_tensors if state in heard.scalar_tensors else whole.non_tensors
            )
            if not same(kept.setdefault(state, value), value):
                raise AssertionError(
                    f"Rank {rank} has different values for {state} of '{name}': {value}. Other "
                    f"ranks: {kept[state]}"
                )
            first.setdefault(state, rank)
    _check_sendable(info, name, owners, whole)
    for state, rank in first.items():
        kind = _kind(told[rank], state)
        lacking = [other for other, heard in told.items() if _kind(heard, state) != kind]
        if lacking:
            raise AssertionError(
                f"ranks {lacking} hold elements of '{name}' but no {kind} '{state}' of it, which "
                f"rank {rank} has. All ranks must take the same steps."
            )
    return whole


def _check_sendable(
    info: FSDPParamInfo, name: str, owners: Sequence[int], whole: StateInfo
) -> None:
    others = sorted(set(range(info.mesh.shard_size)) - set(owners))
    for state, value in whole.non_tensors.items():
        if isinstance(value, Opaque) and others:
            raise TypeError(
                f"'{state}' of '{name}' cannot be pickled, and the ranks {others}, which hold no "
                "element of it, need it to be sent. Keep plain values in the optimizer's state."
            )


def _kind(heard: StateInfo, state: str) -> str:
    if state in heard.tensors:
        return "tensor"
    return (
        "scalar tensor"
        if state in heard.scalar_tensors
        else ("value" if state in heard.non_tensors else "")
    )


def _check_dtypes(info: FSDPParamInfo, found: Mapping[Member, StateInfo]) -> None:
    for state in state_names(found):
        dtypes = {
            w.tensors[state].dtype
            for m, w in found.items()
            if state in w.tensors and not m.is_whole
        }
        if len(dtypes) > 1:
            raise AssertionError(
                f"'{state}' has the dtypes {sorted(map(str, dtypes))} within the unit of "
                f"{list(info.names)}; it is gathered in one piece, and needs one dtype"
            )


def same(one: Any, other: Any) -> bool:
    """Whether two values of a state are equal; nan is nan, and what cannot be compared is not."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:
        return False
