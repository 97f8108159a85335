"""The kill matrix has a row for every report, none of them empty, and its page is up to date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance import kills
from conformance.kills import Entry, Reason, Status, catalogue, matrix, page, unplanted
from conformance.mutants import MUTANTS

ENTRY = Entry(id="a/b#1", kind="clip", title="One | two")
OTHER = replace(ENTRY, id="a/b#2")
MUTANT = replace(MUTANTS["key_lost"], bugs=("a/b#1",), world=4)
SMALLER = replace(MUTANTS["rank_killed"], bugs=("a/b#1",), world=2, device="accelerator")
OPEN = Reason(status=Status.OPEN, reason="Nobody looks.")


def test_every_report_has_mutants_or_a_reason() -> None:
    rows = matrix(catalogue(), MUTANTS.values(), unplanted())
    assert [row.entry.id for row in rows] == [entry.id for entry in catalogue()]
    assert len(rows) == 83
    for row in rows:
        assert bool(row.mutants) != (row.reason is not None)


def test_the_page_is_up_to_date() -> None:
    assert kills.main(["--check"]) == 0, "run: python -m conformance.kills"


def test_an_old_page_is_noticed_and_rewritten(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(kills, "PAGE", tmp_path / "page.md")
    assert kills.main(["--check"]) == 1
    assert kills.main([]) == 0
    assert kills.main(["--check"]) == 0
    kills.PAGE.write_text(kills.PAGE.read_text() + "edited by hand\n")
    assert kills.main(["--check"]) == 1


def test_the_mutant_of_the_smallest_world_comes_first() -> None:
    (row,) = matrix([ENTRY], [MUTANT, SMALLER], {})
    assert [mutant.name for mutant in row.mutants] == ["rank_killed", "key_lost"]
    assert row.status is Status.PLANTED


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        ({}, r"a/b#2 \(One \| two\) has neither a mutant nor a reason"),
        ({"a/b#1": OPEN, "a/b#2": OPEN}, "a/b#1 .* has a mutant and a reason for none"),
        ({"a/b#2": OPEN, "a/b#3": OPEN}, "a/b#3 has a reason and is not in the catalogue"),
    ],
)
def test_an_empty_or_a_doubled_row_is_refused(reasons: dict[str, Reason], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matrix([ENTRY, OTHER], [MUTANT], reasons)


@pytest.mark.parametrize(
    "row",
    ['status = "planted"\nreason = "x"', 'status = "open"', 'status = "open"\nreason = " "'],
)
def test_a_row_without_reason_is_refused(row: str, tmp_path: Path) -> None:
    path = tmp_path / "unplanted.toml"
    path.write_text(f'["a/b#1"]\n{row}\n')
    with pytest.raises(ValueError, match="a/b#1 wants status excluded or open, and a reason"):
        unplanted(path)


def test_the_page_counts_and_escapes() -> None:
    text = page(matrix([ENTRY, OTHER], [MUTANT, SMALLER], {"a/b#2": OPEN}))
    assert "\n2 reports: 1 planted, 0 excluded, 1 open\n" in text
    assert "- on CPU, 1 of the planted ones show, by 1 mutants" in text
    assert "- on accelerators, 1 of the planted ones show, by 2 mutants" in text
    only = page(matrix([ENTRY], [SMALLER], {}))
    assert "- on CPU, 0 of the planted ones show, by 0 mutants" in only
    assert "- on accelerators, 1 of the planted ones show, by 1 mutants" in only
    about = "| a/b#1 | clip | One \\| two"
    assert f"{about} | 2 | accelerator | rank_killed | `run.comp" in text
    assert f"{about} | 4 | any | key_lost | `state_dict.keys` | missing-key |" in text
    assert "| a/b#2 | clip | One \\| two | Nobody looks. |" in text


def test_no_cell_of_the_page_is_empty() -> None:
    rows = [line for line in kills.PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(rows) > len(catalogue())
    for row in rows:
        assert all(cell.strip() for cell in row[1:-1].split("|")), row
