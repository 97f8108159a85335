"""The header of a run's log: what was judged, by what, on which machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from conformance.checks import CHECKS
from conformance.expectations import Expectations
from conformance.machine import hardware
from conformance.mutants import MUTANTS
from conformance.names import PROFILES
from conformance.releases import definition_hash, digest, header_row
from conformance.report.lines import Role
from conformance.session import Setting
from conformance.versions import versions
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
        "check_set": definition_hash(CHECKS.values()),
        "profiles": {profile: header_row(profile) for profile in PROFILES},
        "kill_matrix": kill_matrix_hash(),
        "cases": sum(item.role is Role.JUDGED for item in work.items),
        "expectations": expectations.as_json(),
    }


def kill_matrix_hash() -> str:
    """Changes when a mutant is added or removed, or is to be caught in another way."""
    return digest(
        [[m.name, m.base, m.variant, m.check, m.cause, m.case, m.world] for m in MUTANTS.values()]
    )
