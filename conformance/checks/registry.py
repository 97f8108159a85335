"""What a check is, and the register of all checks in the order in which ties are reported.

Ids are ``area.noun`` and are never renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from conformance.case import Case
from conformance.checks.evidence import Evidence, Ledger
from conformance.models import ModelCase

Judge: TypeAlias = Callable[[Evidence, Ledger], None]
Applies: TypeAlias = Callable[[Case, ModelCase], bool]

TRAINING = frozenset({"train", "unused", "varying"})
OBSERVED = TRAINING | {"eval_first", "sequence"}
"""Scenarios in which everything is observed after every step."""

RECIPES = frozenset({"scaled", "averaged", "materialised"})
"""Scenarios in which losses and parameters are observed and little else."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One requirement as a pure function of a history and the oracle's.

    Attributes:
        id: ``area.noun``.
        profile: the profile that it belongs to.
        sentence: what it requires, in one line.
        scenarios: scenarios whose histories it can judge.
        needs: capabilities that it is about; without the claim the check is UNSUPPORTED.
        any_of: capabilities of which it judges those that are claimed; without any, UNSUPPORTED.
        applies: whether it says anything about a case.
        judge: writes its comparisons into a ledger; raises `NotObserved` when the history ends.
            ``None``: judged from how the ranks fared, not from what they recorded.
    """

    id: str
    profile: str
    sentence: str
    scenarios: frozenset[str]
    needs: frozenset[str]
    applies: Applies
    judge: Judge | None
    any_of: frozenset[str] = frozenset()

    def judges(self, case: Case, model: ModelCase) -> bool:
        """Whether it says anything about `case`.

        A drawn sequence is a training, whatever else is done in it: what judges that judges it. No
        run plans one, so releases of checks say nothing of it.
        """
        among = {case.scenario, "train"} if case.scenario == "sequence" else {case.scenario}
        return bool(among & self.scenarios) and self.applies(case, model)


_REGISTER: dict[str, Check] = {}


def always(case: Case, model: ModelCase) -> bool:
    """Applies to every case of its scenarios."""
    return True


def check(
    id: str,
    *,
    profile: str,
    scenarios: frozenset[str] = TRAINING,
    needs: frozenset[str] = frozenset(),
    any_of: frozenset[str] = frozenset(),
    applies: Applies = always,
) -> Callable[[Judge], Judge]:
    """Register a function as the check called `id`; its docstring's first line is the sentence."""

    def register(judge: Judge) -> Judge:
        sentence = (judge.__doc__ or "").strip().splitlines()[0]
        _REGISTER[id] = Check(
            id=id,
            profile=profile,
            sentence=sentence,
            scenarios=scenarios,
            needs=needs,
            any_of=any_of,
            applies=applies,
            judge=judge,
        )
        return judge

    return register


_REGISTER["run.completed"] = Check(
    id="run.completed",
    profile="core",
    sentence="Every rank runs the scenario to its end and reports.",
    scenarios=frozenset(),
    needs=frozenset(),
    applies=always,
    judge=None,
)


def registered() -> Mapping[str, Check]:
    """All registered checks, in the order of registration."""
    return _REGISTER
