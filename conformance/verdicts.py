"""What the suite can say about one check on one case, and what a run's exit status follows from.

Knows words and numbers only: no tensors, no processes, no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from conformance.causes import Cause


class Verdict(StrEnum):
    """One vocabulary, the same text on screen and in files."""

    PASS = "PASS"
    FAIL = "FAIL"
    XFAIL = "XFAIL"
    XPASS = "XPASS"
    UNSUPPORTED = "UNSUPPORTED"
    BLOCKED = "BLOCKED"
    VACUOUS = "VACUOUS"
    NO_POWER = "NO_POWER"
    DESYNC = "DESYNC"
    HANG = "HANG"
    CRASH = "CRASH"
    ERROR = "ERROR"


BAD = frozenset({Verdict.FAIL, Verdict.XPASS, Verdict.HANG, Verdict.DESYNC, Verdict.CRASH})
UNDECIDED = frozenset({Verdict.VACUOUS, Verdict.NO_POWER, Verdict.BLOCKED, Verdict.ERROR})

WORST_FIRST = (
    Verdict.CRASH,
    Verdict.HANG,
    Verdict.DESYNC,
    Verdict.FAIL,
    Verdict.XPASS,
    Verdict.ERROR,
    Verdict.BLOCKED,
    Verdict.VACUOUS,
    Verdict.NO_POWER,
    Verdict.XFAIL,
    Verdict.PASS,
    Verdict.UNSUPPORTED,
)
"""Which of several verdicts stands for all of them: the first that is among them."""

COMPLETED = "run.completed"
"""The check that every rank ran its scenario to the end; judged on every case."""

REFUSED = "refused at build"
"""How the sentence of a case begins that the adapter does not take."""

UNCLAIMED = "not claimed"
"""How that of a check begins about what the adapter does not claim."""

EXIT_OK = 0
EXIT_BAD = 1
EXIT_UNDECIDED = 2
EXIT_USAGE = 64
EXIT_INTERNAL = 70


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict of one check on one case of one adapter variant.

    Attributes:
        check: id of the check, ``area.noun``.
        adapter: name of the adapter.
        variant: name of the adapter's variant; ``default`` stands for no option at all.
        case: ``model/scenario/k=v,...``.
        seed: seed of the run.
        verdict: the verdict.
        cause: why, from a closed list; ``None`` unless something is wrong.
        sentence: one line: what, where, how much.
        error: largest error seen, in units of the observed quantity; ``None`` if nothing numeric.
        bound: what that error may be.
        where: rank, step, FQN, index, got, expected; whatever applies.
        moment: position of the first failing observation in the run; orders findings in time.
        seconds: wall time of the scenario that the finding was judged from.
        repro: one shell line that repeats the finding.
    """

    check: str
    adapter: str
    variant: str
    case: str
    seed: int
    verdict: Verdict
    cause: Cause | None = None
    sentence: str = ""
    error: float | None = None
    bound: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    moment: tuple[int, int] | None = None
    seconds: float = 0.0
    repro: str = ""

    @property
    def id(self) -> str:
        """``check@adapter[variant]/case#seed``, the string every other output uses."""
        return finding_id(self.check, self.adapter, self.variant, self.case, self.seed)


def finding_id(check: str, adapter: str, variant: str, case: str, seed: int) -> str:
    """The id of a finding; the inverse is `parse_finding_id`."""
    return f"{check}@{adapter_label(adapter, variant)}/{case}#{seed}"


def adapter_label(adapter: str, variant: str) -> str:
    """``adapter[variant]``, or the bare adapter name for its default variant."""
    return adapter if variant == "default" else f"{adapter}[{variant}]"


def parse_adapter_label(label: str) -> tuple[str, str]:
    """Split ``adapter[variant]`` into its two names."""
    name, bracket, rest = label.partition("[")
    if not bracket:
        return name, "default"
    if not rest.endswith("]"):
        raise ValueError(f"adapter {label!r}: the variant's bracket is not closed")
    return name, rest[:-1]


def parse_finding_id(text: str) -> tuple[str, str, str, str, int]:
    """Split a finding id into check, adapter, variant, case and seed.

    Raises:
        ValueError: the text is not of the form ``check@adapter[variant]/case#seed``.
    """
    check, at, rest = text.partition("@")
    body, hash_mark, seed = rest.rpartition("#")
    label, bracket, case = body.partition("]/")
    if bracket:
        label += "]"
    else:
        label, _, case = body.partition("/")
    if not (at and hash_mark and check and label and case and seed.lstrip("-").isdigit()):
        raise ValueError(
            f"{text!r} is not a finding id; expected check@adapter[variant]/model/scenario/k=v#seed"
        )
    adapter, variant = parse_adapter_label(label)
    return check, adapter, variant, case, int(seed)


def told_first(verdict: Verdict, moment: tuple[int, int] | None) -> tuple[bool, tuple[int, int]]:
    """The key by which findings of one case stand in order: that a rank died, then by time."""
    return verdict is not Verdict.CRASH, moment or (10**9, 0)


def exit_status(verdicts: Iterable[Verdict], *, stale_expectations: int = 0) -> int:
    """Status of a run: 1 if something is bad, 2 if something is undecided or nothing was judged."""
    counts = Counter(verdicts)
    if stale_expectations or any(counts[v] for v in BAD):
        return EXIT_BAD
    judged = counts[Verdict.PASS] + counts[Verdict.XFAIL]
    if any(counts[v] for v in UNDECIDED) or not judged:
        return EXIT_UNDECIDED
    return EXIT_OK
