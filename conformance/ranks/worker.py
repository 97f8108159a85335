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
from conformance.ranks.records import Ring
from conformance.ranks.setup import RankSetup
from conformance.ranks.wire import receive, send

__all__ = ["serve"]

GROUP_TIMEOUT = timedelta(hours=6)
"""Far above any job's bound: the controller decides when a wait is a hang, not the backend."""

_MAX_TEXT = 100_000


class _Rank:
    """State that outlives a job: the default group and where this rank stands."""

    def __init__(self, setup: RankSetup, channel: socket.socket) -> None:
        self.setup = setup
        self.channel = channel
        self.pid = os.getpid()
        self.device = torch.device(setup.device)
        self.backend = setup.backend or dist.get_default_backend_for_device(setup.device)
        self.path = list(sys.path)
        self.before: dict[str, Any] = {}

    def initialise(self) -> None:
        """Take the device and join the default group. *Collective* over the world."""
        setup = self.setup
        options: dict[str, Any] = {}
        if setup.device != "cpu":
            present = torch.accelerator.device_count()
            if setup.rank >= present:
                raise RuntimeError(
                    f"world {setup.world} needs {setup.world} devices of type {setup.device}, "
                    f"{present} are visible; run with a smaller world or on cpu"
                )
            self.device = torch.device(setup.device, setup.rank)
            torch.accelerator.set_device_index(setup.rank)
            options["device_id"] = self.device
        dist.init_process_group(
            self.backend,
            store=dist.FileStore(setup.store, setup.world),
            rank=setup.rank,
            world_size=setup.world,
            timeout=GROUP_TIMEOUT,
            **options,
        )

    def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one job; gives its report as plain data."""
        directory = Path(message["directory"])
        ring = Ring(directory / f"rank{self.setup.rank}.ring")
        recorder = CollectiveRecorder(ring)
        started = time.monotonic()
        try:
            function, kwargs = self._prepare(message)
            context = RankContext(
                rank=self.setup.rank,
                world_size=self.setup.world,
                device=self.device,
                backend=self.backend,
                recorder=recorder,
                directory=directory / "scratch",
            )
            started = time.monotonic()
            with recorder:
                value = function(context, **kwargs)
            report = {"status": "OK", "value": value}
            json.dumps(report)
        except BaseException as error:
            report = _failure(error)
        self._leave_forked_child()
        ended = time.monotonic()
        ring.close()
        return report | {
            "seconds": ended - started,
            "ended": ended,
            "streams": dict(recorder.streams),
        }

    def _prepare(self, message: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not dist.is_initialized():
            self.initialise()
        names = ("file", "module", "qualname", "sys_path", "cwd")
        job = Job(**{name: message[name] for name in names})
        sys.path[:] = [*job.sys_path, *(e for e in self.path if e not in job.sys_path)]
        os.chdir(job.cwd or Path(message["directory"]) / "scratch")
        function = load_function(job)
        kwargs = pickle.loads(message["kwargs"])
        fingerprint.seed_everything(message["seed"])
        # After the import: what importing a module changes stays, as in any Python process.
        self.before = fingerprint.fingerprint()
        return function, kwargs

    def tidy(self) -> list[str]:
        """Destroy the groups that the job made; names the global state that it left changed."""
        changed = fingerprint.changes(self.before, fingerprint.fingerprint())
        self.before = {}
        gc.collect()  # reference cycles hold wrappers, and they hold process groups
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
        os.chdir("/")
        return changed

    def _leave_forked_child(self) -> None:
        """A child that the job forked must not speak in this rank's name."""
        if os.getpid() != self.pid:
            os._exit(0)


def serve(setup: RankSetup, channel: socket.socket) -> None:
    """Run jobs until the controller closes the channel. Does not return."""
    status = 1
    try:
        rank = _Rank(setup, channel)
        threading.Thread(target=_watch, args=(channel.fileno(),), daemon=True).start()
        while (payload := receive(channel)) is not None:
            message = pickle.loads(payload)
            if message["kind"] == "job":
                send(channel, _encode(rank.run(message)))
            else:
                send(channel, _encode({"changed": rank.tidy()}))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _watch(fd: int) -> None:
    """End this rank and its children when the controller's end of the channel is gone."""
    poll = select.poll()
    poll.register(fd, 0)
    while True:
        if poll.poll():
            time.sleep(0.5)  # the main loop sees an orderly close itself
            os.killpg(os.getpid(), signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SystemExit):
        _flush()
        os._exit(_exit_status(error.code))
    tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, tail or error.__traceback__))
    return {
        "status": "SKIP" if is_skip(error) else "ERROR",
        "error": type(error).__qualname__,
        "message": str(error)[:_MAX_TEXT],
        "traceback": text[-_MAX_TEXT:],
    }


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _encode(report: dict[str, Any]) -> bytes:
    _flush()
    return json.dumps(report).encode()

