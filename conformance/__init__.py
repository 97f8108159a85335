"""Run a sharded training wrapper beside an unsharded oracle, record both, and judge.

Importing this package must stay cheap: pytest loads `conformance.pytest_plugin` in every project
of the environment, so nothing here imports torch or a module that does. The public names are
imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.adapter import (
        Adapter,
        BuildConfig,
        Conventions,
        OptimizerFactory,
        Refusal,
        StepResult,
        Wrapped,
    )
    from conformance.names import CAPABILITIES
    from conformance.parametrize import parametrize_with_checks

_HOMES = {
    "CAPABILITIES": "conformance.names",
    "Adapter": "conformance.adapter",
    "BuildConfig": "conformance.adapter",
    "Conventions": "conformance.adapter",
    "OptimizerFactory": "conformance.adapter",
    "Refusal": "conformance.adapter",
    "StepResult": "conformance.adapter",
    "Wrapped": "conformance.adapter",
    "parametrize_with_checks": "conformance.parametrize",
}

__all__ = [
    "CAPABILITIES",
    "Adapter",
    "BuildConfig",
    "Conventions",
    "OptimizerFactory",
    "Refusal",
    "StepResult",
    "Wrapped",
    "parametrize_with_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
