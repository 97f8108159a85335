"""What this machine offers: accelerators, cores; and whether a run fits on it.

Knows torch's view of devices. Starts nothing and touches no device.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from conformance.errors import UsageError, unknown

CPU = "cpu"
AUTO = "auto"


def accelerator() -> tuple[str, int]:
    """Type and number of the accelerators; ``("cpu", 0)`` without any."""
    if not torch.accelerator.is_available():
        return CPU, 0
    current = torch.accelerator.current_accelerator()
    return (CPU, 0) if current is None else (current.type, torch.accelerator.device_count())


def device_for(asked: str, world: int) -> str:
    """The device type that a run with `world` ranks uses.

    ``auto`` is the accelerator if there is one for every rank, else the CPU.

    Raises:
        UsageError: a world below 1, no such device type, or fewer accelerators than ranks.
    """
    if world < 1:
        raise UsageError(f"--world {world}: a run needs at least 1 rank")
    kind, count = accelerator()
    if asked == AUTO:
        return kind if count >= world else CPU
    if asked not in (CPU, kind):
        raise unknown("device", asked, {AUTO, CPU, kind})
    if asked != CPU and world > count:
        raise UsageError(
            f"--world {world}: {count} {kind} {'device' if count == 1 else 'devices'} here;"
            f" use --world {count} or --device {CPU}"
        )
    return asked


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_jobs(world: int, device: str) -> int:
    """Cases that run at once: as many as accelerators or cores allow, at least one."""
    available = accelerator()[1] if device != CPU else cores()
    return max(1, available // world)


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
