"""Forkservers of ranks that are forked from a process with torch imported: a start costs seconds.

A spare process waits for what a new interpreter would be told, and does that. Spares are forked
before anything of the tree under test is imported, so that each imports it for itself, and before
any tensor operator has run. Knows how `conformance.ranks` starts its server; must not know tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_FIRST_FREE = 3
_MOST = 16
_TICK = 0.01


def fork_servers(spares: int, prepare: Callable[[], None]) -> None:
    """From now on the ranks' servers are spares of this process, as long as there are any.

    Args:
        spares: how many processes to keep waiting; the next ones are new interpreters.
        prepare: called in each before anything else.
    """
    from conformance.ranks import process

    waiting = [_Spare(prepare) for _ in range(spares)]

    def start(command: Sequence[str], **options: Any) -> Any:
        if not waiting:
            return subprocess.Popen(command, **options)
        return waiting.pop().become(command[-1], options["env"], options["pass_fds"], options)

    process.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


class _Spare:
    """A child that waits, or has become a server; as much of `subprocess.Popen` as is asked for."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self._channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            _wait_and_become(theirs, prepare)
        theirs.close()

    def become(
        self,
        code: str,
        env: Mapping[str, str],
        fds: Sequence[int],
        options: Mapping[str, Any],
    ) -> _Spare:
        """Tell it what a new interpreter would be told."""
        log = options["stdout"].fileno()
        told = json.dumps({"code": code, "env": dict(env), "fds": list(fds)}).encode()
        socket.send_fds(self._channel, [len(told).to_bytes(8, "big")], [*fds, log])
        self._channel.sendall(told)
        self._channel.close()
        return self

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("forkserver", timeout or 0.0)
            time.sleep(_TICK)
        return status


def _wait_and_become(channel: socket.socket, prepare: Callable[[], None]) -> None:
    """Run in the spare; does not return."""
    status = 1
    try:
        size, fds, _, _ = socket.recv_fds(channel, 8, _MOST)
        if not size:  # nobody needs it any more
            os._exit(0)
        told = json.loads(channel.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        channel.close()
        _take(fds, [*told["fds"], 1])
        os.setsid()
        os.environ.clear()
        os.environ.update(told["env"])
        prepare()
        exec(told["code"], {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _take(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, the last one also that of errors; close all others."""
    high = max([*fds, *numbers]) + 1
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, high) for fd in fds]
    os.closerange(_FIRST_FREE, high)
    for fd, number in zip(held, numbers, strict=True):
        os.dup2(fd, number, inheritable=number <= 1)
        os.close(fd)
    os.dup2(1, 2)
