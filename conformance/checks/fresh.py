"""Whether forwards see the optimizer's last step, told by all losses of a training together.

In few digits no single loss may tell: one step moves it by less than correct arithmetic does.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, Mismatch, Moment, place
from conformance.checks.registry import check
from conformance.history import History, Observation, as_tensor
from conformance.tolerance import FACTOR

HALFWAY = 0.5
"""Of the way from the losses of new weights to those of old ones: beyond it these are nearer."""

Move = tuple[int, Observation, float]
"""A rank, its loss in the oracle, and how much further off the weights of before would put it."""


@check("losses.fresh", profile="precision")
def losses_fresh(evidence: Evidence, ledger: Ledger) -> None:
    """All losses together are nearer to those of the last step's weights than to older ones'."""
    moves, oracle = [*_moves(evidence)], evidence.oracle
    for rank, seen, _ in moves:
        evidence.history.get(rank, "loss", **seen.where)  # the step was really run
    noise = max(
        abs(_way_back(moves, run) or 0.0)
        for run in (oracle.double, oracle.reversed, oracle.nudged)
        if run is not None
    )
    way = _way_back(moves, evidence.history)
    if way is None or FACTOR * noise >= HALFWAY:
        ledger.powerless = "the losses of older weights cannot be told from those of new ones"
        return
    ledger.comparisons += len(moves)
    ledger.error, ledger.bound = max(way, 0.0), HALFWAY
    if not way <= HALFWAY:  # nor is NaN
        rank, seen, moment = next(_nearer_to_older(moves, evidence.history))
        cause = Cause.STALE if way < 1 + HALFWAY else Cause.UNEXPLAINED
        ledger.mismatches.append(
            Mismatch(
                moment=moment,
                cause=cause,
                sentence=f"from the loss at {place(seen.where, rank)} on, losses are {way:.2g} of"
                f" the way from the oracle's to those of older weights: {MEANING[cause]}",
                error=way,
                bound=HALFWAY,
                where={**seen.where, "rank": rank},
            )
        )


def _moves(evidence: Evidence) -> Iterator[Move]:
    reference = evidence.oracle.reference
    for rank in range(evidence.world):
        for seen in evidence.expected("loss", rank):
            older = reference.find(rank, "stale_loss", seen.where)
            if older is not None:
                yield rank, seen, float(as_tensor(older.value)) - float(as_tensor(seen.value))


def _off(move: Move, history: History) -> float:
    rank, seen, _ = move
    return float(as_tensor(history.get(rank, "loss", **seen.where))) - float(as_tensor(seen.value))


def _way_back(moves: list[Move], history: History) -> float | None:
    """How far losses are on their way to those of older weights: 0 for new ones, 1 for older ones.

    By least squares, so that a loss that the weights move much counts for more. ``None`` if they
    move none.
    """
    square = sum(move**2 for _, _, move in moves)
    return sum(_off(m, history) * m[2] for m in moves) / square if square > 0 else None


def _nearer_to_older(
    moves: list[Move], history: History
) -> Iterator[tuple[int, Observation, Moment]]:
    """The losses that are nearer to those of older weights, the earliest first."""
    for move in sorted(moves, key=lambda m: m[1].moment):
        rank, seen, by = move
        if not _off(move, history) * by <= HALFWAY * by**2:
            yield rank, seen, seen.moment
