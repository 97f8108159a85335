"""Leases: which of this machine's accelerators a job has to itself while other jobs run beside it.

A lease is a lock file per device, held by the operating system for as long as the holder lives.
Knows files and lists of devices. Must not know ranks or jobs, and imports torch only to count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["Leases", "Visible", "leases_of", "visible_devices", "visible_variable"]

LEASE_TIMEOUT = 1800.0
"""Seconds that a job waits for its devices; the jobs in front of it are bounded themselves."""

TOLD_AFTER = 10.0
"""Seconds of waiting after which that is logged; of waits that are alike, a process logs one."""

_logger = logging.getLogger(__name__)
_OTHERS = "other jobs of this user"
_TICK = 0.01
_SUFFIXES = ("_VISIBLE_DEVICES", "_AFFINITY_MASK")
_OF_CONTAINERS = frozenset({"NVIDIA_VISIBLE_DEVICES"})
"""Read by the runtime that starts a container, where devices are numbered anew."""


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The devices that this process sees, in the order of their index.

    Attributes:
        variable: the environment variable that selects devices, or would.
        names: what it calls each of them; equal names in two processes are one device.
    """

    variable: str
    names: tuple[str, ...]

    def narrowed(self, indices: Sequence[int]) -> dict[str, str]:
        """Environment of a process that shall see the devices at `indices` only; {} for all."""
        if len(indices) == len(self.names):
            return {}
        return {self.variable: ",".join(self.names[index] for index in indices)}


def visible_variable(kind: str) -> str:
    """The environment variable that selects devices of a type, as its makers mostly name it."""
    return f"{kind.upper()}{_SUFFIXES[0]}"


def visible_devices(kind: str, count: int, environ: Mapping[str, str]) -> Visible:
    """How the `count` devices of type `kind` are named in an environment.

    Args:
        kind: device type.
        count: how many of them torch sees.
        environ: where a variable ``*_VISIBLE_DEVICES`` may select devices; one that lists another
            number of them is not about these.
    """
    own = visible_variable(kind)
    listed = {
        variable: tuple(entry.strip() for entry in value.split(","))
        for variable, value in environ.items()
        if variable.endswith(_SUFFIXES) and variable not in _OF_CONTAINERS
    }
    fitting = sorted(variable for variable, names in listed.items() if len(names) == count)
    if not fitting:
        return Visible(variable=own, names=tuple(map(str, range(count))))
    variable = own if own in fitting else fitting[0]
    return Visible(variable=variable, names=listed[variable])


class Leases:
    """Hands out devices, all that a job needs or none, to processes of one user on one machine.

    Whoever comes first is served first: a job that needs many devices is not overtaken by small
    ones. A holder's death ends its lease.
    """

    def __init__(self, *, kind: str, visible: Visible, directory: Path | None = None) -> None:
        """Nothing is locked yet.

        Args:
            kind: device type; types are leased apart.
            visible: the devices.
            directory: for the lock files, the same for all processes; None for one of this user.
        """
        self.kind = kind
        self.visible = visible
        self._directory = directory or _directory_of_user()

    def __len__(self) -> int:
        return len(self.visible.names)

    @contextmanager
    def hold(
        self, count: int, *, prefer: Sequence[int] = (), timeout: float = LEASE_TIMEOUT
    ) -> Iterator[tuple[int, ...]]:
        """Inside, `count` devices belong to this thread; gives their indices, ascending.

        *Blocks* until they are free, and logs that it does if that takes longer than `TOLD_AFTER`.
        A thread that holds some must not ask for more.

        Args:
            count: at most as many as are visible.
            prefer: indices to take if all of them are free.
            timeout: bound on the wait in seconds.

        Raises:
            ValueError: more devices than are visible, or fewer than one.
            RuntimeError: they were not free in time.
        """
        if not 1 <= count <= len(self):
            raise ValueError(
                f"a lease of {count} devices of type {self.kind}: {len(self)} are visible "
                f"({self.visible.variable})"
            )
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = self._wait(count, tuple(prefer), timeout)
        try:
            yield tuple(sorted(taken))
        finally:
            for lock in taken.values():
                lock.release()

    def _wait(self, count: int, prefer: tuple[int, ...], timeout: float) -> dict[int, FileLock]:
        """The locks of `count` devices.

        Only who stands at the head of the queue takes locks, and nobody queues who holds one: so no
        two processes ever wait for each other.
        """
        head, started = self._lock("queue"), time.monotonic()
        try:
            while not (taken := self._try(count, prefer) if _is_held(head) else {}):
                waited = time.monotonic() - started
                if waited >= TOLD_AFTER:
                    devices = f"{count} {self.kind} device{'' if count == 1 else 's'}"
                    _log_once(f"waiting for {devices} that {_OTHERS} hold{self._where}")
                if waited >= timeout:
                    raise self._too_late(count, timeout)
                time.sleep(_TICK)
        finally:
            head.release()
        return taken

    def _try(self, count: int, prefer: tuple[int, ...]) -> dict[int, FileLock]:
        """Locks of `count` free devices, {} if fewer are free."""
        with ExitStack() as stack:
            free: dict[int, FileLock] = {}
            for index, name in enumerate(self.visible.names):
                lock = self._lock(name)
                if _is_held(lock):
                    free[index] = lock
                    stack.callback(lock.release)
            if len(free) < count:
                return {}
            chosen = _choose(tuple(free), count, prefer)
            stack.pop_all()
            for index in free.keys() - set(chosen):
                free[index].release()
            return {index: free[index] for index in chosen}

    def _lock(self, name: str) -> FileLock:
        plain = re.sub(r"[^\w.-]", "_", name)
        return FileLock(self._directory / f"{self.kind}-{plain}.lock")

    def _too_late(self, count: int, timeout: float) -> RuntimeError:
        return RuntimeError(
            f"{count} of {len(self)} devices of type {self.kind} were not free within "
            f"{timeout:g} s: {_OTHERS} hold them{self._where}; end those, or start fewer workers"
        )

    @property
    def _where(self) -> str:
        return f" (lock files in {self._directory})"


def _is_held(lock: FileLock) -> bool:
    """Whether this thread has the lock, if nobody else has it."""
    if not lock.is_locked:
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
    return lock.is_locked


@cache
def _log_once(sentence: str) -> None:
    _logger.warning(sentence)


def leases_of(kind: str) -> Leases | None:
    """The leases of the accelerators that this process sees; None for the CPU."""
    if kind == "cpu":
        return None
    import torch  # the controller of CPU ranks does without

    count = torch.accelerator.device_count()
    return Leases(kind=kind, visible=visible_devices(kind, count, os.environ))


def _choose(free: tuple[int, ...], count: int, prefer: tuple[int, ...]) -> tuple[int, ...]:
    """The preferred devices, else an aligned run of neighbours, else the first free ones.

    Aligned runs leave other aligned runs free, and neighbours are close to each other.
    """
    if len(prefer) == count and set(prefer) <= set(free):
        return prefer
    for start in range(0, max(free) + 1, count):
        run = tuple(range(start, start + count))
        if set(run) <= set(free):
            return run
    return free[:count]


def _directory_of_user() -> Path:
    return Path(tempfile.gettempdir()) / f"fsdp-conformance-leases-{os.getuid()}"
