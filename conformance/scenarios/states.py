"""What saved states look like: keys, shapes, dtypes, devices, and the pieces that a rank holds.

Knows tensors, DTensors and sharded tensors by what they offer, and the two forms of an optimizer's
state dict: by parameter name, or by the optimizer's own numbering. No wrapper and no adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import clean_fqn, named_parameters, to_cpu
from conformance.history import flatten

PLAIN = (bool, int, float, str, type(None), tuple, list)
"""Types of the options of a parameter group that a history can hold."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one tensor.

    Attributes:
        offsets: index of its first element in the whole tensor.
        values: its elements.
    """

    offsets: tuple[int, ...]
    values: Tensor


def layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """Key to global shape, dtype and device type of each entry of a state."""
    return {
        key: {
            "shape": list(value.size()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": device_type(value),
        }
        for key, value in state.items()
        if hasattr(value, "size")
    }


def device_type(value: Any) -> str | None:
    """Device type of a tensor, a DTensor or a sharded tensor; ``None`` without a local shard."""
    shards = getattr(value, "local_shards", None)
    if shards is not None:
        return ",".join(sorted({shard.tensor.device.type for shard in shards()})) or None
    return torch.device(value.device).type


def pieces(value: Any) -> list[Piece]:
    """What this rank holds of a tensor, a DTensor or a sharded tensor; none that is empty."""
    shards = getattr(value, "local_shards", None)
    chunks = getattr(value, "__create_chunk_list__", None)
    if shards is not None:
        found = [(shard.metadata.shard_offsets, shard.tensor) for shard in shards()]
    elif chunks is not None:
        found = [(chunk.offsets, value.to_local()) for chunk in chunks()]
    else:
        found = [((0,) * value.dim(), value)]
    return [
        Piece(offsets=tuple(int(each) for each in offsets), values=to_cpu(values))
        for offsets, values in found
        if values.numel()
    ]


def content(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """``name@offset,offset`` to the elements of each piece that this rank holds of a state."""
    return {
        f"{key}@{','.join(map(str, piece.offsets))}": piece.values
        for key, value in state.items()
        if hasattr(value, "size")
        for piece in pieces(value)
    }


def named_pieces(recorded: Mapping[str, Tensor]) -> Iterator[tuple[str, Piece]]:
    """(name, piece) of what `content` gave."""
    for place, values in recorded.items():
        name, _, offsets = place.rpartition("@")
        index = tuple(int(each) for each in offsets.split(",") if each)
        yield name, Piece(offsets=index, values=values)


def sharded_elements(state: Mapping[str, Any]) -> int:
    """Elements that this rank holds of entries that are cut among ranks."""
    cut = [v for v in state.values() if hasattr(v, "local_shards") or hasattr(v, "to_local")]
    return sum(piece.values.numel() for value in cut for piece in pieces(value))


@dataclass(frozen=True, kw_only=True)
class OptimizerContent:
    """An optimizer's state dict, whichever form it has.

    Attributes:
        entries: ``name/key`` to value; numbers as 0-dim tensors.
        options: of each parameter group, without its parameters.
        known: whether the state has one of the two forms.
    """

    entries: Mapping[str, Any] = field(default_factory=dict)
    options: Sequence[Mapping[str, Any]] = ()
    known: bool = True


def numbering(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """FQN of each parameter in the order in which `optimizer` numbers them."""
    names: dict[int, str] = {}
    for fqn, parameter in named_parameters(module):
        names.setdefault(id(parameter), fqn)
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def optimizer_content(state: Mapping[str, Any], numbered: Sequence[str]) -> OptimizerContent:
    """What `state` holds by parameter name.

    Args:
        state: an optimizer's state dict, or nothing on a rank that was to get none.
        numbered: names of the parameters, where the state goes by number.
    """
    if not state:
        return OptimizerContent()
    per_parameter = state.get("state")
    if not isinstance(per_parameter, Mapping) or not all(
        isinstance(key, str) or (isinstance(key, int) and key < len(numbered))
        for key in per_parameter
    ):
        return OptimizerContent(known=False)
    # names stay as they are saved: that they are those of the bare module is for a check to say
    entries = flatten(
        {numbered[k] if isinstance(k, int) else k: v for k, v in per_parameter.items()}
    )
    return OptimizerContent(
        entries={k: _as_entry(v) for k, v in entries.items() if v is not None},
        options=[
            {k: v for k, v in group.items() if k != "params" and isinstance(v, PLAIN)}
            for group in state.get("param_groups", ())
        ],
    )


def _as_entry(value: Any) -> Any:
    number = isinstance(value, (bool, int, float))
    return torch.tensor(float(value), dtype=torch.float64) if number else value


def first_names(module: nn.Module) -> dict[str, str]:
    """Each name of each parameter to the first name of the same parameter."""
    firsts: dict[int, str] = {}
    return {
        clean_fqn(name): firsts.setdefault(id(parameter), clean_fqn(name))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
