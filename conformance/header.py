"""The header of a run's log: what was judged, by what, on which machine."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from conformance.checks import CHECKS
from conformance.expectations import Expectations
from conformance.machine import hardware
from conformance.mutants import MUTANTS
from conformance.report.lines import Role
from conformance.session import Setting
from conformance.work import Selection, Work


def header(
    work: Work,
    selection: Selection,
    setting: Setting,
    expectations: Expectations,
    command: Sequence[str],
) -> dict[str, Any]:
    """The header's fields; `RunLog` adds kind and schema."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "versions": versions(),
        "hardware": hardware(),
        "world": setting.world,
        "device": setting.device,
        "baseline": setting.baseline,
        "seed": setting.seed,
        "timeout": setting.timeout,
        "narrowed": selection.narrowed,
        "adapters": [
            {
                "name": subject.adapter,
                "variant": subject.variant,
                "capabilities": sorted(adapter.capabilities),
                "conventions": asdict(adapter.conventions),
            }
            for subject, adapter in work.subjects
        ],
        "checks": [check.id for check in work.checks],
        "check_set": check_set_hash(),
        "kill_matrix": kill_matrix_hash(),
        "cases": sum(item.role is Role.JUDGED for item in work.items),
        "expectations": expectations.as_json(),
    }


def versions() -> dict[str, str]:
    """Of the suite, of torch and of Python."""
    try:
        own = version("fsdp-conformance")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "fsdp-conformance": own,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
    }


def check_set_hash() -> str:
    """Changes when a check is added, removed, or judges other cases."""
    return _digest(
        [
            [c.id, c.profile, c.sentence, sorted(c.scenarios), sorted(c.needs)]
            for c in CHECKS.values()
        ]
    )


def kill_matrix_hash() -> str:
    """Changes when a mutant is added or removed, or is to be caught in another way."""
    return _digest(
        [[m.name, m.base, m.variant, m.check, m.cause, m.case, m.world] for m in MUTANTS.values()]
    )


def _digest(rows: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
