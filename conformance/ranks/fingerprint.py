"""Global state of a rank, compared before and after a job to decide whether the rank may be kept.

A fingerprint holds references, so that "the same function" can be told by identity. Knows where
torch and Python keep global state. Must not know pools or messages.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _python_dispatch

__all__ = ["IGNORED_ENVIRONMENT", "changes", "fingerprint", "seed_everything"]

IGNORED_ENVIRONMENT = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "PYTEST_CURRENT_TEST", "TORCHELASTIC_USE_AGENT_STORE"}
)
"""Variables that name the rank's place or the running test; their change leaks nothing."""

_MISSING = object()
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    type,
    staticmethod,
    classmethod,
    property,
)


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, if it is loaded, numpy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def fingerprint() -> dict[str, Any]:
    """Name to value of the global state that a job may not leave changed."""
    state: dict[str, Any] = {}
    for name, read in _SETTINGS.items():
        state[name] = read()
    for owner_name, owner in _owners().items():
        for name, value in list(vars(owner).items()):
            if _is_code(value):
                state[f"{owner_name}.{name}"] = value
    for name, value in os.environ.items():
        if name not in IGNORED_ENVIRONMENT:
            state[f"os.environ[{name!r}]"] = value
    for number in signal.valid_signals():
        state[f"handler of signal {int(number)}"] = signal.getsignal(number)
    return state


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose value differs, sorted; code is compared by identity."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if not _same(before.get(name, _MISSING), after.get(name, _MISSING))
    )


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if _is_code(one) or _is_code(other):
        return _plain_step(one) is _plain_step(other)
    return type(one) is type(other) and bool(one == other)


def _plain_step(function: Any) -> Any:
    """Optimizer classes wrap their own `step` at the first instance; that is not a patch."""
    if getattr(function, "hooked", False) and hasattr(function, "__wrapped__"):
        return function.__wrapped__
    return function


def _is_code(value: Any) -> bool:
    # By the exact type: `callable` and `isinstance` would run code of torch's deprecated aliases.
    return issubclass(type(value), _CODE)


def _owners() -> dict[str, Any]:
    """Modules and classes whose functions tests and wrappers are known to patch."""
    import torch.distributed.distributed_c10d as c10d

    owners = {
        "torch.distributed": dist,
        "torch.distributed.distributed_c10d": c10d,
        "torch.autograd": torch.autograd,
        "torch.nn.functional": nn.functional,
        "torch.nn.utils": nn.utils,
        "torch.nn.Module": nn.Module,
        "torch.Tensor": torch.Tensor,
        "torch.nn.Parameter": nn.Parameter,
        "torch.optim.Optimizer": torch.optim.Optimizer,
        "torch.optim.SGD": torch.optim.SGD,
        "torch.optim.AdamW": torch.optim.AdamW,
        "torch.optim.Adam": torch.optim.Adam,
        "torch.nn.parallel.DistributedDataParallel": nn.parallel.DistributedDataParallel,
    }
    return {name: owner for name, owner in owners.items() if owner is not None}


def _global_hooks() -> tuple[int, ...]:
    """Numbers of global module and optimizer hooks."""
    tables = [
        value
        for module in (sys.modules[nn.Module.__module__], sys.modules[torch.optim.Optimizer.__module__])
        for name, value in sorted(vars(module).items())
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    return tuple(len(table) for table in tables)


def _threads() -> tuple[int, ...]:
    alive = (t.ident or 0 for t in threading.enumerate() if not t.daemon)
    return tuple(sorted(alive))


def _children() -> tuple[int, ...]:
    """Process ids of live children of any thread of this process (Linux)."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in path.read_text().split()]
        except OSError:
            continue  # the thread ended meanwhile
    return tuple(sorted(found))


def _autocast() -> tuple[object, ...]:
    devices = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        devices.append(accelerator.type)
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


def _backends() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(removed)"


_SETTINGS: Mapping[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "number of threads": torch.get_num_threads,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill uninitialized memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "autocast": _autocast,
    "backend flags": _backends,
    "dispatch modes": lambda: len(_python_dispatch._get_current_dispatch_mode_stack()),
    "global hooks": _global_hooks,
    "default process group": dist.is_initialized,
    "working directory": _working_directory,
    "garbage collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "recursion limit": sys.getrecursionlimit,
    "warning filters": lambda: tuple(map(str, warnings.filters)),
    "exception hooks": lambda: (sys.excepthook, threading.excepthook),
    "standard streams": lambda: (sys.stdout, sys.stderr),
    "non-daemon threads": _threads,
    "child processes": _children,
}
