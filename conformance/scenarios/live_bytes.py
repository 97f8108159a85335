"""How many bytes of tensors are alive on this rank, now.

On an accelerator the allocator knows. On CPU nobody does: the profiler's memory events miss what
other threads free, and a gloo thread is often the last to let go of a buffer, so that every step
seems to leak. Here each storage that passes the dispatcher is followed by a weak reference.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SETTLE_SECONDS = 0.3
"""How long to wait for other threads to let go of what a finished collective used."""
FIRST_SETTLE_SECONDS = 2.0
"""The same until that was once in vain: on a busy machine a thread may not run for that long."""
QUIET_SECONDS = 0.1
"""How long to look where nothing tells what is usual. With ten times more work than cores a thread
still held a buffer at one reading in forty, for 5 to 25 ms."""
BUSY_SECONDS = 20.0
"""How long to wait beyond all that, while a thread of this process has work to do."""

_PLAIN = Tensor.__torch_dispatch__


class Meter(Protocol):
    """Reads live bytes; zero is what was there when it was started."""

    def read(self, usual: int | None = None) -> int:
        """Live bytes; while they are more than `usual`, waits a moment for buffers in flight.

        Without `usual` it is the least that was seen in `QUIET_SECONDS`.
        """

    def uncollected(self) -> int:
        """Live bytes as they are, without a garbage collection and without waiting."""


@contextmanager
def metering(device: torch.device) -> Iterator[Meter]:
    """A meter for `device`; on CPU it sees the tensors that operators touch inside the body.

    What exists before the body is left out of garbage collections inside it.
    """
    gc.collect()
    gc.freeze()
    try:
        if device.type == "cpu":
            with CpuMeter() as meter:
                yield meter
        else:
            yield AcceleratorMeter(device)
    finally:
        gc.unfreeze()


class AcceleratorMeter:
    """Bytes that the accelerator's allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._patience = Patience()
        self._warm_up()
        self._before = self._now()

    def read(self, usual: int | None = None) -> int:
        """See `Meter`. Blocks until the device is idle, and then as `Patience` does.

        A communicator's watchdog drops what a finished collective used, some time after it ended.
        """
        known = None if usual is None else usual + self._before
        return self._patience.settled(self._now, known) - self._before

    def uncollected(self) -> int:
        """See `Meter`."""
        return int(torch.accelerator.memory_allocated(self._device)) - self._before

    def _warm_up(self) -> None:
        """Let libraries take their workspaces, which stay and are nobody's.

        Each thread that multiplies has its own, and a product with a bias one more: 32 + 32 + 1 MiB
        on one card, which would count for live bytes of whatever multiplies first.
        """
        square = torch.ones(256, 256, device=self._device, requires_grad=True)
        nn.functional.linear(square @ square, square, square[0]).sum().backward()

    def _now(self) -> int:
        gc.collect()
        torch.accelerator.synchronize(self._device)
        return int(torch.accelerator.memory_allocated(self._device))


class CpuMeter(TorchDispatchMode):
    """Follows the storage of every tensor that an operator takes or gives."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        from torch.distributed.tensor import DTensor  # its import is a quarter of that of torch

        super().__init__()  # type: ignore[no-untyped-call]
        self._taking_apart = DTensor
        self._patience = Patience(others_rest)
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports dynamo

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, self._taking_apart) for kind in types):
            return NotImplemented  # it takes itself apart; the operators inside come here again
        result = func(*args, **(kwargs or {}))
        self._follow((args, kwargs, result))
        return result

    def read(self, usual: int | None = None) -> int:
        """See `Meter`. Blocks as `Patience` does."""
        gc.collect()
        return self._patience.settled(self.uncollected, usual)

    def uncollected(self) -> int:
        """See `Meter`."""
        spans = []
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:  # no bytes while a wrapper keeps only the empty shell
                spans.append((storage.data_ptr(), storage.nbytes()))
        return _covered(spans)

    def _follow(self, value: Any) -> None:
        if isinstance(value, Tensor):
            # wrappers and fake tensors have no bytes of their own
            if type(value).__torch_dispatch__ is _PLAIN and value.layout is torch.strided:
                self._add(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._follow(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._follow(item)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":
            return
        known = self._storages.get(storage._cdata)
        if known is None or known() is None:
            self._storages[storage._cdata] = weakref.ref(storage)


class Patience:
    """Waits for what other threads still hold: long until it was in vain, then for a moment.

    And longer while one of them is at work: who holds a buffer of a finished collective is, and on
    a machine with more work than cores it may get no processor for any time that could be named.
    """

    def __init__(self, resting: Callable[[], bool] = lambda: True) -> None:
        self._resting = resting
        self._seconds = FIRST_SETTLE_SECONDS
        self._busy = BUSY_SECONDS

    def settled(self, now: Callable[[], int], usual: int | None) -> int:
        """The least of what `now` gives, asked again and again while it is more than `usual`."""
        if usual is None:
            return self._least(now, 0, QUIET_SECONDS)
        least = self._least(now, usual, self._seconds)
        if least > usual:
            self._seconds = SETTLE_SECONDS
        return least

    def _least(self, now: Callable[[], int], enough: int, seconds: float) -> int:
        """See `settled`; for `seconds` at least, unless it is `enough` or less."""
        least, begun, resting = now(), time.monotonic(), False
        while least > enough:
            waited = time.monotonic() - begun
            if waited >= seconds + self._busy:
                self._busy = 0.0  # a thread that never rests tells nothing
                break
            if waited >= seconds and resting:
                break
            time.sleep(0.01)
            resting = self._resting()  # before the reading: what is left then, nobody will free
            least = min(least, now())
        return least


def others_rest() -> bool:
    """Whether all other threads of this process wait for something; True where none can be seen."""
    own, folder = threading.get_native_id(), "/proc/self/task"
    if not os.path.isdir(folder):  # not Linux
        return True
    others = (thread for thread in os.listdir(folder) if int(thread) != own)
    return all(_state(f"{folder}/{thread}/stat") == "S" for thread in others)


def _state(path: str) -> str:
    """The letter for what a thread does; that of one which waits if it has ended meanwhile."""
    try:
        with open(path) as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "S"


def _covered(spans: list[tuple[int, int]]) -> int:
    """Bytes in any of (address, length): a storage may lie in another's memory."""
    total = reached = 0
    for start, length in sorted(spans):
        total += max(0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total
