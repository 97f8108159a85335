"""The wheel holds what it should, and works in a project that has folders of the same names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from tests.package.tree import PACKAGES, ROOT, python_files

SOURCES = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES, "tests")

# The throw-away project: file to text. Its own `models`, `tests` and `utils` must stay its own.
PROJECT = {
    "models/__init__.py": "OWNER = 'downstream'\n",
    "utils.py": "OWNER = 'downstream'\n",
    "tests/__init__.py": "OWNER = 'downstream'\n",
    "tests/test_names.py": """\
import importlib.util
import os
from pathlib import Path

import models
import pytest
import tests
import utils

WHEEL = Path(os.environ["UNPACKED_WHEEL"])


@pytest.mark.parametrize("name", ["conformance", "conformance.models", "fsdp"])
def test_the_suite_comes_from_the_wheel(name):
    # Found, not imported: what is tested is the path, and torch takes seconds.
    assert Path(importlib.util.find_spec(name).origin).is_relative_to(WHEEL)


def test_the_project_keeps_its_own_modules():
    assert {models.OWNER, tests.OWNER, utils.OWNER} == {"downstream"}
""",
}

# What the project does with the suite, once: every package of it is imported beside its own.
USE = """\
import conformance.models, fsdp, models, utils
assert models.OWNER == utils.OWNER == "downstream" and models is not conformance.models
"""

PYTHON = sys.executable
SCRIPT = str(Path(sys.executable).with_name("pytest"))

# Ways in which people start pytest: the folder, then the command. What comes first on the path is
# decided by `-m`, by the folder and by the mode of imports; the others are left to a long run.
STARTS = {
    "module": (".", [PYTHON, "-m", "pytest"]),
    "module on a folder": (".", [PYTHON, "-m", "pytest", "tests"]),
    "module on a file": (".", [PYTHON, "-m", "pytest", "tests/test_names.py"]),
    "module from inside": ("tests", [PYTHON, "-m", "pytest"]),
    "module, importlib mode": (".", [PYTHON, "-m", "pytest", "--import-mode=importlib"]),
    "script": (".", [SCRIPT]),
    "script under xdist": (".", [SCRIPT, "-n", "2"]),
}
MORE_STARTS = {"module on a folder", "module on a file", "script under xdist"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The wheel, built once for all workers from a copy of the sources, without network."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    built = shared / "wheel"
    with FileLock(shared / "wheel.lock"):
        if not list(built.glob("*.whl")):
            copy = shared / "sources"
            for name in SOURCES:
                _copy(ROOT / name, copy / name)
            _run(
                [PYTHON, "-m", "build", "--wheel", "--no-isolation", "-o", str(built)],
                cwd=copy,
            )
    return next(built.glob("*.whl"))


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def in_project(project: Path, unpacked: Path, command: list[str], folder: str = ".") -> str:
    """Run a command in a folder of the project, with the wheel before all else; its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONPATH": str(unpacked), "UNPACKED_WHEEL": str(unpacked)}
    environment["PYTEST_ADDOPTS"] = "-p no:hypothesispytest"  # a second at each start, for nothing
    return _run(command, cwd=project / folder, env=environment)


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_two_packages_at_the_top(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"conformance", "fsdp"}


def test_the_wheel_holds_every_module_of_the_tree(wheel: Path) -> None:
    expected = {
        re.sub(r"^models/", "conformance/models/", path.relative_to(ROOT).as_posix())
        for path in python_files(*PACKAGES)
    }
    assert {name for name in names(wheel) if name.endswith(".py")} == expected


@pytest.mark.parametrize(
    "name",
    [
        "conformance/py.typed",
        "fsdp/py.typed",
        "conformance/requirements.toml",
        "conformance/mutants/catalogue.jsonl",
        "conformance/mutants/unplanted.toml",
    ],
)
def test_the_wheel_holds_its_data(wheel: Path, name: str) -> None:
    assert name in names(wheel)


def test_the_wheel_holds_every_schema_of_the_tree(wheel: Path) -> None:
    tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conformance").rglob("*.json")}
    assert tree <= set(names(wheel))


def test_the_wheel_names_its_license_and_its_commands(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    entry_points = (info / "entry_points.txt").read_text()
    assert "fsdp-conformance = conformance.cli:main" in entry_points
    assert "fsdp_conformance = conformance.pytest_plugin" in entry_points


@pytest.mark.parametrize(
    "start",
    [pytest.param(s, marks=pytest.mark.long) if s in MORE_STARTS else s for s in STARTS],
)
def test_a_project_with_the_same_names_finds_the_suite(
    project: Path, unpacked: Path, start: str
) -> None:
    folder, command = STARTS[start]
    assert "4 passed" in in_project(project, unpacked, command, folder)


def test_a_project_with_the_same_names_imports_the_suite(project: Path, unpacked: Path) -> None:
    in_project(project, unpacked, [PYTHON, "-c", USE])


def test_a_project_with_the_same_names_uses_the_command(project: Path, unpacked: Path) -> None:
    command = [PYTHON, "-m", "conformance", "list", "checks", "--json"]
    listed = json.loads(in_project(project, unpacked, command))
    assert "losses.value" in [row["check"] for row in listed]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(source, target, ignore=ignored)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _run(command: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
