"""What saved states hold, piece by piece: of the model, and of the optimizer by parameter name.

What is right is what the wrapper itself held when it saved, read through the side doors: whether
that is what training should have given is for other checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from conformance.case import Case
from conformance.causes import Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.boxes import box, compare_coverage, compare_piece, hold_count
from conformance.checks.evidence import Evidence, Ledger
from conformance.checks.names import one_sided
from conformance.checks.optimizer import compare_options, is_value
from conformance.checks.registry import check
from conformance.checks.saving import SAVED, held_when_saved
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.models import ModelCase
from conformance.report.words import number
from conformance.scenarios.states import Piece, named_pieces

CHECKPOINT = frozenset({"checkpoint"})


def in_pieces(case: Case, model: ModelCase) -> bool:
    """A state in memory of which each rank has a part."""
    return case.option("kind") in ("sharded", "local")


def by_name(case: Case, model: ModelCase) -> bool:
    """A state in memory whose keys are parameter names."""
    return case.option("kind") in ("full", "sharded")


@check("state_dict.pieces", profile="checkpoint", scenarios=CHECKPOINT, applies=in_pieces)
def state_dict_pieces(evidence: Evidence, ledger: Ledger) -> None:
    """In a model state that is cut among ranks, the pieces are all of it, each at its place."""
    if evidence.case.option("kind") == "local":
        _compare_elements(evidence, ledger)
        return
    for rank in range(evidence.world):
        for seen in evidence.expected("model_state_pieces", rank):
            held = held_when_saved(evidence, rank)
            for key, piece in named_pieces(evidence.history.get(rank, seen.what)):
                if key in held:  # `state_dict.keys` looks at the others
                    compare_piece(ledger, seen, rank, key, piece, as_tensor(held[key]))
    held = evidence.history.get(0, "parameters", **SAVED)
    compare_coverage(evidence, ledger, "model_state_pieces", held)


def _compare_elements(evidence: Evidence, ledger: Ledger) -> None:
    """All ranks' local states together hold each parameter's elements once per replica."""
    if evidence.world == evidence.replicas:
        return  # nothing is cut
    parts = anatomy(evidence.model)
    due = evidence.replicas * sum(parts.numel(name) for name in parts.distinct)
    seen = evidence.expected("model_state_elements")[0]
    ranks = range(evidence.world)
    counts = [int(evidence.history.get(rank, "model_state_elements")) for rank in ranks]
    hold_count(ledger, seen.moment, sum(counts), due, "the local model states of all ranks")


@check("optim_state.keys", profile="checkpoint", scenarios=CHECKPOINT, applies=by_name)
def optim_state_keys(evidence: Evidence, ledger: Ledger) -> None:
    """The optimizer state has the state of each parameter that has any, under its name."""
    for rank, seen, due in _optimizer_states(evidence, ledger):
        got = evidence.history.get(rank, "optim_state_layout")
        firsts = anatomy(evidence.model).firsts
        found = {_first(key, firsts) for key in got}
        for key in [*sorted(got), *sorted(due.keys() - found)]:
            if _first(key, firsts) in due and key in got:
                ledger.comparisons += 1
                continue
            cause, text = one_sided(key, got, due, remedy="")
            ledger.hold(
                False,
                moment=seen.moment,
                cause=cause,
                sentence=f"{key} in the optimizer state of rank {rank}: {text}",
                rank=rank,
                fqn=key,
            )


def _first(key: str, firsts: Mapping[str, str]) -> str:
    """``name/key`` with the first name of a tied parameter; an unknown name as it is."""
    name, slash, rest = key.partition("/")
    return f"{firsts.get(name, name)}{slash}{rest}"


def _optimizer_states(
    evidence: Evidence, ledger: Ledger
) -> Iterator[tuple[int, Observation, Mapping[str, Any]]]:
    """(rank, the oracle's observation, what the wrapper's optimizer held when it was saved).

    Nothing of a rank that was to get none, nor of a state in a form of the wrapper's own.
    """
    alone = evidence.case.option("kind") == "full" and evidence.case.option("options") == "explicit"
    firsts = anatomy(evidence.model).firsts
    for rank in range(evidence.world):
        for seen in evidence.expected("optim_state_layout", rank):
            if not evidence.history.get(rank, "optim_state_known"):
                ledger.comparisons += 1
                ledger.notes.append(f"rank {rank} has an optimizer state of another form")
                continue
            if alone and rank:
                got = evidence.history.get(rank, "optim_state_layout")
                ledger.hold(
                    not got,
                    moment=seen.moment,
                    cause=Cause.UNEXPECTED_KEY,
                    sentence=f"rank {rank} was given {number(len(got), 'entry')} of a full"
                    " optimizer state that was asked for on rank 0 only",
                    rank=rank,
                )
                continue
            held = evidence.history.get(rank, "optimizer_state", **SAVED)
            yield rank, seen, {_first(key, firsts): value for key, value in held.items()}


@check("optim_state.values", profile="checkpoint", scenarios=CHECKPOINT, applies=by_name)
def optim_state_values(evidence: Evidence, ledger: Ledger) -> None:
    """What the optimizer state holds, whole or in pieces, is what the optimizer held."""
    firsts = anatomy(evidence.model).firsts
    judged: Mapping[str, Any] = {}
    for rank, seen, due in _optimizer_states(evidence, ledger):
        judged = due
        for key, piece in named_pieces(evidence.history.get(rank, "optim_state_pieces")):
            first = _first(key, firsts)
            if first not in due:
                continue  # `optim_state.keys` looks at those
            whole = as_tensor(due[first])
            others = partial(_other_states, due, first, piece) if is_value(first) else list
            compare_piece(ledger, seen, rank, first, piece, whole, others)
    if judged:
        compare_coverage(evidence, ledger, "optim_state_pieces", judged)


def _other_states(due: Mapping[str, Any], key: str, piece: Piece) -> list[Suspect]:
    """What stands at the place of a piece in each other state of one shape."""
    found: list[Suspect] = []
    for other, value in due.items():
        whole = as_tensor(value)
        if other != key and is_value(other) and whole.shape == as_tensor(due[key]).shape:
            there = box(whole, piece.offsets, piece.values.shape)
            found += [] if there is None else [(Cause.PERMUTED, there)]
    return found


@check("optim_state.options", profile="checkpoint", scenarios=CHECKPOINT, applies=by_name)
def optim_state_options(evidence: Evidence, ledger: Ledger) -> None:
    """The optimizer state has the options of the parameter groups as they were."""
    for rank, seen, _ in _optimizer_states(evidence, ledger):
        groups = evidence.history.get(rank, "optim_state_options")
        held = evidence.history.get(rank, "hyperparameters", **SAVED)
        compare_options(
            ledger, seen.moment, groups, held, f"of the optimizer state of rank {rank}", rank=rank
        )
