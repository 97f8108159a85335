"""Released sets of checks: what each profile consisted of when it was given a number.

A release is never edited; a test holds its definitions. What a profile is today may be ahead of
it. `python -m conformance.releases 1.1` writes the profiles as they are as another release.

Knows the file of releases, and the register of checks, which is imported when it is asked for: that
a release has a profile can be said without. Runs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.errors import UsageError, unknown
from conformance.names import PROFILES

if TYPE_CHECKING:
    from conformance.checks import Check

FILE = Path(__file__).resolve().parent / "checks" / "releases.toml"
_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class Released:
    """One profile of one release.

    Attributes:
        hash: of the definitions of its checks, see `definition_hash`.
        checks: their ids.
    """

    hash: str
    checks: tuple[str, ...]


def definition_hash(checks: Iterable[Check]) -> str:
    """Changes when a check is added or removed, requires another thing or judges other cases."""
    return digest(
        [[c.id, c.profile, c.sentence, sorted(c.scenarios), sorted(c.needs)] for c in checks]
    )


def digest(rows: Sequence[object]) -> str:
    """Sixteen hexadecimal digits for plain data."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


@cache
def releases() -> Mapping[str, Mapping[str, Released]]:
    """Every release, oldest first: its profiles by name."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        version: {
            name: Released(hash=row["hash"], checks=tuple(row["checks"]))
            for name, row in profiles.items()
        }
        for version, profiles in table.items()
    }


def today(profile: str) -> list[Check]:
    """The checks of a profile as they are now, in the order of registration."""
    from conformance.checks import CHECKS

    return [check for check in CHECKS.values() if check.profile == profile]


def release_of(profile: str) -> str | None:
    """The last release whose `profile` has the definitions of today; None if they are ahead."""
    now = definition_hash(today(profile))
    found = [
        version
        for version, profiles in releases().items()
        if profile in profiles and profiles[profile].hash == now
    ]
    return found[-1] if found else None


def profile_named(given: str) -> tuple[str, Released | None]:
    """A profile, given as ``core`` or, as it was released, as ``core@1.0``; None is that of today.

    Raises:
        UsageError: an unknown profile or release.
    """
    name, at, version = given.partition("@")
    if name not in PROFILES:
        raise unknown("profile", name, PROFILES)
    if not at:
        return name, None
    if version not in releases():
        raise unknown("release of checks", version, releases())
    if name not in releases()[version]:
        raise UsageError(f"release {version} has no profile {name!r}; it is younger")
    return name, releases()[version][name]


def ids_of(profiles: Collection[str]) -> set[str]:
    """The checks of profiles, each named as for `profile_named`.

    Raises:
        UsageError: an unknown profile or release.
    """
    found: set[str] = set()
    for name, released in map(profile_named, profiles):
        found.update(released.checks if released else (check.id for check in today(name)))
    return found


def header_row(profile: str) -> dict[str, str | None]:
    """What a run's log says of a profile."""
    return {"hash": definition_hash(today(profile)), "release": release_of(profile)}


def text_of(version: str) -> str:
    """The lines of a release of what there is today."""
    lines = [f'["{version}"]']
    for profile in PROFILES:
        checks = today(profile)
        ids = json.dumps([check.id for check in checks])
        lines.append(f'{profile} = {{ hash = "{definition_hash(checks)}", checks = {ids} }}')
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Append a release to the file; 64 for a version that is none, or that is there already."""
    parser = argparse.ArgumentParser(prog="python -m conformance.releases", description=__doc__)
    parser.add_argument("version", help="such as 1.1")
    version = parser.parse_args(arguments).version
    if not _VERSION.fullmatch(version):
        sys.stderr.write(f"version: got {version!r}, want two numbers such as 1.1\n")
        return 64
    if version in releases():
        sys.stderr.write(f"release {version} is there already; a release is never edited\n")
        return 64
    with FILE.open("a", encoding="utf-8") as file:
        file.write("\n" + text_of(version))
    return 0


if __name__ == "__main__":
    from conformance.cli.interrupt import leave_with

    leave_with("conformance.releases")
