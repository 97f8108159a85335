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
class Group:
    """Modules that the same tests judge.

    Attributes:
        name: of the group.
        modules: paths from the top of the checkout.
        tests: pytest's arguments, the likeliest to fail first.
        whole: every mutant is run; else a sample over all such groups.
        canary: module, line as it is, line as it becomes: a mutant that the tests must kill, or
            they do not see the changed tree.
    """

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    whole: bool
    canary: tuple[str, str, str]

    def canary_text(self, root: Path) -> str:
        """Return the canary's module with its change."""
        module, old, new = self.canary
        source = (root / module).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise ListError(f"the canary of '{self.name}': {old!r} must stand once in {module}")
        return source.replace(old, new)


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A mutant that behaves as the original does, wherever it can be told from outside."""

    module: str
    old: str
    new: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        """Whether this is it; lines are named by their text, which moves less than their number."""
        return (self.module, self.old, self.new) == (mutant.place.module, mutant.old, mutant.new)


class ListError(ValueError):
    """A list does not fit the tree."""


def groups(root: Path) -> list[Group]:
    """Return the groups; every module of the package is in one, or is left out with a reason."""
    listed = _read("targets.toml")
    free = {str(path.relative_to(root)) for path in root.glob("fsdp/**/*.py")}
    for each in listed["left_out"]:
        free -= _matched(each["modules"], free)
    found = []
    for each in listed["group"]:
        modules = _matched(each["modules"], free)
        free -= modules
        for test in each["tests"]:
            if not test.startswith("-") and not (root / test.partition("::")[0]).exists():
                raise ListError(f"targets.toml: '{each['name']}' names {test}: there is none")
        found.append(
            Group(
                name=each["name"],
                modules=tuple(sorted(modules)),
                tests=tuple(each["tests"]),
                whole=each.get("whole", False),
                canary=tuple(each["canary"]),
            )
        )
    if free:
        raise ListError(f"targets.toml: no group for {sorted(free)}; add each to one")
    return found


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
