"""Which test runs which lines of the package, and how long it takes: measured once, then kept.

A line of the file for each file of tests, with what it was measured on. Knows the file and runs;
must not know mutants or results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from crew import Answer, Crew, Order

_LIMIT = 600.0
_OVERHEAD = 0.01
"""Seconds that a test takes at least."""
_SLICE = 10.0
"""Seconds after which the rest of a file is dealt out to others."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test that passes without a mutant.

    Attributes:
        name: pytest's id.
        seconds: it took, with what prepares it.
        lines: of each module, what it ran, in its process and in ranks.
    """

    name: str
    seconds: float
    lines: dict[str, frozenset[int]]

    @property
    def file(self) -> str:
        """Where it stands."""
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        """Its id without its parameters."""
        return self.name.partition("[")[0]


class Cover:
    """Tests by the lines that they run.

    Attributes:
        failed: by id, why a test fails without a mutant. It judges none.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.failed: dict[str, str] = {}
        self._tests: dict[str, Test] = {}
        self._long: list[str] = []

    def add(self, tests: dict[str, dict[str, Any]], long: Sequence[str]) -> None:
        """Take in what was measured, and the ids of `long` tests, which were not."""
        self._long += long
        for name, found in tests.items():
            if found["outcome"] == "failed":
                self.failed[name] = found["why"]
            elif found["outcome"] == "passed":
                lines = {module: _numbers(text) for module, text in found["lines"].items()}
                self._tests[name] = Test(name=name, seconds=found["seconds"], lines=lines)

    def drop(self, name: str, why: str) -> None:
        """Ask this test no more: it fails by itself now and then."""
        self.failed[name] = why
        self._tests.pop(name, None)

    def able(self, module: str, lines: Iterable[int]) -> list[Test]:
        """Return the tests that run one of these lines, the likeliest to tell first."""
        wanted = frozenset(lines)
        able = [t for t in self._tests.values() if not wanted.isdisjoint(t.lines.get(module, ()))]
        return _likeliest(able, module)

    def perhaps(self, module: str) -> list[Test]:
        """Return `long` cells of tests that run this module elsewhere: they may run any line of it.

        What is known of them is what their sisters did.
        """
        sisters: dict[str, Test] = {}
        for test in self._tests.values():
            if module in test.lines:
                sisters.setdefault(test.function, test)
        found = [
            replace(sister, name=name)
            for name in self._long
            if (sister := sisters.get(name.partition("[")[0])) and name not in self.failed
        ]
        return _likeliest(found, module)

    def __len__(self) -> int:
        return len(self._tests)

    @property
    def seconds(self) -> float:
        """Of all tests, one after the other."""
        return sum(test.seconds for test in self._tests.values())


def _likeliest(tests: list[Test], module: str) -> list[Test]:
    """Sort by seconds, as if a second were longer where it tells less.

    A test that runs little beside this module is about it; the n-th cell of a test sees little that
    the others have not seen.
    """
    tests.sort(key=lambda test: (test.seconds, test.name))
    seen: Counter[str] = Counter()
    cost = {}
    for test in tests:
        seen[test.function] += 1
        share = len(test.lines[module]) / sum(map(len, test.lines.values()))
        cost[test.name] = (test.seconds + _OVERHEAD) * seen[test.function] / share
    return sorted(tests, key=lambda test: (cost[test.name], test.name))


def within(tests: Sequence[Test], seconds: float) -> list[Test]:
    """Return the first tests that take at most so many seconds in all, and one in any case."""
    ends = accumulate(test.seconds for test in tests)
    count = sum(end <= seconds for end in ends)
    return list(tests[: max(1, count)])


class Survey:
    """Files of tests at work, to be measured.

    A file that was measured on this package and with these tests, and what they share, is not run
    again.
    """

    def __init__(self, crew: Crew, root: Path, files: Sequence[str], kept: Path) -> None:
        """Ask for what is not in `kept`, the largest files first."""
        self._crew, self._kept = crew, kept
        self._cover = Cover()
        self._waiting: Counter[str] = Counter()
        measured = {root / file for file in files}
        shared = (path for path in root.glob("tests/**/*.py") if path not in measured)
        state = _digest([*root.glob("fsdp/**/*.py"), *shared])
        self._stamps = {file: f"{state} {_digest([root / file])}" for file in files}
        known = {(record["file"], record["of"]): record for record in _read(kept)}
        for file in sorted(files, key=lambda file: -(root / file).stat().st_size):
            record = known.get((file, self._stamps[file]))
            if record is None:
                self._ask(file)
            else:
                self._cover.add(record["tests"], record["long"])

    def cover(self, deadline: float) -> Cover | None:
        """Return what each test runs, None if time was up; keep what was measured, file by file."""
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        long: dict[str, list[str]] = defaultdict(list)
        with self._kept.open("a") as kept:
            for answer in self._crew.answers(deadline):
                file = answer.order.key
                found[file] |= _told(answer)
                long[file] += answer.long
                for rest in _dealt(answer):
                    self._ask(file, rest)
                self._waiting[file] -= 1
                if not self._waiting[file]:
                    self._cover.add(found[file], long[file])
                    record = {
                        "file": file,
                        "of": self._stamps[file],
                        "tests": found[file],
                        "long": long[file],
                    }
                    print(json.dumps(record), file=kept, flush=True)
        return None if self._waiting.total() else self._cover

    def _ask(self, file: str, tests: tuple[str, ...] = ()) -> None:
        self._waiting[file] += 1
        order = Order(key=file, files=(file,), tests=tests, limit=_LIMIT, survey=_SLICE)
        self._crew.put(order)


def _told(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return a survey's tests, lines written short; a file that cannot run is one failed test."""
    nothing = answer.exit == 2 and not answer.left and not answer.tests
    if nothing or answer.exit not in (0, 1, 2, 5):
        return {answer.order.key: {"outcome": "failed", "why": answer.output}}
    found = {}
    for name, test in answer.tests.items():
        lines = {module: _text(numbers) for module, numbers in test["lines"].items()}
        found[name] = {**test, "lines": lines}
    return found


def _dealt(answer: Answer) -> list[tuple[str, ...]]:
    """Return what a survey has left, in parts of the size that it came to."""
    if not answer.left:
        return []
    parts = math.ceil(len(answer.left) / max(1, len(answer.tests)))
    return [tuple(answer.left[number::parts]) for number in range(parts)]


def _text(numbers: list[int]) -> str:
    """Return sorted numbers as "1-3 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(text: str) -> frozenset[int]:
    ends = (run.partition("-") for run in text.split())
    return frozenset(n for a, _, b in ends for n in range(int(a), int(b or a) + 1))


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(f"{path.name}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # it was cut off
