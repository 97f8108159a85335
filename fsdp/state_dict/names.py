"""What the entries of a unit are called in a state dict. No tensors but those that are compared."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from fsdp.plain_names import clean
from fsdp.wrapper_unit import WrappedUnit


def clean_all(names: list[str]) -> None:
    """Clean ``names`` in place."""
    names[:] = [clean(name) for name in names]


def below(found: MutableMapping[str, Any], prefix: str) -> list[str]:
    """Return the keys that start with ``prefix``, in order."""
    return [key for key in found if key.startswith(prefix)]


def replace_by_prefix(found: MutableMapping[str, Any], old: str, new: str) -> None:
    """Rename the keys that start with ``old`` to start with ``new``, in place.

    They come after all others then, in their order.

    Raises:
        ValueError: ``old`` and ``new`` are the same.
    """
    if old == new:
        raise ValueError(f"the old prefix and the new one are the same: {old!r}")
    for key in below(found, old):
        found[f"{new}{key[len(old) :]}"] = found.pop(key)


def param_names(unit: WrappedUnit) -> list[list[str]]:
    """Return the names of each parameter that ``unit`` shards, below the unit, all aliases."""
    paths = _paths(unit)
    return [
        list(
            dict.fromkeys(
                clean(f"{path}{name}")
                for module, name in param.info.owners()
                for path in paths[module]
            )
        )
        for group in unit._state.groups
        for param in group.shard.plain
    ]


def named_buffers(unit: WrappedUnit) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of ``unit`` with their names below it, all aliases."""
    paths = _paths(unit)
    for module, name in unit._buffers_owned:
        buffer = module._buffers.get(name)
        if buffer is None:
            continue
        for path in paths.get(module, ()):
            yield clean(f"{path}{name}"), buffer


def unit_prefixes(top: WrappedUnit, prefix: str) -> Iterator[tuple[WrappedUnit, str]]:
    """Yield ``top`` and the units below it with the prefix of their entries, shared ones twice."""
    for path, module in top.named_modules(remove_duplicate=False):
        if isinstance(module, WrappedUnit):
            yield module, prefix + clean(f"{path}." if path else "")


def _paths(unit: WrappedUnit) -> dict[nn.Module, list[str]]:
    """Return where the modules below ``unit`` are, with a dot at the end unless at the top."""
    found: dict[nn.Module, list[str]] = {}
    for path, module in unit._fsdp_wrapped_module.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(f"{path}." if path else "")
    return found
