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


@pytest.mark.parametrize("group", TARGETS["group"], ids=lambda group: group["name"])
def test_a_group_names_modules_and_tests_that_exist(group: dict[str, Any]) -> None:
    for pattern in group["modules"]:
        assert any(fnmatch(module, pattern) for module in MODULES), pattern
    for test in group["tests"]:
        path = test.removeprefix("--deselect=").partition("::")[0]
        assert test == "-m" or (ROOT / path).exists(), path


@pytest.mark.parametrize("group", TARGETS["group"], ids=lambda group: group["name"])
def test_a_canary_changes_one_place(group: dict[str, Any]) -> None:
    module, old, new = group["canary"]
    text = (ROOT / module).read_text(encoding="utf-8")
    assert text.count(old) == 1
    compile(text.replace(old, new), module, "exec")


def test_an_equivalent_mutant_is_of_a_line_that_exists() -> None:
    for entry in EQUIVALENT.get("mutant", []):
        assert set(entry) == {"module", "old", "new", "reason"}
        lines = (ROOT / entry["module"]).read_text(encoding="utf-8").splitlines()
        assert entry["old"] in [line.strip() for line in lines], entry
        assert len(entry["reason"]) > 20, "a reason says why no caller can tell"
