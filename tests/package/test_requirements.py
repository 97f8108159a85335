"""The table of requirements is sound, and its page is up to date."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest

from conformance import requirements as module
from conformance.requirements import (
    Requirements,
    Status,
    load,
    page,
    problems,
    sections,
    wording,
)
from tests.conftest import COLLECTED
from tests.package.tree import ROOT

CHECKS = {"losses.value", "gradients.value"}
SPECIFICATION = """\
## 1 One
### 1.1 First part
- F1-AA-001 A rule. [source only]
- F1-AA-002 Another, with F1-AA-001 named inside.
### 1.2 Second part
- SD-F2-001 A third.
"""
SOUND = """\
[wrapper.DP-TRAIN-001]
sentence = "Losses are right."
generalises = ["F1-AA-001"]
checks = ["losses.value", "gradients.value"]
[spec]
F1-AA-001 = { status = "must", proved_by = ["tests/a.py::test_a"] }
F1-AA-002 = { status = "excluded", reason = "Concerns | torch alone.", proved_by = [] }
SD-F2-001 = { status = "adapted", reason = "Copies.", proved_by = ["tests/b.py::test_b"] }
[unjudged]
"compiled | models" = "Nobody compiles."
"""


@pytest.fixture
def table(tmp_path: Path):
    def write(text: str) -> Requirements:
        path = tmp_path / "requirements.toml"
        path.write_text(text)
        return load(path)

    return write


def spec_ids(text: str = SPECIFICATION) -> list[str]:
    return [id_ for ids in sections(text).values() for id_ in ids]


def test_the_project_table_is_sound() -> None:
    # Imported here: the registry imports torch, which the other tests of this file do without.
    from conformance.checks import CHECKS

    specification = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    assert list(problems(load(), spec_ids(specification), CHECKS)) == []
    assert [(id_, p) for id_, check in CHECKS.items() for p in wording(check.sentence)] == []


def test_the_specification_has_its_571_requirements() -> None:
    specification = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    assert len(spec_ids(specification)) == 571


def test_the_rows_stand_in_the_order_of_the_specification() -> None:
    specification = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    assert list(load().spec) == spec_ids(specification)


def with_all_cases(ids: Set[str]) -> Set[str]:
    """``ids``, and the names without parameters, which stand for all of their cases."""
    return ids | {id_.partition("[")[0] for id_ in ids}


def found_in(files: list[str]) -> set[str]:
    """Ids of the tests in ``files``, by a process that does nothing else."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
    ]
    listed = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    collected = {line.strip() for line in listed.stdout.splitlines() if "::" in line}
    assert collected, listed.stdout + listed.stderr
    return collected


def test_every_proving_test_is_one_that_pytest_collects(pytestconfig: pytest.Config) -> None:
    names = {name for row in load().spec.values() for name in row.proved_by}
    files = sorted({name.partition("::")[0] for name in names})
    assert not [file for file in files if not (ROOT / file).is_file()]
    # A run of all tests has found them already.
    missing = names - with_all_cases(pytestconfig.stash[COLLECTED])
    if missing:
        missing -= with_all_cases(found_in(sorted({n.partition("::")[0] for n in missing})))
    assert sorted(missing) == []


def test_the_page_is_up_to_date() -> None:
    assert module.main(["--check"]) == 0, "run: python -m conformance.requirements"


def test_an_old_page_is_noticed_and_rewritten(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    module.PAGE.write_text(module.PAGE.read_text() + "edited by hand\n")
    assert module.main(["--check"]) == 1


def test_sections_hold_their_ids_in_order() -> None:
    assert sections(SPECIFICATION) == {
        "1.1 First part": ("F1-AA-001", "F1-AA-002"),
        "1.2 Second part": ("SD-F2-001",),
    }


def test_an_id_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="F1-AA-001 stands twice"):
        sections(SPECIFICATION + "- F1-AA-001 Again.\n")


