"""Processes whose parent has ended while they live on, also those in a session of their own.

On Linux a process can have the orphans below it given to itself instead of to the init process.
Each rank does that, so that they count as its children while it lives, and the forkserver does, so
that it gets, and ends, what a dead rank leaves. A process can also be sent a signal when its parent
ends. Elsewhere nothing is found: a process group is then all that ends with its rank. Knows process
ids; must not know ranks or jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Collection

__all__ = ["adopt_orphans", "children", "die_with_parent", "end_children", "kill_strangers"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_THREADS = "/proc/self/task"
_WALL = 0x40000000
"""Linux's flag for children of every kind, those too that send no signal when they end."""
_TICK = 0.01


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it; not inherited by its children."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the one with the id `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before that
        os._exit(0)


def children() -> tuple[int, ...]:
    """Process ids of the children of any thread of this process, dead ones too, in order."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # no such folder: not Linux
        threads = os.listdir(_THREADS)
        for thread in () if _childless() else threads:
            # a thread may end meanwhile
            with contextlib.suppress(OSError), open(f"{_THREADS}/{thread}/children") as file:
                found += map(int, file.read().split())
    return tuple(sorted(found))


def _childless() -> bool:
    """Whether the kernel says that no thread has any; else a rank has a dozen files to read."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except OSError as error:
        return error.errno == errno.ECHILD  # anything else: a kernel that does not take the flag
    return False


def kill_strangers(known: Collection[int]) -> None:
    """Kill and reap every child of this process that is not among `known`.

    What those leave behind comes to this process in its turn, so call it again whenever a child
    has ended. An id cannot be a stranger's: its process stays a child until it is reaped here.
    """
    for pid in children():
        if pid not in known:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_children(known: Collection[int], timeout: float) -> None:
    """Kill every child of this process that is not among `known`, and what it leaves behind.

    *Blocks* until there is none, `timeout` seconds at most.
    """
    deadline = time.monotonic() + timeout
    while set(children()) - set(known) and time.monotonic() < deadline:
        kill_strangers(known)
        time.sleep(_TICK)
