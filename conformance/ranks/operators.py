"""Read one call of a `c10d` or `_c10d_functional` operator: what it is, on which group, how much.

Knows operator schemas. Must not know recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

__all__ = ["NOT_COLLECTIVES", "Call", "parse"]


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How to read an operator: its plain name, the argument with the payload, and its multiple."""

    op: str
    payload: str | None
    per_rank: bool = False
    """The argument holds one rank's piece, so the payload is `group size` times as large."""


_OPERATORS: Mapping[str, _Kind] = {
    "allreduce_": _Kind(op="all_reduce", payload="tensors"),
    "allreduce_coalesced_": _Kind(op="all_reduce", payload="tensors"),
    "all_reduce": _Kind(op="all_reduce", payload="input"),
    "all_reduce_": _Kind(op="all_reduce", payload="input"),
    "all_reduce_coalesced": _Kind(op="all_reduce", payload="inputs"),
    "all_reduce_coalesced_": _Kind(op="all_reduce", payload="inputs"),
    "allgather_": _Kind(op="all_gather", payload="output_tensors"),
    "_allgather_base_": _Kind(op="all_gather", payload="output_tensor"),
    "allgather_coalesced_": _Kind(op="all_gather", payload="output_lists"),
    "allgather_into_tensor_coalesced_": _Kind(op="all_gather", payload="outputs"),
    "all_gather_into_tensor": _Kind(op="all_gather", payload="input", per_rank=True),
    "all_gather_into_tensor_out": _Kind(op="all_gather", payload="input", per_rank=True),
    "all_gather_into_tensor_coalesced": _Kind(op="all_gather", payload="inputs", per_rank=True),
    "reduce_scatter_": _Kind(op="reduce_scatter", payload="input_tensors"),
    "_reduce_scatter_base_": _Kind(op="reduce_scatter", payload="input_tensor"),
    "reduce_scatter_tensor_coalesced_": _Kind(op="reduce_scatter", payload="inputs"),
    "reduce_scatter_tensor": _Kind(op="reduce_scatter", payload="input"),
    "reduce_scatter_tensor_out": _Kind(op="reduce_scatter", payload="input"),
    "reduce_scatter_tensor_coalesced": _Kind(op="reduce_scatter", payload="inputs"),
    "reduce_": _Kind(op="reduce", payload="tensors"),
    "broadcast_": _Kind(op="broadcast", payload="tensors"),
    "broadcast": _Kind(op="broadcast", payload="input"),
    "gather_": _Kind(op="gather", payload="input_tensors", per_rank=True),
    "scatter_": _Kind(op="scatter", payload="output_tensors", per_rank=True),
    "alltoall_base_": _Kind(op="all_to_all", payload="input"),
    "alltoall_": _Kind(op="all_to_all", payload="input_tensors"),
    "all_to_all_single": _Kind(op="all_to_all", payload="input"),
    "barrier": _Kind(op="barrier", payload=None),
    "monitored_barrier_": _Kind(op="barrier", payload=None),
    "send": _Kind(op="send", payload="tensors"),
    "isend": _Kind(op="send", payload="tensor"),
    "recv_": _Kind(op="recv", payload="tensors"),
    "irecv": _Kind(op="recv", payload="tensor"),
    "recv_any_source_": _Kind(op="recv", payload="tensors"),
}
NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
_ROOT_ARGUMENTS = ("root_rank", "src", "dst")
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused")


@dataclass(kw_only=True)
class Call:
    """One collective that is about to be issued; fields as in `CollectiveRecord`."""

    op: str
    group: str
    group_ranks: tuple[int, ...]
    stream: str
    numel: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    bytes: int
    reduce_op: str | None
    root: int | None


def parse(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, first_group: int = 0
) -> list[Call]:
    """The collectives that one operator call issues: none, one, or a batch of sends and receives.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its named arguments.
        first_group: number of the first unnamed group that may be meant; names count from there.
    """
    name, arguments = _named(func)
    if name in NOT_COLLECTIVES:
        return []
    given = dict(zip(arguments, args, strict=False))
    given.update(kwargs)
    process_group = _process_group(given)
    if process_group is None:
        return []
    group = _Group.of(process_group, first_group)
    if name == "batch_p2p_ops":
        batch = zip(given["op_list"], given["peer_list"], given["tensors"], strict=True)
        return [
            _call(_OPERATORS[op if op in _OPERATORS else "i" + op], group, tensor, None, peer)
            for op, peer, tensor in batch
        ]
    kind = _OPERATORS.get(name)
    if kind is None:
        kind = _Kind(op=name.strip("_"), payload=_first_tensor_argument(given))
    payload = given.get(kind.payload) if kind.payload else None
    root = next((given[key] for key in _ROOT_ARGUMENTS if key in given), None)
    return [_call(kind, group, payload, _reduce_op(given), root)]


@cache
def _named(func: Any) -> tuple[str, tuple[str, ...]]:
    """Plain name of an operator and the names of its arguments; each look at a schema is slow."""
    name = func._schema.name.partition("::")[2]
    return name, tuple(argument.name for argument in func._schema.arguments)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """What records need of a process group."""

    name: str
    key: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup, first: int) -> _Group:
        """Read it off; unnamed groups count from `first`, equally in fresh and kept ranks."""
        key = str(group.group_name)
        if key.isdigit() and int(key) >= first > 0:
            key = str(int(key) - first + 1)
        description = group.group_desc
        name = key
        if description == "default_pg":
            name = "default"
        elif description and description != "undefined":
            name = description.removeprefix("mesh_")
        return cls(name=name, key=key, ranks=tuple(dist.get_process_group_ranks(group)))

    def stream(self, op: str, peer: int | None) -> str:
        """Key of the sequence in which a collective takes part; see `CollectiveRecord.stream`."""
        base = self.name if self.name == self.key else f"{self.name}#{self.key}"
        if op not in {"send", "recv"}:
            return base
        here = dist.get_rank()
        if peer is None:
            return f"{base}:*>{here}"
        return f"{base}:{here}>{peer}" if op == "send" else f"{base}:{peer}>{here}"


def _call(
    kind: _Kind, group: _Group, payload: Any, reduce_op: str | None, root: int | None
) -> Call:
    tensors = _flatten(payload)
    times = len(group.ranks) if kind.per_rank else 1
    if root is not None:
        root = group.ranks[root] if 0 <= root < len(group.ranks) else None
    return Call(
        op=kind.op,
        group=group.name,
        group_ranks=group.ranks,
        stream=group.stream(kind.op, root),
        numel=times * sum(tensor.numel() for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtype="+".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
        bytes=times * sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        reduce_op=reduce_op,
        root=root,
    )


def _flatten(payload: Any) -> list[torch.Tensor]:
    if isinstance(payload, torch.Tensor):
        return [payload]
    if isinstance(payload, (list, tuple)):
        return [tensor for item in payload for tensor in _flatten(item)]
    return []


def _process_group(given: Mapping[str, Any]) -> dist.ProcessGroup | None:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    return group if isinstance(group, dist.ProcessGroup) else None


def _reduce_op(given: Mapping[str, Any]) -> str | None:
    value = given.get("reduce_op")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject):
        value = value.op()  # type: ignore[attr-defined]
    return _REDUCE_OPS[value] if 0 <= value < len(_REDUCE_OPS) else str(value)


def _first_tensor_argument(given: Mapping[str, Any]) -> str | None:
    return next((name for name, value in given.items() if _flatten(value)), None)
