"""Every row of the page of differences names tests that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

from tests.conftest import COLLECTED
from tests.package.test_requirements import found_in
from tests.package.tree import ROOT

NAMED = re.compile(r"`(?P<file>[\w/]+\.py)?(?:::(?P<test>\w+))?(?P<case>\[[^`]+\])?`")


def rows() -> Iterator[list[str]]:
    """Yield the cells of each row, heads and rules left out."""
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "requirement":
            yield cells


def named(cell: str) -> Iterator[str]:
    """Yield the id of each test that ``cell`` names, with ``...`` for any text."""
    file = test = ""
    for match in NAMED.finditer(cell):
        file, test = match["file"] or file, match["test"] or test
        folder = "tests" if "/" in file else "tests/fsdp"
        yield f"{folder}/{file}::{test}{match['case'] or ''}"


def is_there(name: str, ids: set[str]) -> bool:
    """Whether ``name`` is one of ``ids``, or stands for cases that are."""
    file, _, test = name.partition("::")
    pattern = test.replace("[", "[[]").replace("...", "*")
    found = (id_.partition("::")[2] for id_ in ids if id_.startswith(f"{file}::"))
    return any(fnmatchcase(id_, p) for id_ in found for p in (pattern, f"{pattern}[[]*"))


def test_every_row_has_its_four_cells_and_names_a_test() -> None:
    found = list(rows())
    assert len(found) > 100
    assert [cells for cells in found if len(cells) != 4] == []
    assert [cells for cells in found if not any("::test_" in n for n in named(cells[3]))] == []


def test_every_test_that_a_row_names_is_collected(pytestconfig: pytest.Config) -> None:
    names = {name for cells in rows() for name in named(cells[-1])}
    files = {name.partition("::")[0] for name in names}
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []
    # A run of all tests has found them already.
    missing = {n for n in names if not is_there(n, set(pytestconfig.stash[COLLECTED]))}
    if missing:
        ids = found_in(sorted({name.partition("::")[0] for name in missing}))
        missing = {name for name in missing if not is_there(name, ids)}
    assert sorted(missing) == []
