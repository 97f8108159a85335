"""Steps and evaluations during which only the live bytes are observed: a pass of its own.

What is left when a wrapped model is dropped comes last, on pairs of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.adapter import Wrapped
from conformance.per_rank import each
from conformance.scenarios.deletion import lives
from conformance.scenarios.live_bytes import Meter, metering
from conformance.scenarios.run import Run

STEPS = 5


def memory(run: Run) -> None:
    """Five steps, each followed by an evaluation; live bytes after each part.

    Until the last step is over nothing else is recorded: a history keeps the tensors that it is
    given.
    """
    with metering(run.device) as meter:
        with run.phase("build"):
            w = run.build()
        watch = MemoryWatch(run=run, meter=meter)
        for step in range(STEPS):
            with run.phase(f"step {step}"):
                watch.train_step(w, step)
        with run.phase("end"):
            run.observe_state(w, step=STEPS - 1)
        del w, watch
        lives(run, meter)


@dataclass(kw_only=True)
class MemoryWatch:
    """Reads the meter at the same places of every step.

    Attributes:
        run: the run.
        meter: reads live bytes.
    """

    run: Run
    meter: Meter
    _usual: dict[str, int] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)

    def train_step(self, w: Wrapped, step: int) -> None:
        """One step and one evaluation."""
        run, self._step = self.run, step
        w.observe = self.at
        run.mark(f"step {step}")
        result = run.adapter.step(w, run.micro_batches(step), run.model.loss)
        for micro, loss in enumerate(result.losses):
            run.writer.write("loss", each(loss, float), step=step, micro=micro)
        del result, loss
        self.at("step")
        run.mark(f"step {step}/eval")
        run.adapter.evaluate(w, run.batch(99, 0), run.model.loss)
        self.at("eval")

    def at(self, place: str, index: int = 0) -> None:
        """Read after the first "forward", "backward", the "step" and the "eval"."""
        if place not in ("forward", "backward", "step", "eval") or index:
            return
        live = self.meter.read(self._usual.get(place))
        self._usual[place] = live
        self.run.writer.write("live_bytes", live, step=self._step, place=place)
