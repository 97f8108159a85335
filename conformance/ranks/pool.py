"""The pool: ranks that are kept between jobs, and thrown away when a job may have spoilt them.

Knows when ranks may be kept. Must not know how a verdict is found.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from conformance.ranks.job import Job
from conformance.ranks.leases import leases_of
from conformance.ranks.outcome import Outcome, RankVerdict
from conformance.ranks.process import ForkServer, RankProcess
from conformance.ranks.records import clear_ring, reserve_ring
from conformance.ranks.servers import lease_server, release_server
from conformance.ranks.setup import RankSetup
from conformance.ranks.supervise import Supervisor
from conformance.ranks.wire import WireError, receive, send

__all__ = ["RankPool", "shared_pool"]

SEED = 0
_TIDY_TIMEOUT = 30.0
_END_GRACE = 0.5
_END_TIMEOUT = 10.0


class RankPool:
    """`world` rank processes on this machine, forked from a server that has torch imported.

    A context manager. One job runs at a time; other threads wait.

    Attributes:
        world: number of ranks.
        device: device type; each job leases a device of it for every rank, and its ranks see no
            other. A rank's device is the one in its `RankContext`.
        backend: backend of the default process group, None for torch's own for the device and,
            beside it, for the host.
        replaced: why the kept ranks were last thrown away, "" if they never were.
    """

    def __init__(
        self,
        *,
        world: int,
        device: str = "cpu",
        backend: str | None = None,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        """Make a pool; the processes start with the first job.

        Args:
            world: number of ranks, at least 1.
            device: "cpu" or a type of `torch.accelerator`.
            backend: name of a backend, None for the device's own and the host's.
            preload: modules that the ranks have imported before they are forked. They must not run
                tensor operators or initialise an accelerator when imported.
            env: environment variables of the ranks, over the controller's.
            devices: indices of the accelerators to use, one a rank, which the caller has leased
                and may share between pools; None leases them for each job.
        """
        if world < 1:
            raise ValueError(f"a pool needs at least 1 rank, got world={world}")
        if devices is not None and len(devices) != world:
            raise ValueError(f"world={world} needs as many devices, got {list(devices)}")
        self.world = world
        self.device = device
        self.backend = backend
        self.replaced = ""
        self._preload = tuple(preload)
        self._env = dict(env or {})
        self._lock = threading.RLock()
        self._server: ForkServer | None = None
        self._kept: list[RankProcess] = []
        self._leases = leases_of(device)
        self._given = devices is not None
        self._devices: tuple[int, ...] = tuple(devices or ())
        self._scratch: Path | None = None
        self._owner = os.getpid()
        self._closed = False

    def start(self) -> None:
        """Begin to start the forkserver, so that its imports overlap with what the caller does."""
        with self._lock:
            self._check_usable()
            self._running_server()

    def run(self, job: Job, *, timeout: float = 60.0, fresh: bool = False) -> Outcome:
        """Run a job on all ranks and wait for it.

        Returns within `timeout` plus about 40 s whatever the ranks do, plus the time that importing
        torch takes if the pool must start first, plus the wait for accelerators that jobs of other
        pools and processes use.

        Args:
            job: what every rank imports and calls.
            timeout: bound in seconds, from the moment the job is sent.
            fresh: use ranks that run nothing else before or after.

        Raises:
            OSError: the folder of temporary files has no room for what ranks record.
            RuntimeError: the pool is closed, belongs to another process, or cannot start; or its
                accelerators did not become free.
            TypeError: the job's `kwargs` cannot be pickled.
        """
        with self._lock:
            self._check_usable()
            kwargs = _pickled(job)
            server = self._running_server()
            with self._leased(server):
                return self._run(server, job, kwargs, timeout=timeout, fresh=fresh)

    def _run(
        self, server: ForkServer, job: Job, kwargs: bytes, *, timeout: float, fresh: bool
    ) -> Outcome:
        ranks = self._fork(server) if fresh else self._kept_ranks(server)
        try:
            supervisor = Supervisor(server=server, ranks=ranks, timeout=timeout)
            _send(ranks, job, kwargs, self._empty_directory(server), kept=not fresh)
            outcome = supervisor.watch()
            if fresh:
                self._end(server, ranks)
            else:
                self._keep_or_replace(server, outcome)
        except BaseException:  # the controller is interrupted, and the ranks are in mid-job
            with contextlib.suppress(RuntimeError):
                self._end(server, ranks)
            if not fresh:
                self._kept = []
            raise
        return outcome

    def close(self) -> None:
        """End all ranks and remove their files. May be called twice."""
        with self._lock:
            self._closed = True
            if self._owner != os.getpid():
                return  # a forked copy must not end the original's ranks
            if self._server is not None:
                with contextlib.suppress(RuntimeError):  # a silent forkserver is killed below
                    self._end(self._server, self._kept)
            self._forget_server()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this pool is closed; make another")
        if self._owner != os.getpid():
            raise RuntimeError(
                f"this pool belongs to process {self._owner}, not to its fork {os.getpid()}; "
                "make one in the process that uses it"
            )

    def _running_server(self) -> ForkServer:
        if self._server is not None and not self._server.alive:
            self._forget_server()
        if self._server is None:
            self._server = lease_server(self._preload, self._env)
        return self._server

    def _forget_server(self) -> None:
        for rank in self._kept:
            rank.close()
        self._kept = []
        self._scratch = None
        if self._server is not None:
            release_server(self._server)
            self._server = None

    @contextmanager
    def _leased(self, server: ForkServer) -> Iterator[None]:
        """Inside, `self._devices` belong to this pool; its last ones, if they are free.

        Ranks that are kept stay on their devices, idle. They are replaced when the lease is of
        others.
        """
        leases = self._leases
        # given: the caller's lease; too few: the ranks say so
        if leases is None or self._given or self.world > len(leases):
            yield
            return
        with leases.hold(self.world, prefer=self._devices) as devices:
            if self._kept and devices != self._devices:
                self._replace(server, f"the job's devices are {devices}, not {self._devices}")
            self._devices = devices
            yield

    def _kept_ranks(self, server: ForkServer) -> list[RankProcess]:
        server.collect_exits(self._kept)
        dead = [rank for rank in self._kept if rank.exit is not None]
        if dead:
            self._replace(server, f"rank {dead[0].setup.rank} died between jobs: {dead[0].exit}")
        if not self._kept:
            self._kept = self._fork(server)
        return self._kept

    def _empty_directory(self, server: ForkServer) -> Path:
        """Scratch of the next job: the last one's, if that left nothing in it."""
        if self._scratch is not None:
            with contextlib.suppress(OSError):
                if not any(self._scratch.iterdir()):
                    return self._scratch
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = server.new_directory("job")
        return self._scratch

    def _fork(self, server: ForkServer) -> list[RankProcess]:
        directory = server.new_directory("ranks")
        port = _free_port()
        ranks: list[RankProcess] = []
        try:
            for rank in range(self.world):
                setup = self._setup(rank, directory, port)
                reserve_ring(Path(setup.ring))  # here, where it is no fault of what ranks run
                ranks.append(server.fork(setup))
        except BaseException:
            for started in ranks:
                started.close()  # an idle rank leaves when its channel is closed
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return ranks

    def _setup(self, rank: int, directory: Path, port: int) -> RankSetup:
        return RankSetup(
            rank=rank,
            world=self.world,
            device=self.device,
            backend=self.backend,
            store=str(directory / "store"),
            output=str(directory / f"rank{rank}.out"),
            stacks=str(directory / f"rank{rank}.stacks"),
            ring=str(directory / f"rank{rank}.ring"),
            port=port,
            index=self._devices[rank] if self._devices else None,
            environment=(
                self._leases.visible.narrowed(self._devices)
                if self._leases is not None and self._devices
                else {}
            ),
        )

    def _keep_or_replace(self, server: ForkServer, outcome: Outcome) -> None:
        if outcome.verdict not in (RankVerdict.OK, RankVerdict.SKIP):
            self._replace(server, f"the job's verdict was {outcome.verdict}")
            return
        message = pickle.dumps({"kind": "tidy"})
        for rank in self._kept:
            _tell(rank, message)
        deadline = time.monotonic() + _TIDY_TIMEOUT
        for rank in self._kept:
            reason = _tidied(rank, deadline)
            if reason:
                self._replace(server, f"rank {rank.setup.rank} {reason}")
                return

    def _replace(self, server: ForkServer, reason: str) -> None:
        self.replaced = reason
        ranks, self._kept = self._kept, []
        self._end(server, ranks)

    def _end(self, server: ForkServer, ranks: Sequence[RankProcess]) -> None:
        """End ranks with their children: asked, then told."""
        for rank in ranks:
            rank.close()
        server.collect_exits(ranks)
        alive = [rank for rank in ranks if rank.exit is None]
        if alive and server.alive:
            server.signal(alive, signal.SIGTERM, group=True)
            if not server.wait_exits(alive, _END_GRACE):
                server.signal(alive, signal.SIGKILL, group=True)
                server.wait_exits(alive, _END_TIMEOUT)
        for rank in ranks:
            shutil.rmtree(Path(rank.setup.output).parent, ignore_errors=True)


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(dict(job.kwargs))
    except Exception as error:
        raise TypeError(
            f"the arguments of job {job.module}.{job.qualname} cannot be sent to ranks: {error}; "
            "pass plain data"
        ) from error


