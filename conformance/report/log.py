"""Writing the log of a run: every line is on disk before the next case is judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from conformance.report.lines import (
    LOG_NAME,
    SCHEMA_VERSION,
    Log,
    Reported,
    Role,
    dumps,
    finding_line,
)
from conformance.room import told
from conformance.verdicts import BAD, EXIT_OK, EXIT_UNDECIDED, Verdict, exit_status


class RunLog:
    """The log that is being written; a context manager. Without a folder it is kept in memory.

    Attributes:
        fault: why the file is partial, in one line, and gets nothing more; empty if it is whole.
    """

    def __init__(self, directory: Path | None, header: Mapping[str, Any]) -> None:
        """Write the header into ``directory/run.jsonl``, which must not exist yet."""
        self.header = {"kind": "header", "schema": SCHEMA_VERSION, **header}
        self.reported: list[Reported] = []
        self.footer: dict[str, Any] | None = None
        self.fault = ""
        self._file: BinaryIO | None = None
        if directory is not None:
            # nothing is buffered, so there is nothing left that `close` could fail to write
            self._file = (directory / LOG_NAME).open("xb", buffering=0)
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
        """Write the footer; returns the exit status that it states, or that of a partial log."""
        status = status_of(self.reported, stale)
        footer = {
            "kind": "footer",
            "counts": counts(self.reported),
            "stale_expectations": list(stale),
            "seconds": round(seconds, 3),
            "exit_status": status,
        }
        self._write(footer)
        if self.fault:
            return status_of(self.reported, stale, whole=False)
        self.footer = footer
        return status

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None or self.fault:
            return
        left = (dumps(line) + "\n").encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.fault = told(error, "the log is partial", self._file.name)


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
