"""A piece of a saved tensor beside what stands at its place, and all pieces beside the whole.

Knows boxes, tensors and the ledger. Must not know kinds of states or of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, Moment
from conformance.checks.optimizer import STEP, compare_count
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.report.words import number
from conformance.scenarios.states import Piece, named_pieces


def hold_count(ledger: Ledger, moment: Moment, got: int, due: int, what: str, **where: Any) -> None:
    """`what` is as many elements as are due; the number alone says little else."""
    cause = Cause.COUNTED_TWICE if got == 2 * due else Cause.WRONG_SHAPE
    ledger.hold(
        got == due,
        moment=moment,
        cause=cause,
        sentence=f"{what} hold {number(got, 'element')}, expected {due}: {MEANING[cause]}",
        got=got,
        expected=due,
        **where,
    )


def compare_coverage(
    evidence: Evidence, ledger: Ledger, what: str, held: Mapping[str, Any]
) -> None:
    """The pieces of all ranks hold as many elements as the whole; replicas count once."""
    moment = evidence.expected(what)[0].moment
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for rank in range(evidence.world):
        for key, piece in named_pieces(evidence.history.get(rank, what)):
            boxes.setdefault(key, set()).add((piece.offsets, tuple(piece.values.shape)))
    for key in sorted(boxes.keys() & held.keys()):
        got = sum(prod(shape) for _, shape in boxes[key])
        due = as_tensor(held[key]).numel()
        hold_count(ledger, moment, got, due, f"the pieces of {key} on all ranks", fqn=key)


def compare_piece(  # noqa: PLR0913 - one comparison, all of it
    ledger: Ledger,
    seen: Observation,
    rank: int,
    key: str,
    piece: Piece,
    whole: Tensor,
    others: Callable[[], list[Suspect]] = list,
) -> None:
    """`piece` is what `whole` has at its place, in value and in dtype."""
    name = f"{key} at {list(piece.offsets)} in the saved state of rank {rank}"
    where: dict[str, Any] = {"rank": rank, "fqn": key, "offsets": list(piece.offsets)}
    expected = box(whole, piece.offsets, piece.values.shape)
    counted = piece.values.dim() == 0  # numbers may be kept in any form
    kinds = [str(t.dtype).removeprefix("torch.") for t in (piece.values, whole)]
    ledger.hold(
        counted or piece.values.dtype == whole.dtype,
        moment=seen.moment,
        cause=Cause.WRONG_DTYPE,
        sentence=f"{name} is {kinds[0]}, expected {kinds[1]}: {MEANING[Cause.WRONG_DTYPE]}",
        got=kinds[0],
        expected=kinds[1],
        **where,
    )
    if expected is None:
        ledger.hold(
            False,
            moment=seen.moment,
            cause=Cause.WRONG_SHAPE,
            sentence=f"{name} has shape {list(piece.values.shape)}, which reaches out of"
            f" {list(whole.shape)}: {MEANING[Cause.WRONG_SHAPE]}",
            **where,
        )
    elif key.endswith(STEP):
        compare_count(ledger, seen, name, piece.values, expected, where)
    else:
        ledger.number(
            piece.values,
            expected,
            0.0,
            name=name,
            moment=seen.moment,
            suspects=lambda: [*others(), *_elsewhere(whole, piece)],
            **where,
        )


def box(whole: Tensor, offsets: tuple[int, ...], shape: Iterable[int]) -> Tensor | None:
    """Elements of `whole` from `offsets` on; ``None`` if they reach out of it."""
    sizes = tuple(shape)
    if len(offsets) != whole.dim() or len(sizes) != whole.dim():
        return None
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if start < 0 or start + size > whole.shape[dim]:
            return None
        whole = whole.narrow(dim, start, size)
    return whole


def _elsewhere(whole: Tensor, piece: Piece) -> list[Suspect]:
    """What stands one row off, and in the boxes of other ranks."""
    shape = piece.values.shape
    found: list[Suspect] = []
    if not piece.offsets or not shape[0]:
        return found
    start, *rest = piece.offsets
    for shift in (1, -1):
        indices = (torch.arange(shape[0]) + start + shift) % whole.shape[0]
        moved = box(whole.index_select(0, indices), (0, *rest), shape)
        if moved is not None:
            found.append((Cause.OFF_BY_ONE_SHARD, moved))
    for first in range(0, whole.shape[0], shape[0]):
        of_other = box(whole, (first, *rest), shape)
        if first != start and of_other is not None:
            found.append((Cause.OTHER_RANK, of_other))
    return found
