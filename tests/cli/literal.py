"""Findings and logs written down by hand, for renderers that must not need ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.report.lines import Log, Reported, Role
from conformance.report.log import RunLog
from conformance.verdicts import Finding, Verdict, finding_id

ADAPTER = "torch.fully_shard"
CASE = "mlp/train/accumulation=1,optimizer=sgd"


def finding(verdict: str = "PASS", check: str = "losses.value", **fields: Any) -> Finding:
    content: dict[str, Any] = {"adapter": ADAPTER, "variant": "default", "case": CASE, "seed": 0}
    content |= fields
    id = finding_id(check, content["adapter"], content["variant"], content["case"], content["seed"])
    content.setdefault("repro", f"fsdp-conformance repro '{id}' --world 2 --device cpu")
    return Finding(check=check, verdict=Verdict(verdict), **content)


def judged(verdict: str = "PASS", check: str = "losses.value", **fields: Any) -> Reported:
    return Reported(finding=finding(verdict, check, **fields))


def control(verdict: str = "PASS", **fields: Any) -> Reported:
    fields = {"adapter": "torch.DistributedDataParallel", **fields}
    return Reported(finding=finding(verdict, **fields), role=Role.CONTROL)


def header(*labels: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {
        "time": "2026-01-02T03:04:05+00:00",
        "command": ["run", ADAPTER],
        "versions": {"fsdp-conformance": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "hardware": {
            "system": "Linux",
            "machine": "x86_64",
            "cores": 2,
            "accelerator": None,
            "accelerators": 0,
        },
        "world": 2,
        "device": "cpu",
        "seed": 0,
        "timeout": 60.0,
        "narrowed": False,
        "adapters": [
            {"name": name, "variant": variant, "capabilities": [], "conventions": {}}
            for name, variant in labels or ((ADAPTER, "default"),)
        ],
        "checks": ["losses.value"],
        "check_set": "0" * 16,
        "kill_matrix": "1" * 16,
        "cases": 1,
        "expectations": [],
        **fields,
    }


def log_of(
    reported: Sequence[Reported],
    *labels: tuple[str, str],
    finished: bool = True,
    stale: Sequence[str] = (),
) -> Log:
    with RunLog(None, header(*labels)) as log:
        for one in reported:
            log.add(one)
        if finished:
            log.finish(stale=stale, seconds=12.34)
        return log.log
