"""What ranks tell each other as objects, and errors that all of them raise or none.

Without a process group there is one rank, which agrees with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
Group = dist.ProcessGroup | None
_KINDS = frozenset(
    {
        FileExistsError,
        FileNotFoundError,
        NotADirectoryError,
        NotImplementedError,
        OSError,
        PermissionError,
        RuntimeError,
        TypeError,
        ValueError,
    }
)


def ranks_of(group: Group) -> list[int]:
    """Return the ranks of ``group``, None for the default one, as the default group counts."""
    if not dist.is_initialized():
        return [0]
    ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    return ranks


def own_rank() -> int:
    """Return this rank as the default group counts."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(value: Any, group: Group) -> list[Any]:
    """Return what each rank of ``group`` has passed. *Collective*. *Blocks* the host."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def told_by(rank: int, value: Any, group: Group) -> Any:
    """Return what ``rank`` has passed. *Collective*. *Blocks* the host."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=rank, group=group)
    return box[0]


def together(call: Callable[[], _T], group: Group) -> _T:
    """Return what ``call`` returns, or raise on all ranks of ``group`` what it raises on one.

    *Collective*: one exchange after the call, so the call itself must not wait for other ranks.

    Raises:
        Exception: the error itself where it arose, its kind and text on the others.
    """
    problem: Exception | None = None
    results: list[_T] = []
    try:
        results.append(call())
    except Exception as error:
        problem = error
    reports = gathered((_kind(problem), str(problem)) if problem is not None else None, group)
    if problem is not None:
        raise problem
    for rank, report in zip(ranks_of(group), reports, strict=True):
        if report is not None:
            raise report[0](f"on rank {rank}: {report[1]}")
    return results[0]


def _kind(problem: Exception) -> type[Exception]:
    """Return the nearest class that every process knows and that takes a text."""
    for kind in type(problem).__mro__:
        if kind in _KINDS or kind.__module__.startswith("fsdp."):
            return kind
    return RuntimeError
