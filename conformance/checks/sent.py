"""What travels in a step, and what has to: rows of the record beside the model's parameters.

Registers no check. Knows the record and the shapes of a model; what is wrong about a difference is
for `conformance.checks.traffic` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from conformance.checks.anatomy import anatomy
from conformance.checks.communication import (
    ALIGNMENT,
    REDUCTIONS,
    Row,
    reduces_gradients,
    rounded_up,
)
from conformance.checks.evidence import Evidence
from conformance.checks.sharding import size_of
from conformance.history import as_tensor
from conformance.models import ModelCase
from conformance.oracle import units_of

GATHERS = frozenset({"all_gather", "broadcast"})
AT_ONCE = 2
"""Micro-batches of a step of two forwards at once, whatever the case says of other steps."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sent in one step, apart from side doors.

    Attributes:
        rank: the rank.
        step: the step.
        micro_batches: that it consists of.
        at_once: whether all their forwards came before the first backward; each backward reduces.
        gathers: floating parameters that it gathered in forward and backward.
        reductions: floating gradients that it reduced there.
        later: what it gathered and reduced once gradients were final.
    """

    rank: int
    step: int
    micro_batches: int
    at_once: bool
    gathers: Sequence[Row]
    reductions: Sequence[Row]
    later: Sequence[Row]

    def whole(self, shards: int) -> int:
        """Elements reduced of which all ranks got the sum that gather each other's parts.

        An all-reduce among replicas is none: of these ranks each has another part. Nor is one of a
        single element, which is bookkeeping, as is what more ranks gather than have parts.
        """
        gathers = [set(row["group_ranks"]) for row in self.gathers if row["op"] == "all_gather"]
        cut = [ranks for ranks in gathers if len(ranks) <= shards]
        return sum(
            int(row["numel"])
            for row in self.reductions
            if row["op"] == "all_reduce"
            and row["numel"] > 1
            and any(len(ranks.intersection(row["group_ranks"])) > 1 for ranks in cut)
        )


def traffic(evidence: Evidence) -> Iterator[Traffic]:
    """Of every rank, and of every step that consists of micro-batches.

    Raises:
        NotObserved: a step was not finished.
    """
    steps = [seen.where["step"] for seen in evidence.expected("gradients")]
    for rank in range(evidence.world):
        rows = [row for row in evidence.history.ranks[rank].collectives if _carries_values(row)]
        for step in steps:
            evidence.history.get(rank, "parameters", step=step)
            both = [row for row in rows if row["phase"] == f"step {step}/both"]
            inside = [row for row in rows if row["phase"].startswith(f"step {step}/micro ")]
            inside += both
            parts = {f"step {step}/{part}" for part in ("clip", "optimizer", "after")}
            yield Traffic(
                rank=rank,
                step=step,
                micro_batches=AT_ONCE if both else evidence.case.accumulation,
                at_once=bool(both),
                gathers=[row for row in inside if row["op"] in GATHERS],
                reductions=[row for row in inside if reduces_gradients(row)],
                later=[row for row in rows if row["phase"] in parts],
            )


def _carries_values(row: Row) -> bool:
    """A judged gather or reduction of floating elements."""
    floating = str(row["dtype"]).startswith(("float", "bfloat"))
    return bool(row["judged"]) and floating and row["op"] in GATHERS | REDUCTIONS


def sent(row: Row) -> float:
    """Bytes that one rank sends for a collective when none is sent in vain."""
    ranks, size = len(row["group_ranks"]), float(row["bytes"])
    if ranks == 1:
        return 0.0
    share = size * (ranks - 1) / ranks
    if row["op"] in ("all_gather", "reduce_scatter"):
        return share
    return 2 * share if row["op"] == "all_reduce" else size


def elements_sent(rows: Iterable[Row]) -> float:
    """The same in elements, whatever their dtype."""
    shares = ((sent(row), float(row["numel"]), float(row["bytes"])) for row in rows)
    return sum(share * numel / size for share, numel, size in shares if size)


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the strategy needs, in elements.

    Attributes:
        names: parameters that travel.
        elements: of them.
        shards: ranks among which they are cut.
        padded: the most that layouts make of `elements`.
        uncut: the most of which every rank may get the sum: of each parameter one number, such as
            whether it has a gradient, or all of it if it is no larger than what padding may be.
    """

    names: frozenset[str]
    elements: int
    shards: int
    padded: int
    uncut: int

    def allowed(self, times: int, collectives: int, *, flags: int = 0) -> int:
        """Most elements that may travel if all do so `times` times, in so many collectives.

        One time more is never padding, unless the parameters are smaller than their padding.

        Args:
            times: passes in which they travel.
            collectives: each of which may pad what it carries.
            flags: numbers beside them that may say of each parameter whether it has a gradient.
        """
        aligned = times * self.padded + ALIGNMENT * self.shards * collectives + flags
        return min(aligned, max(times * self.padded, (times + 1) * self.elements - 1))


def need(evidence: Evidence, names: Iterable[str], shards: int) -> Need:
    """What moving the parameters called `names` once takes."""
    parts, chosen = anatomy(evidence.model), frozenset(names)
    return Need(
        names=chosen,
        elements=sum(parts.numel(name) for name in chosen),
        shards=shards,
        padded=sum(
            max(
                shards * rounded_up(parts.padded(name, shards) // shards),
                rounded_up(parts.numel(name)),
            )
            for name in chosen
        ),
        uncut=sum(n if n <= ALIGNMENT else 1 for n in map(parts.numel, chosen)),
    )


def shards_of(evidence: Evidence) -> int:
    """Ranks among which parameters are cut; one if they are not."""
    claimed = "shard.parameters" in evidence.capabilities
    return max(evidence.world // evidence.replicas, 1) if claimed else 1


def with_gradients(evidence: Evidence, step: int, rank: int | None = None) -> set[str]:
    """Distinct parameters that have a gradient in a step, on one rank or on any."""
    ranks = range(evidence.world) if rank is None else (rank,)
    reference = evidence.oracle.reference
    used = {n for r in ranks for n in reference.get(r, "gradients_of_rank", step=step)}
    return used & set(anatomy(evidence.model).distinct)


@lru_cache(maxsize=64)
def travelling(model: ModelCase) -> frozenset[str]:
    """Distinct parameters whose gradients may be reduced: those of units in which any trains."""
    parts, built = anatomy(model), model.build()
    for parameter in built.parameters():
        parameter.requires_grad_(True)
    paths = units_of(built, model.units)
    unit = dict(zip((name for name, _ in built.named_parameters()), paths, strict=True))
    units = {unit[name] for name in parts.distinct if name not in parts.frozen}
    return frozenset(name for name in parts.distinct if unit[name] in units)


@lru_cache(maxsize=64)
def in_units(model: ModelCase) -> frozenset[str]:
    """Parameters of units; those that the root holds by itself it may keep unsharded."""
    built = model.build()
    inner = [path for path, part in built.named_modules() if path and isinstance(part, model.units)]
    names = anatomy(model).distinct
    return frozenset(n for n in names if any(n.startswith(f"{path}.") for path in inner))


def size_sent(evidence: Evidence, declared: str) -> int:
    """Bytes of an element as it travels: in the declared dtype, or in that of the parameters."""
    if declared != "parameter":
        return size_of(declared)
    values = evidence.oracle.reference.get(0, "parameters", step=-1).values()
    return max(as_tensor(value).element_size() for value in values)
