"""Which lines of the package run under which label, in this process and in ranks forked from it.

A label is a number in memory that all of them share: the test that runs. Every stretch that was
measured is a line of a file, one file a process, because ranks are killed and write nothing at
exit. Knows coverage; must not know pytest or what a label stands for.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NONE = -1


class Lines:
    """Made before anything is forked that shall share the label."""

    def __init__(self, tree: Path, folder: Path) -> None:
        """Measure `tree`/fsdp, and write below `folder`, which exists."""
        self._tree, self._folder = tree, folder
        self._shared = mmap.mmap(-1, 8)
        self._coverage: tuple[int, Any] = (0, None)
        self.label = _NONE

    @property
    def label(self) -> int:
        """What is written beside the lines from now on, in every process; none if negative."""
        found: int = struct.unpack("q", self._shared[:])[0]
        return found

    @label.setter
    def label(self, value: int) -> None:
        self._shared[:] = struct.pack("q", value)

    def watch_ranks(self) -> None:
        """Measure every job of the ranks that are forked from here, by whatever label it has."""
        from conformance.ranks.worker import _Rank

        run = _Rank.run

        def measured(rank: _Rank, message: dict[str, Any]) -> dict[str, Any]:
            with self.measured():
                return run(rank, message)

        _Rank.run = measured  # type: ignore[method-assign]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure this process; what began under a label counts for it."""
        label, coverage = self.label, self._own()
        coverage.start()
        try:
            yield
        finally:
            coverage.stop()
            data = coverage.get_data()
            found = {
                str(Path(name).relative_to(self._tree)): sorted(data.lines(name) or ())
                for name in data.measured_files()
            }
            coverage.erase()
            if label != _NONE and any(found.values()):
                with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                    print(json.dumps([label, found]), file=file)

    def found(self) -> dict[int, dict[str, set[int]]]:
        """Return, by label, the lines of each module that have run so far."""
        found: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for path in self._folder.iterdir():
            for line in path.read_text().splitlines():
                label, modules = json.loads(line)
                for module, numbers in modules.items():
                    found[label][module].update(numbers)
        return found

    def _own(self) -> Any:
        """Return this process's measurement: a forked one makes its own."""
        import coverage

        if self._coverage[0] != os.getpid():
            # Not ``source``: looking for files that never ran costs more than most jobs.
            made = coverage.Coverage(
                data_file=None, config_file=False, include=[f"{self._tree}/fsdp/*"]
            )
            made.set_option("run:disable_warnings", ["no-data-collected"])
            self._coverage = os.getpid(), made
        return self._coverage[1]
