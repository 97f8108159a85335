"""A unit that is frozen while the first forward runs, trains later, and is frozen once more."""

from __future__ import annotations

from conformance.scenarios.run import Run

TRAINS = (False, True, False, True)
"""Whether the first unit trains, step by step."""


def unfrozen(run: Run) -> None:
    """Four steps, with the first unit frozen in the first and the third."""
    unit = next(
        path
        for path, module in run.model.build().named_modules()
        if isinstance(module, run.model.units)
    )
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    for step, trains in enumerate(TRAINS):
        with run.phase(f"step {step}"):
            run.adapter.set_trainable(w, unit, trains=trains)
            run.adapter.zero_grad(w)  # as a loop does that begins another stage of its schedule
            run.train_step(w, step)
