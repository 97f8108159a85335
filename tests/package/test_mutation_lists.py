"""The lists of the mutation testing fit the tree: what they name is there."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from typing import Any

import pytest

from tests.package.tree import ROOT, python_files, shown

HERE = ROOT / ".ci" / "mutation"
TARGETS = tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))
EQUIVALENT = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8"))
MODULES = [shown(path) for path in python_files("fsdp")]


def test_the_list_names_folders_and_modules_that_exist() -> None:
    assert [name for name in TARGETS["tests"] if not list((ROOT / name).glob("test_*.py"))] == []
    left_out = [pattern for each in TARGETS["left_out"] for pattern in each["modules"]]
    for pattern in (*TARGETS["whole"], *left_out):
        assert any(fnmatch(module, pattern) for module in MODULES), pattern


@pytest.mark.parametrize("canary", TARGETS["canary"], ids=lambda canary: canary["module"])
def test_a_canary_changes_one_place(canary: dict[str, Any]) -> None:
    module, old, new = canary["module"], canary["old"], canary["new"]
    text = (ROOT / module).read_text(encoding="utf-8")
    assert text.count(old) == 1
    compile(text.replace(old, new), module, "exec")


def test_an_equivalent_mutant_is_of_a_line_that_exists() -> None:
    for entry in EQUIVALENT.get("mutant", []):
        assert set(entry) == {"module", "old", "new", "reason"}
        lines = (ROOT / entry["module"]).read_text(encoding="utf-8").splitlines()
        assert entry["old"] in [line.strip() for line in lines], entry
        assert len(entry["reason"]) > 20, "a reason says why no caller can tell"
