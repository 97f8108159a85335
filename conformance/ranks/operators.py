"""Read one call of a `c10d` or `_c10d_functional` operator: what it is, on which group, how much.

Knows operator schemas. Must not know recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Call", "parse"]


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
_NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
_ROOT_ARGUMENTS = ("root_rank", "src", "dst")
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused")


@dataclass(frozen=True, kw_only=True)
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


def parse(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """The collectives that one operator call issues: none, one, or a batch of sends and receives."""
    name = func._schema.name.partition("::")[2]
    if name in _NOT_COLLECTIVES:
        return []
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
    given.update(kwargs)
    group = _process_group(given)
    if group is None:
        return []
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


def _call(
    kind: _Kind, group: dist.ProcessGroup, payload: Any, reduce_op: str | None, root: int | None
) -> Call:
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = _flatten(payload)
    times = len(ranks) if kind.per_rank else 1
    name = _group_name(group)
    root = None if root is None or root < 0 else ranks[root] if root < len(ranks) else root
    return Call(
        op=kind.op,
        group=name,
        group_ranks=ranks,
        stream=_stream(kind.op, name, group, root),
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
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[no-any-return]
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)  # type: ignore[attr-defined, no-any-return]
    return group if isinstance(group, dist.ProcessGroup) else None


def _group_name(group: dist.ProcessGroup) -> str:
    """A name that all members agree on: the description where there is one."""
    description = group.group_desc
    if description == "default_pg":
        return "default"
    if description and description != "undefined":
        return description.removeprefix("mesh_")
    return group.group_name


def _stream(op: str, name: str, group: dist.ProcessGroup, peer: int | None) -> str:
    """Key of the sequence in which a collective takes part; see `CollectiveRecord.stream`."""
    base = f"{name}#{group.group_name}"
    if op not in {"send", "recv"}:
        return base
    here = dist.get_rank()
    if peer is None:
        return f"{base}:*>{here}"
    return f"{base}:{here}>{peer}" if op == "send" else f"{base}:{peer}>{here}"


def _reduce_op(given: Mapping[str, Any]) -> str | None:
    value = given.get("reduce_op")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject):
        value = value.op()  # type: ignore[operator]
    return _REDUCE_OPS[value] if 0 <= value < len(_REDUCE_OPS) else str(value)


def _first_tensor_argument(given: Mapping[str, Any]) -> str | None:
    return next((name for name, value in given.items() if _flatten(value)), None)

