"""What a unit has of each state once all ranks are heard: the same on every rank.

Pure functions of the layout and of what ranks have told. No collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp.optim_state.judge import ranks_differ
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
    """Return what the ranks that hold elements of ``member`` have, which is the same on all.

    What the others have is ignored: their steps did nothing.
    """
    name = member.key.unflat_param_names[0]
    owners = info.owners(member) if info.is_sharded else [0]
    told = {rank: reports[rank].get(member.key, StateInfo()) for rank in owners}
    ranks = info.ranks
    problem = ranks_differ(name, {ranks[rank]: heard.facts() for rank, heard in told.items()})
    if problem is not None:
        raise AssertionError(problem)
    whole = told[owners[0]]
    _check_sendable(info, name, owners, whole)
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
