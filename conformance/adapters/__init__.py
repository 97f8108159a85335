"""Adapters by name: the built-in ones, and others as ``package.module:Class``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from conformance.adapter import CAPABILITIES, Adapter
from conformance.errors import UsageError, unknown

BUILT_IN: Mapping[str, str] = {
    "torch.DistributedDataParallel": "conformance.adapters.torch_ddp:DataParallelAdapter",
    "torch.ZeroRedundancyOptimizer": "conformance.adapters.torch_zero:ZeroRedundancyAdapter",
    "torch.FullyShardedDataParallel": "conformance.adapters.torch_fsdp1:FullyShardedAdapter",
    "torch.fully_shard": "conformance.adapters.torch_fsdp2:FullyShardAdapter",
    "fsdp.fully_shard": "conformance.adapters.fsdp_composable:FullyShardAdapter",
    "fsdp.FullyShardedDataParallel": "conformance.adapters.fsdp_wrapper:FullyShardedAdapter",
}


def adapter_class(name: str) -> type[Adapter]:
    """The adapter class called `name`.

    Raises:
        UsageError: no such adapter, or what the name leads to is none.
    """
    target = BUILT_IN.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        raise unknown("adapter", name, BUILT_IN)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"adapter {name!r}: cannot import {module_name}: {error}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise unknown(f"class in {module_name}", class_name, vars(module))
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise UsageError(f"adapter {name!r}: {class_name} is not a subclass of Adapter")
    return found


def make_adapter(name: str, variant: str = "default") -> tuple[Adapter, Mapping[str, object]]:
    """An adapter set up for one variant, with that variant's options.

    Raises:
        UsageError: unknown adapter or variant, or a claim that is no capability.
    """
    cls = adapter_class(name)
    if variant not in cls.variants:
        raise unknown(f"variant of {name}", variant, cls.variants)
    options = cls.variants[variant]
    adapter = cls()
    adapter.configure(options)
    for claim in sorted(adapter.capabilities - set(CAPABILITIES)):
        raise unknown(f"capability (claimed by {name})", claim, CAPABILITIES)
    return adapter, options
