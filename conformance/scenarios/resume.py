"""Save; another job, of another number of ranks, loads into a pair that differs, and trains on.

Options of the case: ``kind`` is save (a directory) or full (rank 0's full state in a file, which
every rank of the second job reads); ``ranks`` says how many ranks that job has, see `RANKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.case import Case
from conformance.errors import unknown
from conformance.optimizers import with_other_hyperparameters
from conformance.scenarios.checkpoint import (
    STEPS_BEFORE,
    UNTIL_SAVE,
    remember_rates,
    train_on,
    train_until_save,
)
from conformance.scenarios.run import Run

RESUME = "resume"
"""Name of the scenario."""

KINDS = ("full", "save")

RANKS: Mapping[str, Callable[[int], int]] = {
    "double": lambda world: 2 * world,
    "half": lambda world: max(1, world // 2),
}
"""Ranks of the second job, by those of the first; half of one rank is one."""


def second_world(case: Case, world: int) -> int | None:
    """Ranks of the second job of a case whose first has `world`; ``None`` if there is none.

    Raises:
        UsageError: the case has another way of saving or number of ranks than there are.
    """
    if case.scenario != RESUME:
        return None
    for option, known in (("kind", KINDS), ("ranks", RANKS)):
        if case.option(option) not in known:
            raise unknown(f"{option}=", case.option(option), known, where=f"in {case}")
    return RANKS[case.option("ranks")](world)


def resume(run: Run) -> None:
    """The first job: two steps, save."""
    w = run.shared(UNTIL_SAVE, train_until_save)
    with run.phase("save"):
        if run.case.option("kind") == "save":
            run.adapter.save(w, run.scratch / "checkpoint")
        else:
            model = run.asked("model_state", w, "full")
            run.carrier.put((model, run.asked("optim_state", w, "full")))


def resumed(run: Run) -> None:
    """The second job: build anew, load, two more steps."""
    with run.phase("build again"):
        w = run.build(optimizer=with_other_hyperparameters(run.optimizer), perturbed=True)
        remember_rates(w)  # whoever resumes makes the scheduler before the load
    with run.phase("load"):
        if run.case.option("kind") == "save":
            run.adapter.load(w, run.scratch / "checkpoint")
        else:
            model, optimizer = run.carrier.take()
            run.adapter.load_model_state(w, "full", model)
            run.adapter.load_optim_state(w, "full", optimizer)
        run.observe_state(w, step=STEPS_BEFORE - 1, prefix="loaded_")
    train_on(run, w)
