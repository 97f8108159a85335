"""Which versions are installed, as a log names them. Imports none of what it names."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of the suite, of torch and of Python."""
    try:
        own = version("fsdp-conformance")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "fsdp-conformance": own,
        "torch": version("torch"),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
    }
