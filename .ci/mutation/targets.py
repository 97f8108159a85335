"""Which tests judge which modules, and which mutants no test can tell: the lists, read and checked.

Knows the two lists beside it; must not know runs or results.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sites import Mutant, Place, places_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A mutant that must be killed: `old`, which stands once in `module`, becomes `new`."""

    module: str
    old: str
    new: str

    def changed(self, root: Path) -> tuple[int, str]:
        """Return the line that is changed, and the module with the change."""
        source = (root / self.module).read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ListError(f"targets.toml: {self.old!r} must stand once in {self.module}")
        line = source[: source.index(self.old)].count("\n") + 1
        return line, source.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What is changed, and which tests are asked.

    Attributes:
        whole: modules of which every mutant is run.
        sampled: all others.
        tests: files.
        canaries: mutants that are run before all others.
    """

    whole: tuple[str, ...]
    sampled: tuple[str, ...]
    tests: tuple[str, ...]
    canaries: tuple[Canary, ...]


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A mutant that behaves as the original does, wherever it can be told from outside."""

    module: str
    old: str
    new: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        """Whether this is it; lines are named by their text, which moves less than their number."""
        return (self.module, self.old, self.new) == (
            mutant.place.module,
            mutant.old,
            mutant.new,
        )


class ListError(ValueError):
    """A list does not fit the tree."""


def targets(root: Path) -> Targets:
    """Return the list; every module of the package is in it, or is left out with a reason."""
    listed = _read("targets.toml")
    modules = {str(path.relative_to(root)) for path in root.glob("fsdp/**/*.py")}
    for each in listed["left_out"]:
        modules -= _matched(each["modules"], modules)
    whole = _matched(listed["whole"], modules)
    tests = [path for folder in listed["tests"] for path in root.glob(f"{folder}/test_*.py")]
    return Targets(
        whole=tuple(sorted(whole)),
        sampled=tuple(sorted(modules - whole)),
        tests=tuple(sorted(str(path.relative_to(root)) for path in tests)),
        canaries=tuple(Canary(**each) for each in listed["canary"]),
    )


def sample(places: Iterable[Place], seed: int) -> list[Place]:
    """Return the places in an order that depends on them and on ``seed`` alone."""
    ordered = sorted(places, key=lambda p: (p.module, p.line, p.operator, p.occurrence))
    return random.Random(seed).sample(ordered, len(ordered))


def places(root: Path, modules: Iterable[str]) -> list[Place]:
    """Return the places of several modules."""
    return [place for module in modules for place in places_of(root, module)]


def equivalents(root: Path, mutant_at: Callable[[Path, Place], Mutant | None]) -> list[Equivalent]:
    """Return the list of equivalent mutants; an entry that is no mutant any more is an error."""
    listed = [Equivalent(**each) for each in _read("equivalent.toml").get("mutant", [])]
    for each in listed:
        lines = (root / each.module).read_text(encoding="utf-8").splitlines()
        near = {i for i, line in enumerate(lines, 1) if line.strip() == each.old}
        if not near:
            raise ListError(f"equivalent.toml: {each.module} has no line {each.old!r} any more")
        # An operator on a later line of the same expression counts as on the line it changes.
        nearby = (p for p in places_of(root, each.module) if p.line in near)
        made = (mutant_at(root, place) for place in nearby)
        if not any(mutant is not None and each.covers(mutant) for mutant in made):
            raise ListError(f"equivalent.toml: nothing makes {each.old!r} into {each.new!r}")
    return listed


def _matched(patterns: list[str], free: set[str]) -> set[str]:
    found = set()
    for pattern in patterns:
        matched = {module for module in free if fnmatch(module, pattern)}
        if not matched:
            raise ListError(f"targets.toml: no module is left for {pattern}")
        found |= matched
    return found


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))
