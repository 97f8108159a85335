"""Adapters by name: the built-in ones, and others as ``package.module:Class``.

Importing this package must stay cheap, so that a misspelt name is told at once: what an adapter is
is imported when a name leads to one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from conformance.errors import UsageError, unknown
from conformance.near import near_matches, offer

if TYPE_CHECKING:
    from conformance.adapter import Adapter

BUILT_IN: Mapping[str, str] = {
    "torch.DistributedDataParallel": "conformance.adapters.torch_ddp:DataParallelAdapter",
    "torch.ZeroRedundancyOptimizer": "conformance.adapters.torch_zero:ZeroRedundancyAdapter",
    "torch.FullyShardedDataParallel": "conformance.adapters.torch_fsdp1:FullyShardedAdapter",
    "torch.fully_shard": "conformance.adapters.torch_fsdp2:FullyShardAdapter",
    "fsdp.fully_shard": "conformance.adapters.fsdp_composable:FullyShardAdapter",
    "fsdp.FullyShardedDataParallel": "conformance.adapters.fsdp_wrapper:FullyShardedAdapter",
}


def place_of(name: str) -> tuple[str, str]:
    """(module, class) of the adapter called `name`, which is not imported.

    Raises:
        UsageError: no such adapter, or nothing of the name of its module or of the package that
            this is in.
    """
    module, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not colon:
        raise _unnamed_class(name)
    top = module.partition(".")[0]
    if not _is_module(top):
        here = offer(near_matches(top, (found.name for found in iter_modules([""]))))
        raise UsageError(
            f"adapter {name!r}: cannot import {module}: there is no {top!r} in this folder, nor"
            f" where else Python looks{'; ' if here else ''}{here}"
        )
    return module, class_name


def adapter_class(name: str) -> type[Adapter]:
    """The adapter class called `name`.

    Raises:
        UsageError: no such adapter, or what the name leads to is none that could build.
    """
    from conformance.adapter import Adapter

    module_name, class_name = place_of(name)
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
    from conformance.adapter import Adapter

    return sorted(
        name
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, Adapter)
        and found.build is not Adapter.build
    )


def _imported(name: str, module: str) -> ModuleType:
    """The module of the adapter called `name`; what it raises is its author's to read."""
    from conformance.adapters.declared import blaming

    try:
        with blaming(name, f"importing {module}", but=ImportError):
            return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"adapter {name!r}: cannot import {module}: {error}") from error


def _unnamed_class(name: str) -> UsageError:
    """The error for a name without a class: a misspelt built-in one, or that of a module."""
    package, _, last = name.rpartition(".")
    # in the packages of the built-in ones lies nobody's own adapter
    ours = {built_in.partition(".")[0] for built_in in BUILT_IN}
    named = () if name.partition(".")[0] in ours else (name, package)
    found = [module for module in named if module and _is_module(module)]
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
    from conformance.adapters.declared import blaming, check_declarations, declared_variants

    cls = adapter_class(name)
    variants = declared_variants(name, cls)
    if variant not in variants:
        raise unknown("variant", variant, variants, where=f"of {name}")
    options = variants[variant]
    with blaming(name, f"{cls.__name__}()"):
        adapter = cls()
    with blaming(name, f"configure() for variant {variant!r}"):
        adapter.configure(options)
    check_declarations(name, adapter)
    return adapter, options
