"""Every finding has a page and a script, and adapters point to pages that exist. No ranks."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "docs" / "findings"
SCRIPTS = sorted(FINDINGS.glob("*.py"))
SAID = ("**Seen with**", "**Trigger**", "**Expected**", "**Actual**", "**Affected**")


def test_every_script_has_a_page_and_every_page_a_script() -> None:
    pages = {path.stem for path in FINDINGS.glob("*.md")} - {"README"}
    assert pages == {path.stem for path in SCRIPTS}
    assert pages


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_says_all_of_it_and_the_index_lists_it(script: Path) -> None:
    page = script.with_suffix(".md").read_text()
    assert [part for part in SAID if part not in page] == []
    assert f"docs/findings/{script.name}" in page
    assert f"({script.stem}.md)" in (FINDINGS / "README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_torch_and_the_standard_library_only(script: Path) -> None:
    tree = ast.parse(script.read_text())
    modules = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        str(node.module).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert modules <= {"torch"} | sys.stdlib_module_names


def test_adapters_name_findings_that_exist() -> None:
    named = {
        name
        for path in (ROOT / "conformance" / "adapters").glob("*.py")
        for name in re.findall(r"docs/findings/([\w-]+)\.md", path.read_text())
    }
    assert named
    assert named <= {path.stem for path in SCRIPTS}
