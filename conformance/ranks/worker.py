"""The life of one rank: set up, run jobs one after the other, report, tidy up.

Runs in a process forked by the forkserver and never returns from `serve`. Knows torch.distributed
and the messages. Must not know how the controller judges.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks import fingerprint
from conformance.ranks.collectives import CollectiveRecorder
from conformance.ranks.context import RankContext, is_skip
from conformance.ranks.job import Job, load_function
from conformance.ranks.leases import visible_variable
from conformance.ranks.meshes import forget_meshes
from conformance.ranks.outcome import RankStatus
from conformance.ranks.records import Ring
from conformance.ranks.setup import RankSetup
from conformance.ranks.wire import receive, send

__all__ = ["serve"]

GROUP_TIMEOUT = timedelta(hours=6)
"""Far above any job's bound: the controller decides when a wait is a hang, not the backend."""

_MAX_TEXT = 100_000
_ORPHAN_GRACE = 0.5


class _Rank:
    """State that outlives a job: the device, the default group, the ring."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.pid = os.getpid()
        self.device = torch.device(setup.device)
        self.backend = setup.backend or _backend_for(setup.device)
        self.path = list(sys.path)
        self.before: dict[str, Any] = {}
        self.ring = Ring(Path(setup.ring))

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one job; gives its report as plain data."""
        self.ring.clear()
        recorder: CollectiveRecorder | None = None
        started = time.monotonic()
        try:
            if not dist.is_initialized():
                self._initialise()
            function, kwargs = self._prepare(message)
            recorder = CollectiveRecorder(self.ring, first_group=_groups_made())
            context = self._context(message, recorder)
            if message["kept"]:
                self.before = fingerprint.fingerprint(self.device)
            started = time.monotonic()
            with recorder:
                value = function(context, **kwargs)
            self._synchronise()
            report: dict[str, Any] = {"status": RankStatus.OK, "value": _plain(value)}
        except BaseException as error:
            report = _failure(error)
        if os.getpid() != self.pid:
            os._exit(0)  # a child that the job forked must not speak in this rank's name
        ended = time.monotonic()
        streams = recorder.streams if recorder is not None else {}
        return report | {"seconds": ended - started, "ended": ended, "streams": streams}

    def tidy(self) -> list[str]:
        """Destroy the groups that the job made; names the global state that it left changed."""
        gc.collect()  # reference cycles hold wrappers, and they hold process groups and hooks
        changed = fingerprint.changes(self.before, fingerprint.fingerprint(self.device))
        self.before = {}
        if dist.is_initialized():
            made = [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]
            if not forget_meshes(made):
                # an equal mesh of a later job would get the groups of this one, which are gone
                changed = [*changed, "process groups of a mesh that something holds"]
            for group in made:
                dist.destroy_process_group(group)
        random = sys.modules.get("torch.distributed.tensor._random")
        if random is not None:
            vars(random)["_rng_tracker"] = (
                None  # it would carry the random state of this job's mesh over
            )
        gc.freeze()  # what is left belongs to modules that the job imported
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        os.chdir("/")
        return changed

    def _initialise(self) -> None:
        """Take the device and join the default group. *Collective* over the world."""
        setup = self.setup
        options: dict[str, Any] = {}
        if setup.device == "cpu":
            _hide_devices()
        else:
            self.device = _take_device(setup)
            options["device_id"] = self.device
        dist.init_process_group(
            self.backend,
            store=dist.FileStore(setup.store, setup.world),  # type: ignore[attr-defined]
            rank=setup.rank,
            world_size=setup.world,
            timeout=GROUP_TIMEOUT,
            **options,
        )

    def _prepare(self, message: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Import the job's function and unpickle its arguments, in the place it asks for."""
        names = ("file", "module", "qualname", "sys_path", "cwd")
        job = Job(**{name: message[name] for name in names})
        sys.path[:] = [*job.sys_path, *(e for e in self.path if e not in job.sys_path)]
        os.chdir(job.cwd or message["directory"])
        function = load_function(job)
        kwargs = pickle.loads(message["kwargs"])
        gc.freeze()  # else what was just imported makes every collection of `tidy` slow
        fingerprint.seed_everything(message["seed"], self.device)
        return function, kwargs

    def _context(self, message: dict[str, Any], recorder: CollectiveRecorder) -> RankContext:
        return RankContext(
            rank=self.setup.rank,
            world_size=self.setup.world,
            device=self.device,
            backend=self.backend,
            recorder=recorder,
            directory=Path(message["directory"]),
        )

    def _synchronise(self) -> None:
        """Wait for queued device work, so that its failure or hang is this job's."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def serve(setup: RankSetup, channel: socket.socket) -> None:
    """Run jobs until the controller closes the channel. Does not return."""
    status = 1
    try:
        rank = _Rank(setup)
        threading.Thread(target=_watch, args=(channel.fileno(),), daemon=True).start()
        while (payload := receive(channel)) is not None:
            message = pickle.loads(payload)
            is_job = message["kind"] == "job"
            answer = rank.run(message) if is_job else {"changed": rank.tidy()}
            _flush()
            send(channel, json.dumps(answer).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _watch(fd: int) -> None:
    """End this rank and its children when the controller's end of the channel is gone."""
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups and errors are reported without being asked for
    while not poll.poll():
        continue
    time.sleep(_ORPHAN_GRACE)  # an idle main loop sees the end of the channel itself
    os.killpg(os.getpid(), signal.SIGKILL)


def _backend_for(device: str) -> str:
    """Torch's backend for the device type; beside it one for the host, as torch's own default has.

    What is offloaded is a tensor of the host, and its norm and its state take collectives there.
    """
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device)}
    if len(backends) == 1:
        return backends[device]
    return ",".join(f"{kind}:{backend}" for kind, backend in backends.items())


def _hide_devices() -> None:
    """See no accelerator, whatever the host has: where there is one, it is torch's default."""
    built_for = torch.accelerator.current_accelerator(check_available=False)
    if built_for is not None:
        os.environ[visible_variable(built_for.type)] = ""


def _take_device(setup: RankSetup) -> torch.device:
    """The rank's device among those that it sees: the leased ones only, numbered from 0, or all."""
    present = torch.accelerator.device_count()
    narrowed = bool(setup.environment) and present == setup.world
    index = setup.rank if narrowed or setup.index is None else setup.index
    if index >= present:
        raise RuntimeError(
            f"world {setup.world} needs as many devices of type {setup.device}, got {present}; "
            "use a smaller world, or cpu"
        )
    device = torch.device(setup.device, index)
    torch.accelerator.set_device_index(index)
    return device


def _groups_made() -> int:
    """How many process groups this process has made so far; new ones are numbered from there."""
    return int(dist.distributed_c10d._world.group_count)


def _plain(value: Any) -> Any:
    """The value, known to survive JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the job returned {type(value).__name__}, which is not JSON-able ({error}); "
            "return numbers, strings, lists and dictionaries"
        ) from error
    return value


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SystemExit):
        _flush()
        os._exit(_exit_status(error.code))
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, own or error.__traceback__))
    return {
        "status": RankStatus.SKIP if is_skip(error) else RankStatus.ERROR,
        "error": type(error).__qualname__,
        "message": str(error)[:_MAX_TEXT],
        "traceback": text[-_MAX_TEXT:],
    }


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
