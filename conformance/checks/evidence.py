"""What a check judges, and the ledger in which it writes what it found.

A check is a pure function of an `Evidence`; it may be run again on a stored history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from conformance.adapter import Conventions
from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.names import one_sided
from conformance.explain import Suspect, explain, wrong_rows
from conformance.frames import first_line, user_place
from conformance.history import History, NotObserved, Observation, Phase, as_tensor
from conformance.models import ModelCase
from conformance.tolerance import Oracle, distance

Moment = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything recorded about one case.

    Attributes:
        case: what was run.
        model: its model case.
        history: what the wrapper's ranks recorded.
        oracle: what should have been recorded, with its noise.
        conventions: the adapter's.
        capabilities: claimed by the adapter.
        replicas: how many ranks hold the same shard.
        first: history of the first job alone, in a case of two jobs; `history` is both then.
    """

    case: Case
    model: ModelCase
    history: History
    oracle: Oracle
    conventions: Conventions
    capabilities: frozenset[str]
    replicas: int = 1
    first: History | None = None

    @property
    def saver(self) -> History:
        """Of the job that saves."""
        return self.history if self.first is None else self.first

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.history.world

    @property
    def shards(self) -> int:
        """Number of ranks among which one replica is cut."""
        return max(self.world // self.replicas, 1)

    def world_at(self, moment: Moment) -> int:
        """Number of ranks of the job in which something was observed."""
        second = self.history.jobs[-1]
        return self.world if self.first is None or moment[0] >= second else self.first.world

    def expected(self, what: str, rank: int = 0) -> list[Observation]:
        """The oracle's observations called `what`, in time order."""
        return self.oracle.reference.every(what, rank)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """One comparison that failed."""

    moment: Moment
    cause: Cause
    sentence: str
    error: float | None = None
    bound: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Ledger:
    """Comparisons made by one check on one case.

    Attributes:
        comparisons: how many there were; a check without any has judged nothing.
        error: error of the comparison that came closest to its bound, or passed it furthest.
        bound: its bound.
        mismatches: those that failed.
        notes: what a reader of a PASS should know.
        powerless: why nothing was compared, if a comparison could not have told right from wrong.
    """

    comparisons: int = 0
    error: float | None = None
    bound: float | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    powerless: str = ""

    def first(self) -> Mismatch | None:
        """The earliest mismatch; at one moment the one furthest beyond its bound."""
        return min(
            self.mismatches,
            key=lambda m: (m.moment, -_excess(m.error, m.bound)),
            default=None,
        )

    def hold(
        self,
        held: bool,  # noqa: FBT001 - reads like an assertion
        *,
        moment: Moment,
        cause: Cause,
        sentence: str,
        **where: Any,
    ) -> None:
        """Record a comparison that is true or false."""
        self.comparisons += 1
        if not held:
            self.mismatches.append(
                Mismatch(moment=moment, cause=cause, sentence=sentence, where=where)
            )

    def number(  # noqa: PLR0913 - two values, and by name what is said of them
        self,
        got: Any,
        expected: Any,
        bound: float | Callable[[], float],
        *,
        name: str,
        moment: Moment,
        suspects: Callable[[], list[Suspect]] = list,
        note: Callable[[], str] = str,
        **where: Any,
    ) -> None:
        """Record the comparison of two tensors (or numbers) of one shape against a bound.

        What `note` returns ends the sentence of a mismatch. A bound that is a function is called
        only where it makes a difference: most values come out alike to the last bit.
        """
        self.comparisons += 1
        a, b = as_tensor(got), as_tensor(expected)
        if a.shape != b.shape:
            sentence = f"{name} has shape {tuple(a.shape)}, expected {tuple(b.shape)}"
            self.mismatches.append(
                Mismatch(moment=moment, cause=Cause.WRONG_SHAPE, sentence=sentence, where=where)
            )
            return
        error = distance(a, b)
        if error == 0.0 and self.error is not None:
            return
        bound = bound() if callable(bound) else bound
        if self.error is None or _excess(error, bound) > _excess(self.error, self.bound):
            self.error, self.bound = error, bound
        if error > bound:
            cause = explain(a, b, bound, suspects())
            self.mismatches.append(
                Mismatch(
                    moment=moment,
                    cause=cause,
                    sentence=f"{name} {_amount(a, b, error, bound)}: {MEANING[cause]}{note()}",
                    error=error,
                    bound=bound,
                    where={**where, **_worst(a, b)},
                )
            )


def _excess(error: float | None, bound: float | None) -> float:
    if error is None or bound is None:
        return float("inf")
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0 else float("inf")


def _worst(got: Tensor, expected: Tensor) -> dict[str, Any]:
    if not got.numel():
        return {}
    gap = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf")).flatten()
    flat = int(gap.argmax())
    index: list[int] = []
    rest = flat
    for size in reversed(got.shape):
        rest, remainder = divmod(rest, size)
        index.insert(0, remainder)
    return {
        "index": index,
        "got": float(got.flatten()[flat]),
        "expected": float(expected.flatten()[flat]),
    }


def _amount(got: Tensor, expected: Tensor, error: float, bound: float) -> str:
    worst = _worst(got, expected)
    at = str(worst["index"]).replace(" ", "") if worst["index"] else ""
    return (
        f"{at} is {worst['got']:.6g}, expected {worst['expected']:.6g}"
        f" (error {error:.2g}, bound {bound:.2g}{_rows(got, expected, bound)})"
    ).lstrip()


def _rows(got: Tensor, expected: Tensor, bound: float) -> str:
    """Which rows are wrong, where that tells more than the worst element."""
    rows = wrong_rows(got, expected, bound)
    if rows is None:
        return ""
    of = f"rows {rows.start}..{rows.stop - 1} of {len(expected)}"
    return f"; shape {tuple(expected.shape)}: {of} differ, the others are right"


def place(where: Mapping[str, Any], rank: int) -> str:
    """Where something was observed, in words: ``step 3, rank 1``."""
    parts = [f"{key} {value}" for key, value in where.items() if key not in ("p", "max_norm")]
    return ", ".join([*parts, f"rank {rank}"])


OF_GRADIENTS = frozenset({"gradients", "clipped"})


def observed(evidence: Evidence, what: str) -> Iterator[tuple[int, Observation, Any]]:
    """(rank, the oracle's observation, the wrapper's value) of everything called `what`.

    Nothing where the wrapper does not claim that its gradients can be read.

    Raises:
        NotObserved: the wrapper's history lacks an observation that the oracle made.
    """
    if what in OF_GRADIENTS and "gradients" not in evidence.capabilities:
        return
    for rank in range(evidence.world):
        for seen in evidence.expected(what, rank):
            yield rank, seen, evidence.history.get(rank, what, **seen.where)


Suspects: TypeAlias = Callable[[int, Observation, str], list[Suspect]]
"""(rank, the oracle's observation, key) to what known defects would have produced."""


def change(before: Tensor, after: Tensor) -> Tensor:
    """By what a value has changed; `after` itself if the two are of different shapes.

    That is no change, and a comparison with one says which shape is wrong.
    """
    return after - before if before.shape == after.shape else after


def compare_trees(  # noqa: PLR0913 - the options of one loop, all by name
    evidence: Evidence,
    ledger: Ledger,
    what: str,
    *,
    noun: str,
    only: Callable[[Mapping[str, Any]], bool] = lambda where: True,
    keys: Callable[[str], bool] = lambda key: True,
    suspects: Suspects = lambda rank, seen, key: [],
    got_as: str | None = None,
) -> None:
    """Compare every observation `what` of every rank, key by key, with the oracle's.

    ``None`` (no gradient) must meet ``None``; a missing or additional key is a mismatch.

    Args:
        evidence: both histories.
        ledger: where comparisons are recorded.
        what: name of the observation, whose value is a flat tree.
        noun: what a sentence calls one entry, such as "gradient of".
        only: which observations, by their coordinates.
        keys: which entries.
        suspects: what known defects would have produced, to name the cause.
        got_as: name of the wrapper's observation, where it is another one.

    Raises:
        NotObserved: the wrapper's history lacks an observation that the oracle made.
    """
    for rank in range(evidence.world):
        for seen in evidence.expected(what, rank):
            if not only(seen.where):
                continue
            got = evidence.history.get(rank, got_as or what, **seen.where)
            moment = seen.moment
            if got_as is not None:  # an error is as old as what the wrapper did
                own = evidence.oracle.reference.find(rank, got_as, seen.where)
                moment = seen.moment if own is None else own.moment
            seen = replace(seen, moment=moment)
            at = place(seen.where, rank)
            pair = _Pair(evidence=evidence, rank=rank, seen=seen, got=got, at=at)
            for key in filter(keys, sorted({*got, *seen.value})):
                pair.compare(ledger, key, noun, suspects)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """One observation of one rank beside the oracle's; `at` says where it was made, in words."""

    evidence: Evidence
    rank: int
    seen: Observation
    got: Mapping[str, Any]
    at: str

    def compare(self, ledger: Ledger, key: str, noun: str, suspects: Suspects) -> None:
        """Compare the entries called `key`."""
        name = f"{noun} {key} at {self.at}"
        where = {**self.seen.where, "rank": self.rank, "fqn": key}
        wrong = self._presence(key)
        if wrong is not None:
            cause, text = wrong
            sentence = f"{name}: {text}"
            ledger.hold(False, moment=self.seen.moment, cause=cause, sentence=sentence, **where)
        elif self.got[key] is None:
            ledger.comparisons += 1
        else:
            ledger.number(
                self.got[key],
                self.seen.value[key],
                lambda: self.evidence.oracle.bound(
                    self.rank, self.seen.what, dict(self.seen.where), key
                ),
                name=name,
                moment=self.seen.moment,
                suspects=lambda: suspects(self.rank, self.seen, key),
                **where,
            )

    def _presence(self, key: str) -> tuple[Cause, str] | None:
        """What is wrong about an entry being there or not, and in words; ``None`` if nothing is."""
        due = self.seen.value
        if key not in self.got or key not in due:
            return one_sided(key, self.got, due)
        if (self.got[key] is None) == (due[key] is None):
            return None
        cause = Cause.MISSING_GRADIENT if self.got[key] is None else Cause.UNEXPECTED_GRADIENT
        text = MEANING[cause]
        if self._stays(key):
            return Cause.STALE, f"{text}: the one of the step before"
        return cause, text

    def _stays(self, key: str) -> bool:
        """Whether an entry is, bit for bit, the one of the step before, and not zero."""
        before = {**self.seen.where, "step": int(self.seen.where.get("step", 0)) - 1}
        earlier = self.evidence.history.find(self.rank, self.seen.what, before)
        now, then = self.got[key], None if earlier is None else earlier.value.get(key)
        if not isinstance(now, Tensor) or not isinstance(then, Tensor):
            return False
        return bool(now.any()) and now.shape == then.shape and bool((now == then).all())


def blocked_by(evidence: Evidence, missing: NotObserved) -> tuple[bool, str]:
    """Why an observation is missing: (whether its own phase failed, the sentence for it)."""
    failed = evidence.history.failed_phase()
    if failed is None:
        return False, f"{missing}"
    rank, phase = failed
    due = evidence.oracle.reference.find(0, missing.what, missing.where)
    # the first phase of a job builds: nothing was seen of what it was to be judged by
    own = due is not None and due.moment[0] == phase.ordinal not in evidence.history.jobs
    return own, raised(rank, phase)


def raised(rank: int, phase: Phase) -> str:
    """The sentence for a phase that raised, with the line of the wrapper that did."""
    place = user_place(phase.traceback)
    at = f" ({place})" if place else ""
    return f"phase {phase.name!r} raised on rank {rank}{at}: {first_line(phase.error)}"
