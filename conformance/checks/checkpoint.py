"""States that are saved and loaded, and the training that goes on from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence, Ledger, compare_trees, place
from conformance.checks.loaded import (
    one_sided_state,
    other_states,
    other_values,
    other_values_again,
    when_saved,
)
from conformance.checks.names import key_text, one_sided
from conformance.checks.optimizer import compare_steps, is_value
from conformance.checks.registry import check
from conformance.checks.rows import misplaced_rows
from conformance.checks.saving import SAVED, held_when_saved
from conformance.checks.training import parameter_suspects
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.models import ModelCase
from conformance.report.words import number
from conformance.scenarios.checkpoint import STEPS_BEFORE
from conformance.scenarios.resume import RESUME

CHECKPOINT = frozenset({"checkpoint"})
LOADED = CHECKPOINT | {RESUME}
"""Scenarios that load and train on, in the same job or in another one."""


def full_or_sharded(case: Case, model: ModelCase) -> bool:
    """A state in memory whose keys are parameter names."""
    return case.option("kind") in ("full", "sharded")


def full(case: Case, model: ModelCase) -> bool:
    """A full state in memory."""
    return case.option("kind") == "full"


@check("state_dict.keys", profile="checkpoint", scenarios=CHECKPOINT, applies=full_or_sharded)
def state_dict_keys(evidence: Evidence, ledger: Ledger) -> None:
    """The model state has exactly the keys of the bare module's."""
    for rank, seen, got in _layouts(evidence):
        if not seen.value:
            continue  # this rank was to get none: `state_dict.tensors` looks at that
        # a renamed key is both: it is told by what stands there, not by what does not
        for key in [*sorted(got), *sorted(seen.value.keys() - got.keys())]:
            if key in got and key in seen.value:
                ledger.comparisons += 1
                continue
            cause, text = one_sided(key, got, seen.value, remedy="")
            ledger.hold(
                False,
                moment=seen.moment,
                cause=cause,
                sentence=f"{key} in the model state of rank {rank}: {text}",
                rank=rank,
                fqn=key,
            )


@check("state_dict.tensors", profile="checkpoint", scenarios=CHECKPOINT, applies=full_or_sharded)
def state_dict_tensors(evidence: Evidence, ledger: Ledger) -> None:
    """Entries of the model state have the right shape, dtype and device, on the right ranks."""
    firsts = first_ranks(evidence)
    for rank, seen, got in _layouts(evidence):
        ledger.hold(
            not got or bool(seen.value) or rank in firsts,
            moment=seen.moment,
            cause=Cause.UNEXPECTED_KEY,
            sentence=f"rank {rank} was given {number(len(got), 'entry')} of a full state that was"
            " asked for on rank 0 only",
            rank=rank,
        )
        for key in sorted(got.keys() & seen.value.keys()):
            for facet, cause in _FACETS.items():
                value, expected = got[key][facet], seen.value[key][facet]
                ledger.hold(
                    value == expected or value is None,  # a rank without a shard has no device
                    moment=seen.moment,
                    cause=cause,
                    sentence=f"{facet} of {key} in the model state of rank {rank} is {value},"
                    f" expected {expected}: {MEANING[cause]}",
                    rank=rank,
                    fqn=key,
                    got=value,
                    expected=expected,
                )


_FACETS: Mapping[str, Cause] = {
    "shape": Cause.WRONG_SHAPE,
    "dtype": Cause.WRONG_DTYPE,
    "device": Cause.WRONG_DEVICE,
}


def _layouts(evidence: Evidence) -> Iterator[tuple[int, Observation, Mapping[str, Any]]]:
    """(rank, what the oracle's model state looks like, what the wrapper's does)."""
    for rank in range(evidence.world):
        for seen in evidence.expected("model_state_layout", rank):
            yield rank, seen, evidence.history.get(rank, "model_state_layout")


@check("state_dict.bare_load", profile="checkpoint", scenarios=CHECKPOINT, applies=full)
def state_dict_bare_load(evidence: Evidence, ledger: Ledger) -> None:
    """The full model state loads strictly into the bare module, bit for bit."""
    for rank in range(evidence.world):
        for seen in evidence.expected("bare", rank):
            got = evidence.history.get(rank, "bare")
            held = held_when_saved(evidence, rank)
            for key, expected in seen.value.items():
                if key not in got or key not in held:
                    ledger.hold(
                        False,
                        moment=seen.moment,
                        cause=Cause.MISSING_KEY,
                        sentence=f"{key} did not reach the bare module of rank {rank}:"
                        f" {key_text(Cause.MISSING_KEY, key, held if key in got else got)}",
                        rank=rank,
                        fqn=key,
                    )
                    continue
                bound = evidence.oracle.bound(rank, "bare", {}, key)
                for reference, limit in ((held[key], 0.0), (expected, bound)):
                    ledger.number(
                        got[key],
                        reference,
                        limit,
                        name=f"{key} in the bare module of rank {rank}",
                        moment=seen.moment,
                        suspects=partial(other_values, evidence, rank, key),
                        rank=rank,
                        fqn=key,
                    )


@check("resume.model", profile="checkpoint", scenarios=LOADED)
def resume_model(evidence: Evidence, ledger: Ledger) -> None:
    """After the load parameters and buffers are those that were saved, bit for bit."""
    saved_keys = anatomy(evidence.model).saved
    for rank in range(evidence.world):
        for what in ("parameters", "buffers"):
            for seen in evidence.expected(f"loaded_{what}", rank):
                got = evidence.history.get(rank, seen.what, **seen.where)
                owners = saving_ranks(evidence, rank) if what == "buffers" else [rank]
                source = evidence.saver if what == "buffers" else evidence.history
                name, where = when_saved(what, seen.where)
                saved = [source.get(owner, name, **where) for owner in owners]
                trees = [{k: v for k, v in t.items() if k in saved_keys} for t in (got, *saved)]
                _compare_loaded(evidence, ledger, seen, trees[0], trees[1:], rank)


