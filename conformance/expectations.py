"""What an adapter is known to get wrong: a file of finding patterns, each with its reason.

    # one line a finding or a family of them; * and ? are wildcards, brackets are plain
    clip.norm@torch.fully_shard/transformer/*: counts the tied weight twice, reported upstream

    known-flaky:
    run.completed@torch.fully_shard[offload]/tiny/*: times out on a loaded machine

A bad finding (FAIL, DESYNC, HANG, CRASH) that a line matches becomes XFAIL; a PASS that it matches
becomes XPASS, which fails the run, so that the line goes when the defect goes. Below
``known-flaky:`` a PASS stays a PASS.

A line for the check ``*`` is about a case that ends early, such as by an exception: what fails and
what is BLOCKED or VACUOUS behind it becomes XFAIL, what could still be judged keeps its verdict.

A line above ``known-flaky:`` that matches no finding of a whole run (for the check ``*``: no bad
one) is stale and fails the run too. A run that was narrowed (by check, model, profile or variant)
does not say what is stale, and no run says it of adapters that it did not judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.errors import UsageError
from conformance.globs import matches
from conformance.verdicts import Finding, Verdict

FLAKY_HEADING = "known-flaky:"
EXPECTABLE = frozenset({Verdict.FAIL, Verdict.DESYNC, Verdict.HANG, Verdict.CRASH})
CUT_SHORT = frozenset({Verdict.BLOCKED, Verdict.VACUOUS})


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One line of the file.

    Attributes:
        pattern: over finding ids.
        reason: why it is expected.
        flaky: whether passing is as good.
    """

    pattern: str
    reason: str
    flaky: bool = False

    @property
    def about_case(self) -> bool:
        """Whether it is for every check of a case."""
        return self.pattern.startswith("*@")

    def concerns(self, adapter: str) -> bool:
        """Whether it can match a finding of `adapter`."""
        label = self.pattern.partition("@")[2].partition("/")[0]
        return matches(adapter, label.partition("[")[0])


class Expectations:
    """All lines of a file; remembers which of them matched something."""

    def __init__(self, lines: Sequence[Expectation] = ()) -> None:
        """Expectations that nothing has been held against yet."""
        self.lines = tuple(lines)
        self._matched: set[str] = set()

    @classmethod
    def of(cls, stored: Sequence[Mapping[str, Any]]) -> Expectations:
        """From what `as_json` returned."""
        return cls([Expectation(**line) for line in stored])

    def as_json(self) -> list[dict[str, Any]]:
        """Plain data, for the header of a log."""
        return [vars(line).copy() for line in self.lines]

    def apply(self, finding: Finding) -> tuple[Finding, str]:
        """The finding with the verdict that its first matching line gives it, and the reason."""
        for line in self.lines:
            if not matches(finding.id, line.pattern):
                continue
            bad = finding.verdict in EXPECTABLE
            if bad or not line.about_case:
                self._matched.add(line.pattern)
            if bad or (line.about_case and finding.verdict in CUT_SHORT):
                return replace(finding, verdict=Verdict.XFAIL), line.reason
            if finding.verdict is Verdict.PASS and not (line.flaky or line.about_case):
                return replace(finding, verdict=Verdict.XPASS), line.reason
            return finding, ""
        return finding, ""

    def stale(self, adapters: Iterable[str]) -> list[str]:
        """Patterns about `adapters` that matched nothing, the flaky ones left out."""
        judged = list(adapters)
        return [
            line.pattern
            for line in self.lines
            if not line.flaky
            and line.pattern not in self._matched
            and any(line.concerns(adapter) for adapter in judged)
        ]


def read_expectations(path: Path) -> Expectations:
    """Read a file; the module's docstring shows one.

    Raises:
        UsageError: it cannot be read, or a line is not ``pattern: reason``.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors mark their files
    except OSError as error:
        raise UsageError(f"--expect {str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        at = error.object[: error.start].count(b"\n") + 1
        raise UsageError(
            f"--expect {str(path)!r}, line {at}: byte 0x{error.object[error.start]:02x} is not"
            " UTF-8 text; a line is 'finding pattern: reason'"
        ) from error
    flaky = False
    lines: list[Expectation] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line == FLAKY_HEADING:
            flaky = True
            continue
        pattern, colon, reason = line.partition(": ")
        if not colon or not reason.strip() or "@" not in pattern:
            raise UsageError(
                f"--expect {str(path)!r}, line {number}: {line!r} is not 'finding pattern: reason',"
                " such as 'clip.norm@torch.fully_shard/*: counts the tied weight twice'"
            )
        lines.append(Expectation(pattern=pattern, reason=reason.strip(), flaky=flaky))
    return Expectations(lines)
