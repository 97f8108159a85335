"""A process with torch imported that forks ranks on request, kills them, and reports their exits.

It runs no tensor operator: a child forked from a process that has run a parallel one hangs in
OpenMP. It initialises no accelerator: a forked child could not use it. Started by `process.py` as
its own interpreter; ends, with all ranks, when the controller is gone. Must not know jobs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from conformance.ranks.orphans import (
    adopt_orphans,
    children,
    die_with_parent,
    end_children,
    kill_strangers,
)
from conformance.ranks.setup import STACK_SIGNAL, RankSetup
from conformance.ranks.wire import WireError, receive, send

__all__ = ["main"]

_PARENT_CHECK_MS = 1000
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_LAST_WORDS = 4.0
"""Seconds; less than the controller waits for this process to end in order."""


def main(channel_fd: int, exits_fd: int, preload: list[str], root: str) -> None:
    """Serve until the controller closes the channel or dies. Does not return.

    Args:
        channel_fd: stream socket for requests and answers.
        exits_fd: pipe for "pid wait-status" lines.
        preload: modules to import before the first fork; torch is imported in any case.
        root: directory to remove if the controller dies without closing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
    server = _Server(channel, exits_fd)
    gc.disable()  # a tenth of the imports would be collections that find nothing
    try:
        with _compiler_cache_in(root):
            _import_all([*preload, "conformance.ranks.worker"])
        server.adopt_orphans()
        gc.freeze()  # the ranks' collections then neither visit nor copy what is shared
        gc.enable()  # last: the first collection would visit all that is not frozen
        send(channel, pickle.dumps({"number": 0}))
        server.loop()
    except _ImportFailed as error:
        send(channel, pickle.dumps({"number": 0, "error": str(error)}))
    except (OSError, WireError):
        pass  # the controller is gone in the middle of a message
    finally:
        server.kill_all()
        if not server.closed_in_order:
            shutil.rmtree(root, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # else torch takes its operators apart, and whoever closes this server waits for it


@contextlib.contextmanager
def _compiler_cache_in(root: str) -> Iterator[None]:
    """Inside, the folder that importing torch's compiler makes goes with `root`.

    Else that empty folder would stay in `TMPDIR`. Ranks that compile take the user's cache, here
    and in the next run.
    """
    if _COMPILER_CACHE in os.environ:
        yield
        return
    made = os.environ[_COMPILER_CACHE] = os.path.join(root, "compiler")
    try:
        yield
    finally:
        if os.environ.get(_COMPILER_CACHE) == made:  # a preloaded module may have set its own
            del os.environ[_COMPILER_CACHE]


class _ImportFailed(Exception):
    pass


def _import_all(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise _ImportFailed(
                f"cannot preload {name}: {type(error).__name__}: {error}"
            ) from error


class _Server:
    """Answers requests in order; notices exits between them."""

    def __init__(self, channel: socket.socket, exits_fd: int) -> None:
        self.closed_in_order = False
        self._channel = channel
        self._exits_fd = exits_fd
        self._children: set[int] = set()
        self._own: frozenset[int] = frozenset()  # children of modules that were imported
        self._parent = os.getppid()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def loop(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while os.getppid() == self._parent:
            ready = {fd for fd, _ in poll.poll(_PARENT_CHECK_MS)}
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._reap()
            if self._channel.fileno() in ready and not self._answer():
                return

    def adopt_orphans(self) -> None:
        """From now on no process that a rank has started outlives both it and this one."""
        self._own = frozenset(children())
        adopt_orphans()

    def kill_all(self) -> None:
        for pid in self._children:
            _kill_group(pid, signal.SIGKILL)
        end_children(self._own, _LAST_WORDS)

    def _answer(self) -> bool:
        """Serve one request; False when there will be no more."""
        request, fds = self._receive()
        if request is None:
            return False
        kind = request["kind"]
        if kind == "close":
            self.closed_in_order = True
            return False
        if kind == "fork":
            answer = {"pid": self._fork(request["setup"], fds[0])}
        else:
            for pid in request["pids"]:
                if pid in self._children:
                    self._signal(pid, request["signal"], group=request["group"])
            answer = {}
        send(self._channel, pickle.dumps(answer | {"number": request["number"]}))
        return True

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """A request; a descriptor travels with one byte in front of it."""
        marker, fds, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not marker:
            return None, []
        payload = receive(self._channel)
        return (None if payload is None else pickle.loads(payload)), list(fds)

    @staticmethod
    def _signal(pid: int, number: int, *, group: bool) -> None:
        if group:
            _kill_group(pid, number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _fork(self, setup: RankSetup, fd: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_rank(setup, fd, server)
            finally:
                os._exit(70)
        os.close(fd)
        self._children.add(pid)
        return pid

    def _become_rank(self, setup: RankSetup, fd: int, server: int) -> None:
        os.setsid()
        die_with_parent(server)
        adopt_orphans()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for own in (self._wake_read, self._wake_write, self._exits_fd):
            os.close(own)
        self._channel.close()
        _redirect(setup.output)
        stacks = open(setup.stacks, "a")  # noqa: SIM115 - faulthandler needs it for the whole life
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        faulthandler.enable(all_threads=True)
        _set_environment(setup)
        from conformance.ranks.worker import serve

        serve(setup, socket.socket(fileno=fd))

    def _reap(self) -> None:
        """Report every dead rank, after killing what is left of its process group and children."""
        kill_strangers(self._children | self._own)
        for pid in list(self._children):
            # The zombie keeps its process id taken, so the group cannot be a stranger's.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid, signal.SIGKILL)
            # its children became this process's when it ended; before the report, not after
            kill_strangers(self._children | self._own)
            _, status = os.waitpid(pid, 0)
            self._children.discard(pid)
            os.write(self._exits_fd, f"{pid} {status}\n".encode())


def _kill_group(pid: int, number: int) -> None:
    """Signal the process group of a child that is not reaped yet."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)  # it has not come to its setsid yet


def _redirect(output: str) -> None:
    # Appending: the controller may cut the file, and later writes then go to its new end.
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.close(null)


def _set_environment(setup: RankSetup) -> None:
    os.environ.update(setup.environment)
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world),
        LOCAL_WORLD_SIZE=str(setup.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
    )
