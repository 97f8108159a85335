"""Writing the log of a run: every line is on disk before the next case is judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from conformance.report.lines import (
    LOG_NAME,
    SCHEMA_VERSION,
    Log,
    Reported,
    Role,
    dumps,
    finding_line,
)
from conformance.verdicts import BAD, EXIT_OK, EXIT_UNDECIDED, Verdict, exit_status


class RunLog:
    """The log that is being written; a context manager. Without a folder it is kept in memory."""

    def __init__(self, directory: Path | None, header: Mapping[str, Any]) -> None:
        """Write the header into ``directory/run.jsonl``, which must not exist yet."""
        self.header = {"kind": "header", "schema": SCHEMA_VERSION, **header}
        self.reported: list[Reported] = []
        self.footer: dict[str, Any] | None = None
        self._file: TextIO | None = None
        if directory is not None:
            self._file = (directory / LOG_NAME).open("x", encoding="utf-8")
        self._write(self.header)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def log(self) -> Log:
        """What was written so far."""
        return Log(header=self.header, reported=tuple(self.reported), footer=self.footer)

    def add(self, reported: Reported) -> None:
        """Write one finding."""
        self.reported.append(reported)
        self._write(finding_line(reported))

    def finish(self, *, stale: Sequence[str], seconds: float) -> int:
        """Write the footer; returns the exit status that it states."""
        status = status_of(self.reported, stale)
        self.footer = {
            "kind": "footer",
            "counts": counts(self.reported),
            "stale_expectations": list(stale),
            "seconds": round(seconds, 3),
            "exit_status": status,
        }
        self._write(self.footer)
        return status

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(dumps(line) + "\n")
            self._file.flush()


def counts(reported: Sequence[Reported]) -> dict[str, int]:
    """Findings per verdict, of the adapters that were asked for."""
    found = Counter(r.finding.verdict for r in reported if r.role is Role.JUDGED)
    return {str(verdict): found[verdict] for verdict in Verdict if found[verdict]}


def status_of(
    reported: Sequence[Reported], stale: Sequence[str] = (), *, whole: bool = True
) -> int:
    """Exit status of a run. A failing control leaves it undecided, a probe never matters.

    So does what is missing, unless the run is `whole`: its cases might have failed.
    """
    verdicts = [r.finding.verdict for r in reported if r.role is Role.JUDGED]
    control = [r.finding.verdict for r in reported if r.role is Role.CONTROL]
    verdicts += [Verdict.ERROR for verdict in control if verdict in BAD or verdict is Verdict.ERROR]
    status = exit_status(verdicts, stale_expectations=len(stale))
    return status if whole or status != EXIT_OK else EXIT_UNDECIDED
