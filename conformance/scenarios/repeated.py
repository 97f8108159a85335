"""The same training twice, in the same ranks."""

from __future__ import annotations

from conformance.scenarios.run import Run

STEPS = 2


def repeated(run: Run) -> None:
    """Two steps of a fresh pair; then the same two of another fresh pair."""
    for life in (0, 1):
        with run.phase(f"life {life}"):
            w = run.build()
            for step in range(STEPS):
                result = run.adapter.step(w, run.micro_batches(step), run.model.loss)
                where = {"life": life, "step": step}
                for micro, loss in enumerate(result.losses):
                    run.writer.write("repeated_loss", loss, **where, micro=micro)
                    if not life:  # by which a reader knows that something was trained
                        run.writer.write("loss", loss, step=step, micro=micro)
                run.observe_parameters(w, "repeated_parameters", **where)
