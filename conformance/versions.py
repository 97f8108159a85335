"""Which versions are installed, as a log names them. Imports none of what it names."""

from __future__ import annotations

import platform
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def versions() -> dict[str, str]:
    """Of the suite, of torch and of Python."""
    return {
        "fsdp-conformance": _of("fsdp-conformance"),
        "torch": _of_torch(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
    }


def _of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


def _of_torch() -> str:
    """With the build, such as +cu130, which the metadata of a wheel may leave out."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return "not installed"
    named: str = runpy.run_path(str(Path(found.origin).with_name("version.py")))["__version__"]
    return named
