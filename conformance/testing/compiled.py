"""A test that holds for eager computation shall hold for compiled computation.

Knows modules and `torch.compile`. Must not know wrappers: the test names the function that shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch import nn

__all__ = ["compiled_fsdp_test"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_fsdp_test(
    compile_compute_on_module: type[nn.Module] | None = None,
    *,
    backend: str = "inductor",
    name: str = "fully_shard",
) -> Callable[[Function], Function]:
    """Run the test twice: as it is, then with what it shards compiled.

    The second time, the function `name` of the test's file shards and then compiles, in place, the
    module it was given, or the one it returns. An error of that run carries a note that says so.

    Args:
        compile_compute_on_module: compile only modules of this class; None compiles all.
        backend: of the compiler; ``"aot_eager"`` needs neither Triton nor a C++ compiler.
        name: what the test's file calls the function that shards.

    Collective: a barrier before and after the second run. After an exception there is none.

    Raises:
        NameError: the file has no such function, so that nothing would be compiled.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            names = function.__globals__
            if name not in names:
                raise NameError(
                    f"compiled_fsdp_test: {function.__qualname__} is in a file without "
                    f"{name!r}; say with name= what it calls the function that shards"
                )
            function(*args, **kwargs)
            dist.barrier()
            compiling = _compiling(names[name], compile_compute_on_module, backend)
            try:
                with mock.patch.dict(names, {name: compiling}):
                    function(*args, **kwargs)
            except Exception as error:
                error.add_note(f"with computation compiled by {backend!r}; eager, it passed")
                raise
            dist.barrier()

        return run  # type: ignore[return-value]

    return decorate


def _compiling(
    shard: Callable[..., Any], kind: type[nn.Module] | None, backend: str
) -> Callable[..., Any]:
    @functools.wraps(shard)
    def sharded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = shard(module, *args, **kwargs)
        if kind is None or isinstance(module, kind):
            target = result if isinstance(result, nn.Module) else module
            target.compile(backend=backend)
        return result

    return sharded
