"""Run a function on several ranks and insist that all of them came through.

Ranks outlive a job and end by a signal, so nothing that is written at exit survives them. With
`RANKS_COVERAGE=DIR` the jobs of the tests that are about the engine measure the package and leave
files of `coverage` in DIR, each rank one; `.ci/coverage` puts the files together. One rank of a job
is measured, since most of what ranks do is alike and to measure takes two thirds more time; which
one, differs from job to job.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from conformance.ranks import Job, RankContext, RankVerdict, shared_pool

COVERAGE = "RANKS_COVERAGE"
COVERED = ("tests.fsdp.", "tests.interop.")
"""Modules whose jobs are measured. Others run the same lines once more."""
SAVED_EVERY = 0.5
"""Seconds: writing costs more than a job. What a rank runs after the last time is lost with it."""


def on_ranks(
    function: Callable[..., Any],
    world: int,
    *,
    fresh: bool = False,
    device: str = "cpu",
    timeout: float = 300.0,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """What ``function(context, **kwargs)`` returned on each rank of ``world`` ranks.

    Jobs that leave their process changed, such as those that compile, take ``fresh`` ranks; so do
    those that make meshes of several dims on accelerators, where caches may outlive them.
    """
    pool = shared_pool(world, device, preload=("tests.fsdp.preload",))
    job = Job.of(function, **kwargs)
    if COVERAGE in os.environ and function.__module__.startswith(COVERED):
        where = os.environ[COVERAGE]
        names = {"module": function.__module__, "name": function.__qualname__}
        job = Job.of(_measured, where=where, arguments=kwargs, **names)
    outcome = pool.run(job, timeout=timeout, fresh=fresh)
    details = [r.traceback[-1500:] for r in outcome.reports[:1] if r is not None]
    assert outcome.verdict is RankVerdict.OK, "\n".join([outcome.sentence, *details])
    return outcome.values


def _measured(
    context: RankContext, *, where: str, module: str, name: str, arguments: dict[str, Any]
) -> Any:
    function = getattr(importlib.import_module(module), name)
    if context.rank != zlib.crc32(f"{module} {name} {arguments}".encode()) % context.world_size:
        return function(context, **arguments)
    run, saved = _measure(where)
    run.start()
    try:
        return function(context, **arguments)
    finally:
        run.stop()
        if time.monotonic() - saved[-1] > SAVED_EVERY:
            run.save()
            saved.append(time.monotonic())


@cache
def _measure(where: str) -> tuple[Any, list[float]]:
    """This rank's measurement, and when it was written."""
    coverage = importlib.import_module("coverage")
    file = Path(where) / f".coverage.{uuid.uuid4().hex}"
    # Not ``source``: looking for files that never ran costs more than most jobs.
    run = coverage.Coverage(file, config_file=False, branch=True, include=["*/fsdp/*"])
    return run, [0.0]


def agreed(function: Callable[..., Any], world: int, **kwargs: Any) -> Any:
    """What all ranks returned; they must have returned the same."""
    values = on_ranks(function, world, **kwargs)
    assert all(value == values[0] for value in values), f"ranks differ: {values}"
    return values[0]


def count(context: RankContext, op: str) -> int:
    """How many collectives of that kind this rank has issued so far in this job."""
    return sum(record.op == op for record in context.recorder.records)


def error_of(call: Callable[[], Any]) -> list[str]:
    """Type and text of what ``call`` raises; two empty strings if nothing."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def named_on_every_rank(errors: tuple[Any, ...], kind: type[BaseException], fragment: str) -> None:
    """Every rank raised that error, with that fragment in its text."""
    for name, text in errors:
        assert name == kind.__name__, text
        assert fragment in text
