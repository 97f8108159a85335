"""What a call takes at the most beside what goes in and what comes out, on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from conformance.scenarios.live_bytes import CpuMeter, metering


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64, bias=False)


class Wide(nn.Module):
    """Four layers around two units of one: the root finishes last, and has the largest group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.inner, self.other = Inner(), Inner()


LAYER = 64 * 64 * 4  # bytes
ROOT = 4 * LAYER  # bytes of the largest group
SMALL = 4096  # counts of steps, what ranks tell each other


def above(there: Callable[[], Any], call: Callable[[], Any], allowed: int) -> int:
    """Bytes at the most beside what is ``there`` and what ``call`` returns beyond that.

    Calls twice: what is done once is done by the first. Where more than ``allowed`` is found, waits
    for a thread of gloo that still holds what a collective before has used.
    """
    made = size_of(_beyond(tensors_in(there()), call()))
    known = tensors_in(there())
    with metering(torch.device("cpu")), _Peak(size_of(known) + made + allowed) as meter:
        _ = [tensor.sum() for tensor in known]
        meter.peak = 0
        new = size_of(_beyond(known, call()))
    assert new == made
    return meter.peak - size_of(known) - made


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The memory behind the values of a state, as far as it is this rank's."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [each for value in tree for each in tensors_in(value)]
    if hasattr(tree, "local_shards"):
        return [shard.tensor for shard in tree.local_shards()]
    if isinstance(tree, DTensor):
        return [tree.to_local()]
    return [tree] if isinstance(tree, torch.Tensor) else []


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes, memory that several share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class _Peak(CpuMeter):
    """The most bytes that were ever alive after an operation."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.peak = 0
        self._allowed = allowed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.uncollected() > self.peak:
            enough = max(self.peak, self._allowed)
            self.peak = max(self.peak, self._patience.settled(self.uncollected, enough))
        return result


def _beyond(there: list[torch.Tensor], made: Any) -> list[torch.Tensor]:
    old = {tensor.untyped_storage().data_ptr() for tensor in there}
    return [t for t in tensors_in(made) if t.untyped_storage().data_ptr() not in old]
