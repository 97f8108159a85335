"""pyproject.toml and constraints.txt agree with the tree and with each other."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

from tests.package.tree import PACKAGES, ROOT, module_name, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[\w+\])?\s*(.*)$")


def name_of(requirement: str) -> str:
    match = REQUIREMENT.match(requirement)
    assert match, requirement
    return match[1].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name_of(name): version for name, version in found}


def direct_requirements() -> list[str]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]


def test_the_listed_packages_are_those_of_the_tree() -> None:
    found = {module_name(path) for path in python_files(*PACKAGES) if path.name == "__init__.py"}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == sorted(found)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in python_files(*PACKAGES)}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.parametrize("requirement", direct_requirements())
def test_a_direct_requirement_has_a_tested_version(requirement: str) -> None:
    assert name_of(requirement) in {*pins(), PROJECT["project"]["name"]}


def reached(requirements: list[str]) -> set[str]:
    """Every installed distribution that the requirements bring in, directly or not."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = name_of(requirement.name)
        extras = requirement.extras or {""}
        try:
            brought = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # an extra that this environment does without
        new = [Requirement(line) for line in brought] if name not in found else []
        found.add(name)
        waiting += [
            r
            for r in new
            if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return found


def test_everything_that_is_brought_in_has_a_tested_version() -> None:
    name = PROJECT["project"]["name"]
    missing = reached(direct_requirements()) - pins().keys() - {name}
    foreign = {line for line in missing if line.startswith(("nvidia", "cuda", "triton"))}
    assert not missing - foreign, "add them to constraints.txt; torch pins its own CUDA libraries"


def test_torch_is_pinned_above_the_oldest_supported_version() -> None:
    oldest = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    assert oldest == "torch >= 2.11"
    assert pins()["torch"] == "2.13.0"


def test_every_runtime_library_has_its_reason_in_the_contributors_guide() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Why these libraries")[2].partition("\n## ")[0]
    missing = [
        name
        for name in map(name_of, PROJECT["project"]["dependencies"])
        if name not in {"torch", "numpy"} and not re.search(rf"\b{name}\b", table)
    ]
    assert not missing
