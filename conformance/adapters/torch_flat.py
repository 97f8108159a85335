"""What lies where in the flat parameters of PyTorch's wrapper, read from their metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from conformance.adapter import clean_fqn
from conformance.adapters.flat import Entry, local_shard


def entries(root: nn.Module) -> list[Entry]:
    """Every original parameter of every flat parameter under `root`, in module order."""
    return list(_found(root))


def _found(root: nn.Module) -> Iterator[Entry]:
    for path, module in root.named_modules():
        handle = getattr(module, "_handle", None)
        if isinstance(module, FullyShardedDataParallel) and handle is not None:
            yield from _of_handle(handle, clean_fqn(f"{path}." if path else ""))


def _of_handle(handle: Any, prefix: str) -> Iterator[Entry]:
    flat = handle.flat_param
    cut = handle.uses_sharded_strategy
    length = local_shard(flat).numel()
    begin = dist.get_rank(handle.process_group) * length if cut else 0
    tied: dict[str, list[str]] = {}
    for shared in flat._shared_param_infos:
        primary = _name(shared.prim_module_name, shared.prim_param_name)
        tied.setdefault(primary, []).append(_name(shared.module_name, shared.param_name))
    start = index = 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            low, high = max(start, begin), min(start + numel, begin + length)
            fqn = flat._fqns[index]
            yield Entry(
                fqns=tuple(clean_fqn(prefix + name) for name in (fqn, *tied.get(fqn, ()))),
                shape=tuple(flat._shapes[index]),
                stride=None if flat._contiguities[index] else tuple(flat._strides[index]),
                first=max(low - start, 0),
                count=max(high - low, 0),
                offset=low - begin if high > low else 0,
                flat=flat,
                original=None if flat._params is None else flat._params[index],
                group=handle.process_group if cut else None,
            )
            index += 1
        start += numel


def _name(module_name: str, parameter_name: str) -> str:
    return f"{module_name}.{parameter_name}" if module_name else parameter_name
