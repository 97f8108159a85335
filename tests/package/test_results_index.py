"""Every page of results stands in their index: under its own title, with a date that it names."""

from __future__ import annotations

import re

import pytest

from tests.package.tree import ROOT

RESULTS = ROOT / "docs" / "results"
INDEX = RESULTS / "README.md"
ROW = re.compile(r"^\| \[(.+)\]\((.+\.md)\) \| (.+) \| (.+) \| (\d{4}-\d\d-\d\d) \|$", re.M)
ROWS = ROW.findall(INDEX.read_text(encoding="utf-8"))


def test_every_page_stands_in_the_index_once() -> None:
    pages = sorted(path.name for path in RESULTS.glob("*.md") if path != INDEX)
    assert sorted(row[1] for row in ROWS) == pages


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_row_has_the_title_and_a_date_of_its_page(row: tuple[str, ...]) -> None:
    title, name, _, _, date = row
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert text.startswith(f"# {title}\n")
    assert date in text


def test_the_newest_page_stands_first() -> None:
    dates = [row[-1] for row in ROWS]
    assert dates == sorted(dates, reverse=True)
