"""Global state of a rank, compared before and after a job to decide whether the rank may be kept.

A fingerprint holds references, so that "the same function" can be told by identity. Knows where
torch and Python keep global state. Must not know pools or messages.
"""

from __future__ import annotations

import gc
import inspect
import operator
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _python_dispatch

from conformance.ranks.orphans import children
from conformance.ranks.setup import IGNORED_ENVIRONMENT

__all__ = ["changes", "fingerprint", "seed_everything"]

_OWNERS: Mapping[str, Any] = {
    "torch.distributed": dist,
    "torch.distributed.distributed_c10d": dist.distributed_c10d,
    "torch.autograd": torch.autograd,
    "torch.nn.functional": nn.functional,
    "torch.nn.utils": nn.utils,
    "torch.nn.Module": nn.Module,
    "torch.nn.Parameter": nn.Parameter,
    "torch.nn.parallel.DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.Adam": torch.optim.Adam,
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.optim.SGD": torch.optim.SGD,
    "torch.Tensor": torch.Tensor,
}
"""Modules and classes whose functions tests and wrappers are known to patch."""

_OPTIMIZERS = tuple(name for name in _OWNERS if name.startswith("torch.optim."))
_SIGNALS = tuple(int(number) for number in signal.valid_signals())
_handler = inspect.unwrap(signal.getsignal)  # without the search for a name of every handler
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


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global generators of Python, of torch for `device` and, if it is loaded, numpy's."""
    random.seed(seed)
    if device.type == "cpu":
        # torch.manual_seed would queue a call, with its stack, for every absent accelerator.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Name to value of the global state that a job may not leave changed.

    Args:
        device: the rank's own; an accelerator must be in use already.
    """
    state: dict[str, Any] = {name: read() for name, read in _SETTINGS.items()}
    for number in _SIGNALS:
        state[f"handler of signal {number}"] = _handler(number)
    if device.type != "cpu":
        state["current device"] = torch.accelerator.current_device_index()
        state["current stream"] = torch.accelerator.current_stream()
    for name, owner in _OWNERS.items():
        state[name] = dict(vars(owner))
    for name in _OPTIMIZERS:  # some inherit the `step` that their first instance wraps
        state[name]["step"] = _OWNERS[name].step
    state["os.environ"] = {k: v for k, v in os.environ.items() if k not in IGNORED_ENVIRONMENT}
    return state


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose value differs, sorted."""
    found = [
        name
        for name in before.keys() | after.keys()
        if name not in _OWNERS
        and name != "os.environ"
        and not _same(before.get(name, _MISSING), after.get(name, _MISSING))
    ]
    for name in _OWNERS:
        found += [f"{name}.{key}" for key in _patched(before[name], after[name])]
    was, now = before["os.environ"], after["os.environ"]
    found += [f"os.environ[{k!r}]" for k in was.keys() | now.keys() if was.get(k) != now.get(k)]
    return sorted(found)


def _patched(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names that stand for other code than before, or for code where there was nothing."""
    if list(before) == list(after) and all(map(operator.is_, before.values(), after.values())):
        return []
    names = [name for name, value in before.items() if after.get(name, _MISSING) is not value]
    names += [name for name in after if name not in before]
    return [name for name in names if _is_patch(before, after, name)]


def _is_patch(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
    old, new = before.get(name, _MISSING), after.get(name, _MISSING)
    if not _is_code(old if name in before else new):
        return False  # a cached value or a submodule
    return _plain_step(old) is not _plain_step(new)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _plain_step(function: Any) -> Any:
    """Optimizer classes wrap their own `step` at the first instance; that is not a patch."""
    if getattr(function, "hooked", False) and hasattr(function, "__wrapped__"):
        return function.__wrapped__
    return function


def _is_code(value: Any) -> bool:
    # By the exact type: `callable` and `isinstance` would run code of torch's deprecated aliases.
    return issubclass(type(value), _CODE)


def _global_hooks() -> tuple[int, ...]:
    """Numbers of global module and optimizer hooks."""
    tables = [
        value
        for module in (
            sys.modules[nn.Module.__module__],
            sys.modules[torch.optim.Optimizer.__module__],
        )
        for name, value in sorted(vars(module).items())
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    return tuple(len(table) for table in tables)


def _threads() -> tuple[int, ...]:
    alive = (t.ident or 0 for t in threading.enumerate() if not t.daemon)
    return tuple(sorted(alive))


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


def _warning_filters() -> tuple[str, ...]:
    """Filters on Python's own categories; libraries add those on their own when imported."""
    return tuple(str(f) for f in warnings.filters if f[2].__module__ == "builtins")


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
    "saved tensor hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks(False),
    "default process group": dist.is_initialized,
    "working directory": _working_directory,
    "garbage collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "recursion limit": sys.getrecursionlimit,
    "warning filters": _warning_filters,
    "exception hooks": lambda: (sys.excepthook, threading.excepthook),
    "standard streams": lambda: (sys.stdout, sys.stderr),
    "non-daemon threads": _threads,
    "child processes": children,
}
