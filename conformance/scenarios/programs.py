"""The scenarios: SPMD programs that every rank, and the oracle, runs with a model.

Few programs, many checks: start-up and training are the cost. Risky phases are programs of their
own, so that one exception does not blind unrelated checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conformance.adapter import ignore
from conformance.gather import held
from conformance.scenarios.checkpoint import checkpoint
from conformance.scenarios.memory import memory
from conformance.scenarios.recipes import averaged, materialised, scaled
from conformance.scenarios.repeated import repeated
from conformance.scenarios.resume import RESUME, resume, resumed
from conformance.scenarios.run import UNFROZEN, Clip, Run
from conformance.scenarios.sequence import SEQUENCE, sequence
from conformance.scenarios.unfrozen import unfrozen
from conformance.scenarios.witness import witness

EVAL_BEFORE_STEP = 4
CLIPS: tuple[Clip | None, ...] = (
    None,
    Clip(max_norm=0.1, norm_type=2.0),
    Clip(max_norm=0.02, norm_type=math.inf),
    Clip(max_norm=1.0, norm_type=1.0),
    Clip(max_norm=1e3, norm_type=2.0),  # far above any norm: it must change nothing
    Clip(max_norm=0.1, norm_type=2.0),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A program with its name.

    Attributes:
        name: as in case ids.
        program: runs it.
        why: what happens in it, for whoever reads a finding.
        needs: capabilities without which it is not run.
        second: the part that a second job runs, in fresh processes; ``None`` if there is none.
    """

    name: str
    program: Callable[[Run], None]
    why: str
    needs: frozenset[str] = frozenset()
    second: Callable[[Run], None] | None = None


def train(run: Run) -> None:
    """Six steps, with clipping that bites and one that must not, and an evaluation in between."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    for step, clip in enumerate(CLIPS):
        if step == EVAL_BEFORE_STEP:
            with run.phase("eval"):
                run.evaluate(w, 0)
        with run.phase(f"step {step}"):
            run.train_step(w, step, clip if clip and run.claims(clip.capability) else None)
            if step == 0:
                run.observe_stored(w, step)


def eval_first(run: Run) -> None:
    """An evaluation before anything else, perhaps in inference mode, then three steps."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    with run.phase("eval"):
        run.evaluate(w, 0, inference=run.case.option("mode") == "inference")
    for step in range(3):
        with run.phase(f"step {step}"):
            run.train_step(w, step)


def eval_in_step(run: Run) -> None:
    """Three steps; in the first two the model is asked once more before the optimizer steps.

    Without gradients, then with: a forward whose backward never comes, as for a metric.
    """
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)

    # nothing more is observed: a side door might make the wrapper look at its shards again
    def evaluate() -> None:
        run.mark("eval")
        run.adapter.evaluate(w, run.batch(99, 0), run.model.loss)

    def measure() -> None:
        run.mark("metric")
        run.adapter.forward(w, run.batch(99, 1), run.model.loss)

    for step, asked in enumerate((evaluate, measure, None)):
        run.before_optimizer = asked
        with run.phase(f"step {step}"):
            run.train_step(w, step)


def two_forwards(run: Run) -> None:
    """Two forward passes, then two backward passes, then a step; twice."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    for step in range(2):
        with run.phase(f"step {step}"):
            run.train_on_two(w, step)
            run.observe_parameters(w, step=step)


def dropped_gradients(run: Run) -> None:
    """A step, then gradients that are given up half way, then two steps.

    One backward reduces, one under ``no_sync`` does not; the gradients of both are dropped, as a
    training loop does after a loss that is not finite.
    """
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    with run.phase("step 0"):
        run.train_step(w, 0)
    with run.phase("drop"):
        run.mark("drop")
        w.observe = ignore  # the observer of the step before
        run.adapter.backward(w, run.adapter.forward(w, run.batch(98, 0), run.model.loss))
        with run.side_door():
            run.writer.write("gradients_dropped", held(run.asked("full_gradients", w)))
        with run.adapter.no_sync(w):
            run.adapter.backward(w, run.adapter.forward(w, run.batch(98, 1), run.model.loss))
        run.observe_unreduced(w)
        run.adapter.zero_grad(w)
    for step in (1, 2):
        with run.phase(f"step {step}"):
            run.train_step(w, step)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="train", program=train, why="training steps with one evaluation between them"
        ),
        Scenario(
            name="unused",
            program=train,
            why="training with parameters that take no part in any forward",
            needs=frozenset({"unused_parameters"}),
        ),
        Scenario(
            name="varying",
            program=train,
            why="training with parameters that take part now and then",
            needs=frozenset({"unused_parameters", "unused_parameters.varying"}),
        ),
        Scenario(
            name="checkpoint",
            program=checkpoint,
            why="two steps, a save, a load into a fresh pair, two more steps",
        ),
        Scenario(
            name=RESUME,
            program=resume,
            second=resumed,
            why="two steps, a save, a load in a fresh job of that many or other ranks, two steps",
        ),
        Scenario(
            name="two_forwards",
            program=two_forwards,
            why="two forwards, then their two backwards, then a step",
            needs=frozenset({"two_forwards", "gradients"}),
        ),
        Scenario(
            name="dropped_gradients",
            program=dropped_gradients,
            why="a step, gradients of two backwards dropped without a step, two more steps",
            needs=frozenset({"no_sync", "no_sync.dropped", "gradients"}),
        ),
        Scenario(
            name="eval_first",
            program=eval_first,
            why="an evaluation before any training, then steps",
        ),
        Scenario(
            name="eval_in_step",
            program=eval_in_step,
            why="before the optimizer steps an evaluation, in the next step a forward that has"
            " gradients and no backward, as for a metric",
            # who claims them says when they are there, which is when to evaluate
            needs=frozenset({"gradients"}),
        ),
        Scenario(
            name="witness",
            program=witness,
            why="training whose modules look at their parameters and count their hooks",
        ),
        Scenario(
            name="scaled",
            program=scaled,
            why="steps with a loss scaler: one with an infinite loss on one rank, one with"
            " infinite gradients in one row",
            needs=frozenset({"scaler"}),
        ),
        Scenario(
            name=UNFROZEN,
            program=unfrozen,
            why="steps between which parameters are frozen and unfrozen",
            needs=frozenset({"unused_parameters", "unused_parameters.varying", "gradients"}),
        ),
        Scenario(
            name="repeated", program=repeated, why="the same training twice, on one set of ranks"
        ),
        Scenario(
            name="averaged",
            program=averaged,
            why="steps with a running average of the weights, which is then written back",
        ),
        Scenario(
            name="materialised",
            program=materialised,
            why="a full state loaded into a model that was wrapped on the meta device, then steps",
            needs=frozenset({"meta", "model_state.full"}),
        ),
        Scenario(
            name="memory",
            program=memory,
            why="steps and evaluations with live bytes read, then the model is dropped",
        ),
        Scenario(
            name=SEQUENCE,
            program=sequence,
            why="acts in the order of the case's letters (fsdp-conformance list letters)",
        ),
    )
}
