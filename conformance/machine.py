"""What this machine offers: accelerators, cores; and whether a run fits on it.

Knows torch's view of devices, and imports torch when it is asked for that. Starts nothing and
touches no device.
"""

from __future__ import annotations

import os
import platform
from typing import Any

from conformance.errors import UsageError, unknown

CPU = "cpu"
AUTO = "auto"
MOST_JOBS = 16
LEAST_OF_A_RANK = 16
"""MiB of its own that any rank takes: 19 were measured after one all-reduce, on one to 24 ranks."""


def accelerator() -> tuple[str, int]:
    """Type and number of the accelerators; ``("cpu", 0)`` without any."""
    import torch

    if not torch.accelerator.is_available():
        return CPU, 0
    current = torch.accelerator.current_accelerator()
    return (CPU, 0) if current is None else (current.type, torch.accelerator.device_count())


def check_world(world: int) -> None:
    """Refuse a number of ranks that no machine, or not this one, could start.

    Raises:
        UsageError: below 1, or beyond what memory holds.
    """
    if world < 1:
        raise UsageError(f"--world {world}: a run needs at least 1 rank")
    most = memory() // LEAST_OF_A_RANK
    if world > most:
        raise UsageError(
            f"--world {world}: a rank takes at least {LEAST_OF_A_RANK} MiB, of which this machine"
            f" has {memory()}: no more than {most} ranks"
        )


def device_for(asked: str, world: int) -> str:
    """The device type that a run with `world` ranks uses.

    ``auto`` is the accelerator if there is one for every rank, else the CPU.

    Raises:
        UsageError: a world that does not fit, no such device type, or fewer accelerators than
            ranks.
    """
    check_world(world)
    if asked == CPU:
        return CPU
    kind, count = accelerator()
    if asked == AUTO:
        return kind if count >= world else CPU
    if asked != kind:
        none = "" if count else "; torch sees no accelerator here"
        raise UsageError(f"{unknown('device', asked, {AUTO, CPU, kind})}{none}")
    if world > count:
        raise UsageError(
            f"--world {world}: {count} {kind} {'device' if count == 1 else 'devices'} here;"
            f" use --world {count} or --device {CPU}"
        )
    return asked


def notes(asked: str, world: int) -> list[str]:
    """What a user should know of where a run with `world` ranks takes place; one line each."""
    if device_for(asked, world) != CPU:
        return []
    found: list[str] = []
    kind, count = accelerator()
    if asked == AUTO and count:
        found.append(f"the ranks run on {CPU}: {world} ranks, and {count} of {kind} here")
    if world > cores():
        found.append(
            f"{world} ranks share {cores()} {'core' if cores() == 1 else 'cores'}: cases take"
            " longer, and --timeout may have to be longer too"
        )
    return found


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """MiB of memory of this machine, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20


def default_jobs(world: int, device: str) -> int:
    """Cases that run at once: one a set of accelerators; on cores one more, at most `MOST_JOBS`.

    While the ranks of one case work, the controller judges another: on 2 cores and 2 ranks, two
    jobs took three quarters of the time of one.
    """
    if device != CPU:
        return max(1, accelerator()[1] // world)
    return max(1, min(MOST_JOBS, cores() // world + 1))


def hardware() -> dict[str, Any]:
    """For the header of a log."""
    kind, count = accelerator()
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": cores(),
        "accelerator": kind if count else None,
        "accelerators": count,
    }
