"""The lines of ``run.jsonl``: one header, one finding per line, one footer.

Plain JSON that any reader takes: numbers that are not finite are written as strings. The schemas
in ``schemas/`` describe every line; a log without a footer is partial.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from conformance.causes import Cause
from conformance.verdicts import Finding, Verdict

SCHEMA_VERSION = 1
LOG_NAME = "run.jsonl"

_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class Role(StrEnum):
    """Why a finding is in the log."""

    JUDGED = "judged"
    """An adapter that was asked for, and a capability that it claims, or none."""
    CONTROL = "control"
    """The baseline wrapper, judged to see whether oracle and environment can be trusted."""
    PROBE = "probe"
    """A capability that is not claimed, tried out; never decides about the exit status."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One finding as it stands in the log.

    Attributes:
        finding: the finding, its verdict being the one after expectations.
        role: why it is there.
        reason: of the expectation that changed the verdict; empty if none did.
    """

    finding: Finding
    role: Role = Role.JUDGED
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log read back.

    Attributes:
        header: its first line.
        reported: its findings, in the order in which they were made.
        footer: its last line; ``None`` if the run did not come to its end.
    """

    header: Mapping[str, Any]
    reported: Sequence[Reported] = field(default=())
    footer: Mapping[str, Any] | None = None

    @property
    def partial(self) -> bool:
        """Whether the run did not come to its end."""
        return self.footer is None


class LogError(ValueError):
    """A file is not the log of a run; the message says where and why."""


def finding_line(reported: Reported) -> dict[str, Any]:
    """The line of a finding."""
    finding = reported.finding
    return {
        "kind": "finding",
        "id": finding.id,
        "role": reported.role,
        "check": finding.check,
        "adapter": finding.adapter,
        "variant": finding.variant,
        "case": finding.case,
        "seed": finding.seed,
        "verdict": finding.verdict,
        "cause": finding.cause,
        "sentence": finding.sentence,
        "error": finding.error,
        "bound": finding.bound,
        "where": dict(finding.where),
        "moment": None if finding.moment is None else list(finding.moment),
        "seconds": round(finding.seconds, 4),
        "reason": reported.reason,
        "repro": finding.repro,
    }


def reported_of(line: Mapping[str, Any]) -> Reported:
    """The finding of a line; the inverse of `finding_line`."""
    moment = line["moment"]
    return Reported(
        finding=Finding(
            check=line["check"],
            adapter=line["adapter"],
            variant=line["variant"],
            case=line["case"],
            seed=line["seed"],
            verdict=Verdict(line["verdict"]),
            cause=None if line["cause"] is None else Cause(line["cause"]),
            sentence=line["sentence"],
            error=_number(line["error"]),
            bound=_number(line["bound"]),
            where={key: _restored(value) for key, value in line["where"].items()},
            moment=None if moment is None else (moment[0], moment[1]),
            seconds=line["seconds"],
            repro=line["repro"],
        ),
        role=Role(line["role"]),
        reason=line["reason"],
    )


def dumps(line: Mapping[str, Any]) -> str:
    """One line of a log, without its line end."""
    return json.dumps(_plain(line), allow_nan=False)


def read_log(path: Path) -> Log:
    """Read a log; half a line at the end, which an interrupted run may leave, is dropped.

    Raises:
        LogError: the file is missing or is not a log.
    """
    header = header_of(path)
    lines = _lines(path.read_text(encoding="utf-8", errors="replace"), path)
    footers = [line for line in lines if line["kind"] == "footer"]
    return Log(
        header=header,
        reported=tuple(reported_of(line) for line in lines if line["kind"] == "finding"),
        footer=footers[-1] if footers else None,
    )


def header_of(path: Path) -> dict[str, Any]:
    """The first line of a log.

    Raises:
        LogError: the file is missing or is not a log.
    """
    folder = path.parent
    if not folder.is_dir():
        is_there = folder.exists() or folder.is_symlink()
        named = repr(str(folder))
        raise LogError(f"{named} is no folder" if is_there else f"there is no folder {named}")
    if not path.is_file():
        raise LogError(f"{str(folder)!r} holds no {path.name}: not the folder of a run")
    with path.open(encoding="utf-8", errors="replace") as file:
        header = next(iter(_lines(file.readline(), path)), {})
    if header.get("kind") != "header":
        raise LogError(f"{str(path)!r} does not begin with a header: not the log of a run")
    if header.get("schema") != SCHEMA_VERSION:
        raise LogError(
            f"{str(path)!r} has schema {header.get('schema')!r}; this version reads"
            f" {SCHEMA_VERSION}"
        )
    return header


def _lines(text: str, path: Path) -> list[dict[str, Any]]:
    texts = text.splitlines()
    found: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if number < len(texts):
                raise LogError(f"{str(path)!r}, line {number}: not JSON: {error}") from error
        else:
            if not isinstance(line, dict) or "kind" not in line:
                raise LogError(f"{str(path)!r}, line {number}: not a line of a log")
            found.append(line)
    return found


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a line: ``run`` for the log, ``history`` for a rank's history."""
    text = resources.files("conformance.report").joinpath(f"schemas/{name}.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(_restored(value))


def _restored(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