def first_ranks(evidence: Evidence) -> range:
    """Ranks that may have a state that is for rank 0 only: the first of each replica."""
    return range(0, evidence.world, max(evidence.world // evidence.replicas, 1))


def saving_ranks(evidence: Evidence, rank: int) -> list[int]:
    """Ranks whose buffers `rank` may find after the load.

    Buffers differ between ranks. A state that only rank 0 has brings rank 0's, or that of the first
    rank of a replica its own; into a directory one rank, no matter which, writes what is not
    sharded. A full state goes into another job as rank 0 had it.
    """
    case = evidence.case
    if case.option("kind") == "save":
        return sorted(range(evidence.saver.world), key=lambda other: other != rank)
    if case.scenario == RESUME:
        return [0]
    if not full(case, evidence.model) or case.option("options") != "explicit":
        return [rank]
    return [0, rank] if rank in first_ranks(evidence) else [0]


def _compare_loaded(
    evidence: Evidence,
    ledger: Ledger,
    seen: Observation,
    got: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    rank: int,
) -> None:
    for key in sorted({*got, *saved[0]}):
        if key not in got or key not in saved[0]:
            cause, text = one_sided(key, got, saved[0])
            sentence = f"{key} after the load, rank {rank}: {text}"
            ledger.hold(
                False, moment=seen.moment, cause=cause, sentence=sentence, rank=rank, fqn=key
            )
            continue
        value = as_tensor(got[key])
        candidates = [as_tensor(tree[key]) for tree in saved]
        equal = [c for c in candidates if c.shape == value.shape and bool((c == value).all())]
        first_time = dict(seen.where) == SAVED
        others = partial(other_values if first_time else other_values_again, evidence, rank, key)
        due = (equal or candidates)[0]
        ledger.number(
            value,
            due,
            0.0,
            name=f"{key} after the load, rank {rank},",
            moment=seen.moment,
            suspects=partial(_or_misplaced, others, due, evidence),
            rank=rank,
            fqn=key,
        )


def _or_misplaced(
    others: Callable[[], list[Suspect]], due: Tensor, evidence: Evidence
) -> list[Suspect]:
    return [*others(), *misplaced_rows(due, evidence.shards)]


@check("resume.options", profile="checkpoint", scenarios=LOADED)
def resume_options(evidence: Evidence, ledger: Ledger) -> None:
    """After the load step counts and hyper-parameters are those of the saved optimizer."""
    compare_steps(evidence, ledger, prefix="loaded_")


@check("resume.optimizer", profile="checkpoint", scenarios=LOADED)
def resume_optimizer(evidence: Evidence, ledger: Ledger) -> None:
    """After the load the optimizer's state is the saved one, and so are the steps that follow."""
    for rank in range(evidence.world):
        for seen in evidence.expected("loaded_optimizer_state", rank):
            got = _values(evidence.history.get(rank, seen.what, **seen.where))
            name, where = when_saved("optimizer_state", seen.where)
            saved = _values(evidence.history.get(rank, name, **where))
            ledger.hold(
                bool(got) or not saved,
                moment=seen.moment,
                cause=Cause.NOT_LOADED,
                sentence=f"the optimizer of rank {rank} has no state after the load:"
                f" {MEANING[Cause.NOT_LOADED]}",
                rank=rank,
            )
            if got:
                _compare_optimizer(evidence, ledger, seen, got, saved, rank)
    _compare_steps_after(evidence, ledger)


def _values(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: as_tensor(value) for key, value in state.items() if is_value(key)}


def _compare_optimizer(
    evidence: Evidence,
    ledger: Ledger,
    seen: Observation,
    got: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    rank: int,
) -> None:
    for key in sorted({*got, *saved}):
        if key not in got or key not in saved:
            cause, text = one_sided_state(evidence.model, key, got, saved)
            sentence = f"optimizer state {key} after the load, rank {rank}: {text}"
            ledger.hold(
                False, moment=seen.moment, cause=cause, sentence=sentence, rank=rank, fqn=key
            )
            continue
        ledger.number(
            got[key],
            saved[key],
            0.0,
            name=f"optimizer state {key} after the load, rank {rank},",
            moment=seen.moment,
            suspects=partial(other_states, evidence, saved, rank, seen, key),
            rank=rank,
            fqn=key,
        )


def _compare_steps_after(evidence: Evidence, ledger: Ledger) -> None:
    """Losses and parameters of the steps after the load are the oracle's."""
    for rank in range(evidence.world):
        for seen in evidence.expected("loss", rank):
            if seen.where["step"] < STEPS_BEFORE:
                continue
            ledger.number(
                evidence.history.get(rank, "loss", **seen.where),
                seen.value,
                evidence.oracle.bound(rank, "loss", dict(seen.where)),
                name=f"loss after the load at {place(seen.where, rank)}",
                moment=seen.moment,
                rank=rank,
                **seen.where,
            )
    compare_trees(
        evidence,
        ledger,
        "parameters",
        noun="parameter after the load",
        only=lambda where: where["step"] >= STEPS_BEFORE,
        suspects=parameter_suspects(evidence),
    )
