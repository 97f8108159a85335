"""What must be equal on all members of a group for the n-th collective to be the same one.

Shapes may differ where only the payload counts, and sizes where a collective allows it. Knows
records only.
"""

from __future__ import annotations

from conformance.ranks.records import CollectiveRecord

__all__ = ["difference", "signature"]

_UNEVEN = frozenset({"all_to_all"})
_POINT_TO_POINT = frozenset({"send", "recv"})
_FIELDS = ("op", "dtype", "numel", "reduce_op", "root")


def signature(record: CollectiveRecord) -> tuple[object, ...]:
    """The comparable part of a record, as (op, dtype, numel, reduce_op, root)."""
    if record.op == "barrier":
        return ("barrier", None, None, None, None)
    if record.op in _POINT_TO_POINT:
        return ("send/recv", record.dtype, record.numel, None, None)
    numel = None if record.op in _UNEVEN else record.numel
    return (record.op, record.dtype, numel, record.reduce_op, record.root)


def difference(first: CollectiveRecord, second: CollectiveRecord) -> str | None:
    """Name of the first field in which two records cannot be the same collective, else None."""
    pairs = zip(_FIELDS, signature(first), signature(second), strict=True)
    return next((name for name, one, other in pairs if one != other), None)
