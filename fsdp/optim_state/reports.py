"""What ranks tell each other before any large tensor moves.

One exchange of small objects per call; after it every rank makes the same plan from the same facts.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fsdp.optim_state.names import Names
from fsdp.optim_state.profiler import SimpleProfiler
from fsdp.optim_state.vocabulary import FSDPParamInfo, Opaque, StateInfo, _OptimStateKey


@dataclass(kw_only=True)
class Report:
    """What one rank has.

    Attributes:
        problem: whether it cannot go on.
        keys: the parameters that have state here, in the order of its optimizer.
        infos: what it knows of those that units manage.
        stays: whether it wants whole tensors where they are gathered.
    """

    problem: bool = False
    stays: bool = False
    keys: list[_OptimStateKey] = field(default_factory=list)
    infos: dict[_OptimStateKey, StateInfo] = field(default_factory=dict)

    def part(self, infos: Iterable[FSDPParamInfo]) -> Report:
        """Return what concerns the units of ``infos``, and unmanaged parameters."""
        ours = {member.key for info in infos for member in info.members}
        return Report(
            problem=self.problem,
            stays=self.stays,
            keys=[key for key in self.keys if key in ours or not key.is_fsdp_managed],
            infos={key: _sendable(info) for key, info in self.infos.items() if key in ours},
        )


def peers_of(info: FSDPParamInfo) -> dist.ProcessGroup | None:
    """Return the ranks that a unit is sharded over, or else replicated."""
    mesh = info.mesh
    if mesh.shard_group is not None and mesh.shard_size > 1:
        return mesh.shard_group
    return mesh.replicate_group


def reports_of_all(names: Names, mine: Report) -> dict[dist.ProcessGroup | None, list[Report]]:
    """Return the reports of all ranks, by the groups of ``peers_of``, in their order.

    *Collective*: two all-gathers of small objects over each different group. *Blocks* the host.
    """
    by_group: dict[dist.ProcessGroup | None, list[FSDPParamInfo]] = {}
    for info in names.infos:
        by_group.setdefault(peers_of(info), []).append(info)
    found: dict[dist.ProcessGroup | None, list[Report]] = {}
    for group, infos in by_group.items():
        part = mine.part(infos)
        if group is None or group.size() == 1:
            found[group] = [part]
            continue
        reports: list[Report] = [part] * group.size()
        with SimpleProfiler.profile(SimpleProfiler.Type.ALLGATHER_OBJ):
            dist.all_gather_object(reports, part, group=group)
        found[group] = reports
    return found


def _sendable(info: StateInfo) -> StateInfo:
    values = {name: _or_opaque(value) for name, value in info.non_tensors.items()}
    return StateInfo(tensors=info.tensors, scalar_tensors=info.scalar_tensors, non_tensors=values)


def _or_opaque(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        pickle.dumps(value)
    except Exception:
        return Opaque()
    return value
