"""The controller's handles on the forkserver and on the ranks that it forks.

Knows processes, descriptors and signals. Must not know jobs or verdicts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.ranks.evidence import tail_of
from conformance.ranks.setup import RankSetup
from conformance.ranks.wire import Inbox, WireError, receive, send

__all__ = ["ForkServer", "RankProcess", "describe_exit"]

START_TIMEOUT = 300.0
"""Importing torch and the preloaded modules on a cold, loaded machine."""
_ANSWER_TIMEOUT = 30.0
_ORDERLY_TIMEOUT = 5.0
_TICK = 0.25
_ENDING_TICK = 0.01
_BOOT = (
    "import sys; sys.path[:] = {path!r}; from conformance.ranks.forkserver import main; "
    "main({channel}, {exits}, {preload!r}, {root!r})"
)


@dataclass(kw_only=True)
class RankProcess:
    """One rank as the controller sees it."""

    setup: RankSetup
    pid: int
    channel: socket.socket
    inbox: Inbox = field(default_factory=Inbox)
    exit: str | None = None
    """How it ended, None while it lives."""

    def close(self) -> None:
        """Close the controller's end of the channel; an idle rank then leaves by itself."""
        self.channel.close()


class ForkServer:
    """Starts the forkserver process, asks it for ranks, and hears of their exits.

    Several pools and threads may use one.
    """

    def __init__(self, *, preload: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process; it imports while the caller goes on, up to the first `fork`.

        Args:
            preload: modules to import before forking.
            env: the whole environment of the forkserver and its ranks.
        """
        self.root = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._log = self.root / "forkserver.log"
        self._lock = threading.RLock()
        self._directories = 0
        self._requests = 0
        self._ready = False
        self._ending = False
        self._partial = b""
        self._statuses: dict[int, str] = {}
        self._channel, theirs = socket.socketpair()
        self._exits, their_exits = os.pipe()
        os.set_blocking(self._exits, False)
        boot = _BOOT.format(
            path=[entry or os.getcwd() for entry in sys.path],
            channel=theirs.fileno(),
            exits=their_exits,
            preload=list(preload),
            root=str(self.root),
        )
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                env=env,
                pass_fds=(theirs.fileno(), their_exits),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(their_exits)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        self._wait_if_ending()
        return self._process.poll() is None

    @property
    def exits_fd(self) -> int:
        """Descriptor that becomes readable when a rank has died."""
        return self._exits

    def new_directory(self, kind: str) -> Path:
        """An empty directory that goes with this server."""
        with self._lock:
            self._directories += 1
            directory = self.root / f"{kind}{self._directories}"
        directory.mkdir()
        return directory

    def fork(self, setup: RankSetup) -> RankProcess:
        """Fork one rank, once the imports are done.

        Raises:
            RuntimeError: a module cannot be imported, or the forkserver is gone or silent.
        """
        with self._lock:
            self._wait_ready()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = self._fork(setup, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        return RankProcess(setup=setup, pid=pid, channel=ours)

    def signal(self, ranks: Sequence[RankProcess], number: int, *, group: bool) -> None:
        """Signal ranks (with their process groups); those that are dead are left out.

        The forkserver does it, because only the parent knows that a process id is not reused.
        """
        pids = [rank.pid for rank in ranks]
        with self._lock:
            self._ask({"kind": "signal", "pids": pids, "signal": int(number), "group": group}, [])

    def collect_exits(self, ranks: Sequence[RankProcess]) -> None:
        """Note in `ranks` which have ended, and how. Does not wait."""
        self._wait_if_ending()
        with self._lock:
            self._read_exits()
            for rank in ranks:
                if rank.exit is None and rank.pid in self._statuses:
                    rank.exit = self._statuses.pop(rank.pid)
                elif rank.exit is None and not self.alive:
                    rank.exit = "gone with its forkserver"

    def wait_exits(self, ranks: Sequence[RankProcess], timeout: float) -> bool:
        """Wait until all `ranks` have ended; False if some live on after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self.collect_exits(ranks)
            if all(rank.exit is not None for rank in ranks):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            select.select([self._exits], [], [], min(left, _TICK))

    def close(self) -> None:
        """End the process and all of its ranks, and remove its files."""
        with self._lock, contextlib.suppress(OSError, WireError):
            self._channel.settimeout(_ORDERLY_TIMEOUT)
            self._tell({"kind": "close"}, [])
        self._channel.close()
        try:
            self._process.wait(timeout=_ORDERLY_TIMEOUT if self._ready else 0.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its ranks die with it
            self._process.wait(timeout=_ANSWER_TIMEOUT)
        os.close(self._exits)
        shutil.rmtree(self.root, ignore_errors=True)

    def end_now(self) -> None:
        """End the process and all of its ranks, for a caller that ends right after.

        Asks no lock, which a thread that waits for ranks may hold; such a thread never goes on, so
        that it takes the end of its ranks for nothing. *Blocks* a few seconds at most.
        """
        self._ending = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # it then ends its ranks, and itself
        deadline = time.monotonic() + (_ORDERLY_TIMEOUT if self._ready else 0.0)
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(_ENDING_TICK)
        if not self._has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its ranks die with it
        shutil.rmtree(self.root, ignore_errors=True)

    def _wait_if_ending(self) -> None:
        """So that nobody takes the end of this process for a fault of ranks, or begins anew."""
        if self._ending:
            threading.Event().wait()

    def _has_ended(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        return True

    def _wait_ready(self) -> None:
        if not self._ready:
            answer = self._answer(0, START_TIMEOUT)
            if "error" in answer:
                raise RuntimeError(f"the forkserver of the ranks failed: {answer['error']}")
            self._ready = True

    def _fork(self, setup: RankSetup, channel: int) -> int:
        pid: int = self._ask({"kind": "fork", "setup": setup}, [channel])["pid"]
        self._read_exits()
        self._statuses.pop(pid, None)  # of an earlier process with the same id
        return pid

    def _read_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._exits, 65536):
                self._partial += chunk
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            pid, status = map(int, line.split())
            self._statuses[pid] = describe_exit(status)

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self._requests += 1
        try:
            self._channel.settimeout(_ANSWER_TIMEOUT)
            self._tell(request | {"number": self._requests}, fds)
        except OSError as error:
            raise self._gone(error) from error
        return self._answer(self._requests, _ANSWER_TIMEOUT)

    def _tell(self, request: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self._channel, [b"r"], fds)  # descriptors travel with a byte of their own
        send(self._channel, pickle.dumps(request))

    def _answer(self, number: int, timeout: float) -> dict[str, Any]:
        """The answer to a request; older ones, whose wait was interrupted, are passed over."""
        while True:
            try:
                self._channel.settimeout(timeout)
                payload = receive(self._channel)
            except (OSError, WireError) as error:
                raise self._gone(error) from error
            if payload is None:
                raise self._gone(None)
            answer: dict[str, Any] = pickle.loads(payload)
            if answer["number"] == number:
                return answer

    def _gone(self, error: Exception | None) -> RuntimeError:
        self._wait_if_ending()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.poll()
        state = "does not answer" if code is None else f"ended with status {code}"
        tail = tail_of(str(self._log), 0, 2000).strip()
        return RuntimeError(
            f"the forkserver of the ranks {state}{f' ({error})' if error else ''}; "
            f"its output: {tail or 'none'}"
        )


def describe_exit(status: int) -> str:
    """A wait status in words: "signal SIGKILL" or "exit 3"."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit {os.WEXITSTATUS(status)}"
