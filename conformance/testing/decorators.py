"""Decorators of test methods: what they need, and where they run.

Knows what a method asks for. Must not know pools.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch.distributed as dist

from conformance.machine import CPU, accelerator
from conformance.testing import place

__all__ = ["devices_wanted", "skip_if_lt_x_gpu", "skip_reason", "with_comms"]

Function = TypeVar("Function", bound=Callable[..., Any])

_WANTED = "_accelerators_wanted"
_NOT_ON_CPU = "_not_on_cpu"


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = True) -> Callable[[Function], Function]:
    """Skip the test where fewer than `x` accelerators, of whatever type, are there.

    A test that runs on the CPU runs, with as many ranks as it asks for.

    Args:
        x: how many accelerators the test needs.
        allow_cpu: False skips it on the CPU.
    """

    def mark(function: Function) -> Function:
        setattr(function, _WANTED, x)
        setattr(function, _NOT_ON_CPU, not allow_cpu)
        return function

    return mark


def devices_wanted(method: Callable[..., Any], kind: str) -> int:
    """How many devices `method` asks for.

    Raises:
        unittest.SkipTest: it does not run on `kind`.
    """
    if kind == CPU and getattr(method, _NOT_ON_CPU, False):
        raise unittest.SkipTest("needs accelerators, and this test runs on the CPU")
    return int(getattr(method, _WANTED, 0))


def skip_reason(wanted: int, kind: str) -> str:
    """Why a test that needs `wanted` devices of type `kind` cannot run here, "" if it can."""
    if kind == CPU:
        return ""
    present, count = accelerator()
    if present != kind:
        return f"needs devices of type {kind}, this machine has none"
    if count < wanted:
        return f"needs {wanted} devices of type {kind}, {count} present"
    return ""


@overload
def with_comms(function: Function, /) -> Function: ...
@overload
def with_comms(*, backend: str | None = None) -> Callable[[Function], Function]: ...
def with_comms(function: Any = None, /, *, backend: str | None = None) -> Any:
    """Run the test inside the default process group, and wait for all ranks at its end.

    The group is there in any case; the decorator checks that, and leaves no rank behind.

    Args:
        function: the test method.
        backend: what the default group must use, None for any.
    """
    if function is None:
        return functools.partial(_with_comms, backend=backend)
    return _with_comms(function, backend=None)


def _with_comms(function: Function, *, backend: str | None) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        used = place.here().backend
        if backend is not None and backend != used:
            raise ValueError(
                f"with_comms: wants backend {backend!r}, the default group uses {used!r}; "
                "set the class attribute `backend` of the test class"
            )
        value = function(*args, **kwargs)
        dist.barrier()
        return value

    return run  # type: ignore[return-value]