def _send(
    ranks: Sequence[RankProcess], job: Job, kwargs: bytes, directory: Path, *, kept: bool
) -> None:
    message = pickle.dumps(
        {
            "kind": "job",
            "file": job.file,
            "module": job.module,
            "qualname": job.qualname,
            "sys_path": job.sys_path,
            "cwd": job.cwd,
            "kwargs": kwargs,  # pickled by itself: the rank sets its path before it opens them
            "directory": str(directory),
            "seed": SEED,
            "kept": kept,
        }
    )
    for rank in ranks:
        clear_ring(Path(rank.setup.ring))
        _tell(rank, message)


def _tell(rank: RankProcess, message: bytes) -> None:
    """Send to a rank; one that is dead or stuffed shows up as such when it is watched."""
    try:
        rank.channel.settimeout(_TIDY_TIMEOUT)
        send(rank.channel, message)
    except (OSError, WireError):
        return


def _tidied(rank: RankProcess, deadline: float) -> str:
    """Why a rank cannot be kept, "" if it can."""
    try:
        rank.channel.settimeout(max(0.01, deadline - time.monotonic()))
        answer = receive(rank.channel)
        if answer is None:
            return "died after the job"
        changed: list[str] = json.loads(answer)["changed"]
    except (OSError, WireError, ValueError, KeyError) as error:
        return f"did not tidy up after the job ({error})"
    return f"left changed: {', '.join(changed[:5])}" if changed else ""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


_shared: dict[tuple[Any, ...], RankPool] = {}
_shared_lock = threading.Lock()


def shared_pool(
    world: int, device: str = "cpu", backend: str | None = None, preload: Sequence[str] = ()
) -> RankPool:
    """The pool of this process for these settings; made once, closed when the process exits."""
    key = (os.getpid(), world, device, backend, tuple(preload))
    with _shared_lock:
        pool = _shared.get(key)
        if pool is None or pool._closed:
            if not _shared:
                atexit.register(_close_shared)
            pool = RankPool(world=world, device=device, backend=backend, preload=preload)
            _shared[key] = pool
        return pool


def _close_shared() -> None:
    for pool in list(_shared.values()):
        pool.close()
