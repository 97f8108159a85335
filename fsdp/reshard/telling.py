"""What ranks tell each other as objects.

Without a process group there is one rank, which tells itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp.engine.agreement import exchanged
from fsdp.engine.mesh import message_device

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


def heard(rank: int, message: bytes, length: int, group: Group) -> bytes:
    """Return the message of ``rank``, of which all know the length. *Collective*: one broadcast.

    Args:
        rank: as the default group counts.
        message: of this rank, which counts if it is ``rank``; no longer than ``length``.
        length: of the message of ``rank``, in bytes.
        group: the ranks.
    """
    if not dist.is_initialized():
        return message
    data = _bytes(message, length, group)
    dist.broadcast(data, src=rank, group=group)
    return bytes(data.cpu().numpy())


def told_to(rank: int, call: Callable[[], Any], group: Group) -> list[bytes]:
    """Return on ``rank`` what ``call`` has returned on each rank, and nothing on the others.

    It comes pickled: an error of reading it would be one of ``rank`` alone.

    *Collective*: one exchange, in which an error of ``call`` is raised on all, and one gather.
    *Memory*: on ``rank``, as many messages as there are ranks, each as long as the longest.
    """

    def pickled() -> tuple[bytes, tuple[int]]:
        message = pickle.dumps(call())
        return message, (len(message),)

    message, told = exchanged(pickled, group, 1)
    lengths = [length for (length,) in told]
    if not dist.is_initialized():
        return [message]
    sent = _bytes(message, max(lengths), group)
    found = [torch.empty_like(sent) for _ in lengths] if own_rank() == rank else None
    dist.gather(sent, found, dst=rank, group=group)
    parts = zip(found or (), lengths, strict=False)
    return [part[:length].cpu().numpy().tobytes() for part, length in parts]


def _bytes(message: bytes, length: int, group: Group) -> torch.Tensor:
    """Return ``message`` and zeros (length,), where messages of ``group`` lie."""
    padded = bytearray(message.ljust(length, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8).to(message_device(group))
