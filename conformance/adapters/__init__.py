"""Adapters by name: the built-in ones, and others as ``package.module:Class``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType

from conformance.adapter import Adapter
from conformance.adapters.declared import blaming, check_declarations, declared_variants
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
        UsageError: no such adapter, or what the name leads to is none that could build.
    """
    target = BUILT_IN.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        raise _unnamed_class(name)
    module = _imported(name, module_name)
    found = getattr(module, class_name, None)
    if found is None or not (isinstance(found, type) and issubclass(found, Adapter)):
        there = adapters_in(module)
        if not there:
            raise UsageError(
                f"adapter {name!r}: {module_name} holds no subclass of conformance.Adapter that"
                " defines build()"
            )
        if found is None:
            raise UsageError(f"adapter {name!r}: {unknown('adapter class', class_name, there)}")
        raise UsageError(
            f"adapter {name!r}: {class_name} is not a subclass of conformance.Adapter;"
            f" {module_name} has {', '.join(there)}"
        )
    if found.build is Adapter.build:
        raise UsageError(
            f"adapter {name!r}: {class_name} does not define build(self, model, make_optimizer,"
            " config), which wraps the model and returns a conformance.Wrapped"
        )
    return found


def adapters_in(module: ModuleType) -> list[str]:
    """Names of the classes of `module` that could be judged, sorted."""
    return sorted(
        name
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, Adapter)
        and found.build is not Adapter.build
    )


def _imported(name: str, module: str) -> ModuleType:
    """The module of the adapter called `name`; what it raises is its author's to read."""
    try:
        with blaming(name, f"importing {module}", but=ImportError):
            return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"adapter {name!r}: cannot import {module}: {error}") from error


def _unnamed_class(name: str) -> UsageError:
    """The error for a name without a class: a misspelt built-in one, or that of a module."""
    package, _, last = name.rpartition(".")
    found = [module for module in (name, package) if module and _is_module(module)]
    for module in found:
        there = adapters_in(_imported(name, module))
        meant = [last] if last in there else there
        if meant:
            shown = " or ".join(f"{module}:{each}" for each in meant)
            return UsageError(f"no adapter {name!r}; did you mean {shown}?")
    none = f"; the module {name} holds none" if name in found else ""
    return UsageError(
        f"{unknown('adapter', name, BUILT_IN)} (your own: package.module:Class{none})"
    )


def _is_module(name: str) -> bool:
    """Whether a module of this name can be found; of a package's parents, those are imported."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def make_adapter(name: str, variant: str = "default") -> tuple[Adapter, Mapping[str, object]]:
    """An adapter set up for one variant, with that variant's options.

    Raises:
        UsageError: unknown adapter or variant, an adapter that cannot be set up, or one that says
            of itself what cannot be, such as a claim that is no capability.
    """
    cls = adapter_class(name)
    variants = declared_variants(name, cls)
    if variant not in variants:
        raise unknown(f"variant of {name}", variant, variants)
    options = variants[variant]
    with blaming(name, f"{cls.__name__}()"):
        adapter = cls()
    with blaming(name, f"configure() for variant {variant!r}"):
        adapter.configure(options)
    check_declarations(name, adapter)
    return adapter, options