def test_a_sound_table_has_no_problem(table) -> None:
    assert list(problems(table(SOUND), spec_ids(), CHECKS)) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('SD-F2-001 = { status = "adapted"', 'SD-F2-009 = { status = "adapted"', "SD-F2-001"),
        ('SD-F2-001 = { status = "adapted"', 'SD-F2-009 = { status = "adapted"', "SD-F2-009"),
        (', reason = "Copies."', "", "SD-F2-001: adapted without a reason"),
        (' reason = "Concerns | torch alone.",', "", "F1-AA-002: excluded without a reason"),
        ('["tests/a.py::test_a"]', "[]", "F1-AA-001: must without a test"),
        ('["tests/b.py::test_b"]', "[]", "SD-F2-001: adapted without a test"),
        ('"must",', '"must", reason = "Because.",', "F1-AA-001: must, and yet a reason"),
        ('alone.", proved_by = []', 'alone.", proved_by = ["t"]', "F1-AA-002: excluded, and yet"),
        ('generalises = ["F1-AA-001"]', 'generalises = ["F1-AA-002"]', "which is excluded"),
        ('generalises = ["F1-AA-001"]', 'generalises = ["F1-AA-003"]', "has no [spec] row"),
        ('generalises = ["F1-AA-001"]', "generalises = []", "at least one spec id"),
        ('"losses.value", ', "", "losses.value: this check proves no requirement"),
        ('"Nobody compiles."', '" "', "compiled | models: unjudged without a reason"),
        ("losses.value", "loses.value", "names the check loses.value, which is not registered"),
        ("DP-TRAIN-001", "DP-train-1", "DP-train-1: want DP-"),
        ("are right.", "are right", "ends with a full stop"),
        ("Losses are right.", "losses are right.", "begins with a capital"),
        ("are right.", "should be right.", "'should' leaves open what holds"),
        ("are right.", "are right. Others too.", "is one sentence"),
        ("are right.", f"are {'very ' * 40}right.", "180 at most"),
    ],
)
def test_a_fault_is_named(table, old: str, new: str, problem: str) -> None:
    assert old in SOUND
    found = list(problems(table(SOUND.replace(old, new)), spec_ids(), CHECKS))
    assert any(problem in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"must"', '"should"', "F1-AA-001: status: got 'should', want one of must, adapted"),
        (', proved_by = ["tests/a.py::test_a"]', "", "F1-AA-001: misses proved_by"),
        ("proved_by = []", "proven = []", "F1-AA-002: misses proved_by"),
        ('"must"', '"must", tests = []', "F1-AA-001: unknown tests; known are"),
        ("proved_by = []", 'proved_by = "x"', "F1-AA-002: proved_by: got 'x', want a list"),
        ('"gradients.value"', '"losses.value"', "DP-TRAIN-001: checks: a name stands twice"),
        ('"Nobody compiles."', "1", "compiled | models: reason: got 1, want text"),
        ('"Losses are right."', "1", "DP-TRAIN-001: sentence: got 1, want text"),
        ("[spec]", "[spec", "requirements.toml: "),
    ],
)
def test_a_malformed_row_is_refused(table, old: str, new: str, message: str) -> None:
    assert old in SOUND
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        table(SOUND.replace(old, new))
    assert message in str(caught.value)


def test_the_page_says_what_binds_whom_and_what_proves_it(table) -> None:
    requirements = table(SOUND)
    text = page(requirements, sections(SPECIFICATION))
    for line in (
        "| DP-TRAIN-001 | Losses are right. | F1-AA-001 | `losses.value`, `gradients.value` |",
        "| compiled \\| models | Nobody compiles. |",
        "| 1.1 First part | 1 | 0 | 1 | 1 |",
        "| 1.2 Second part | 0 | 1 | 0 | 1 |",
        "| all | 1 | 1 | 1 | 2 |",
        r"| F1-AA-002 | excluded | Concerns \| torch alone. |",
        "| F1-AA-001 | `tests/a.py::test_a` |",
        "| SD-F2-001 | `tests/b.py::test_b` |",
    ):
        assert line in text.splitlines()
    assert requirements.spec["SD-F2-001"].status is Status.ADAPTED
