"""Which versions are installed, as a log names them. Imports none of what it names."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of the suite, of torch and of Python."""
    return {
        "fsdp-conformance": _of("fsdp-conformance"),
        "torch": _of("torch"),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
    }


def _of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a checkout
        return "not installed"
