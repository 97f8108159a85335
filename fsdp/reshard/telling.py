"""What ranks tell each other as objects.

Without a process group there is one rank, which tells itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

Group = dist.ProcessGroup | None


def ranks_of(group: Group) -> list[int]:
    """Return the ranks of ``group``, None for the default one, as the default group counts."""
    if not dist.is_initialized():
        return [0]
    ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    return ranks


def own_rank() -> int:
    """Return this rank as the default group counts."""
    return dist.get_rank() if dist.is_initialized() else 0


def told_by_all(value: Any, group: Group) -> list[Any]:
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
