"""States that are saved and loaded, and the training that goes on from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, compare_trees, place
from conformance.checks.names import key_text, one_sided
from conformance.checks.optimizer import compare_steps, is_value
from conformance.checks.recut import recut_suspects
from conformance.checks.registry import check
from conformance.checks.saving import SAVED, held_when_saved
from conformance.checks.training import parameter_suspects
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.models import ModelCase
from conformance.scenarios.checkpoint import STEPS_BEFORE
from conformance.scenarios.resume import RESUME
from conformance.scenarios.run import PERTURBATION

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
            sentence=f"rank {rank} was given {len(got)} entries of a full state that was asked for"
            " on rank 0 only",
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


def other_values(evidence: Evidence, rank: int, key: str) -> list[Suspect]:
    """What else may come out of a load: nothing loaded, another moment's value, another rank's."""
    history, found = evidence.history, []
    for what in ("parameters", "buffers"):
        start = evidence.oracle.reference.find(rank, what, {"step": -1})
        if start is not None and key in start.value:
            fresh = as_tensor(start.value[key])
            fresh = fresh + PERTURBATION if fresh.is_floating_point() else fresh
            found.append((Cause.NOT_LOADED, fresh))
    for what, cause in (
        ("kept_parameters", Cause.ALIASED),
        ("kept_buffers", Cause.ALIASED),
        ("parameters", Cause.STALE),
    ):
        step = STEPS_BEFORE if cause is Cause.ALIASED else -1
        seen = history.find(rank, what, {"step": step})
        if seen is not None and key in seen.value:
            found.append((cause, as_tensor(seen.value[key])))
    for other in range(evidence.saver.world):
        seen = evidence.saver.find(other, "buffers", SAVED)
        if other != rank and seen is not None and key in seen.value:
            found.append((Cause.OTHER_RANK, as_tensor(seen.value[key])))
    return found


@check("resume.model", profile="checkpoint", scenarios=LOADED)
def resume_model(evidence: Evidence, ledger: Ledger) -> None:
    """After the load parameters and buffers are those that were saved, bit for bit."""
    saveable = evidence.model.build().state_dict().keys()  # without non-persistent buffers
    for rank in range(evidence.world):
        for what in ("parameters", "buffers"):
            for seen in evidence.expected(f"loaded_{what}", rank):
                got = evidence.history.get(rank, seen.what, **seen.where)
                owners = saving_ranks(evidence, rank) if what == "buffers" else [rank]
                source = evidence.saver if what == "buffers" else evidence.history
                saved = [source.get(owner, what, **SAVED) for owner in owners]
                trees = [{k: v for k, v in t.items() if k in saveable} for t in (got, *saved)]
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
        ledger.number(
            value,
            (equal or candidates)[0],
            0.0,
            name=f"{key} after the load, rank {rank},",
            moment=seen.moment,
            suspects=partial(other_values, evidence, rank, key),
            rank=rank,
            fqn=key,
        )


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
            saved = _values(evidence.history.get(rank, "optimizer_state", **SAVED))
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
            cause, text = one_sided(key, got, saved)
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
            suspects=partial(_other_states, evidence, saved, key),
            rank=rank,
            fqn=key,
        )


def _other_states(evidence: Evidence, saved: Mapping[str, Tensor], key: str) -> list[Suspect]:
    """The other states of one shape; after growing or shrinking, what another cut would give."""
    found: list[Suspect] = [
        (Cause.PERMUTED, value)
        for other, value in saved.items()
        if other != key and value.shape == saved[key].shape
    ]
    if evidence.first is not None:
        before, after = (max(w // evidence.replicas, 1) for w in _worlds(evidence))
        found += recut_suspects(saved[key], before, after)
    return found


def _worlds(evidence: Evidence) -> tuple[int, int]:
    """Ranks that saved, and ranks that loaded."""
    return evidence.saver.world, evidence.world


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
