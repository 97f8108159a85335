"""Any sequence of what training loops do, spelled by one letter each: ``sequence/acts=seqs``.

The acts are those of the other scenarios, in an order that nobody chose for what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conformance.adapter import Wrapped, ignore
from conformance.scenarios.run import Clip, Run

SEQUENCE = "sequence"
"""Name of the scenario; no plan has a case of it, only who draws one."""
CLIP = Clip(max_norm=0.1, norm_type=2.0)


@dataclass(kw_only=True)
class Course:
    """How far a sequence is.

    Attributes:
        run: the run.
        w: what is trained.
        step: optimizer steps so far.
        asked: batches so far that nothing was learnt from.
        observed: evaluations so far whose results were written.
    """

    run: Run
    w: Wrapped
    step: int = 0
    asked: int = 0
    observed: int = 0

    def train(self, clip: Clip | None = None) -> None:
        """An optimizer step, of as many micro-batches as the option accumulation says."""
        with self.run.phase(f"step {self.step}"):
            self.run.train_step(self.w, self.step, clip)
            self.run.observe_stored(self.w, self.step)
        self.run.before_optimizer = None
        self.step += 1

    def clip(self) -> None:
        """An optimizer step with clipping, if that is claimed."""
        self.train(CLIP if self.run.claims(CLIP.capability) else None)

    def evaluate(self) -> None:
        """An evaluation, and what it leaves."""
        with self.run.phase(f"eval {self.observed}"):
            # a forward since the last step may have changed them
            buffers = self.run.asked("buffers", self.w)
            self.run.writer.write("buffers_before_eval", buffers, index=self.observed)
            self.run.evaluate(self.w, self.observed, batch=self._batch())
        self.observed += 1

    def interrupt(self) -> None:
        """The next step has an evaluation between its backward and its optimizer's step."""
        batch = self._batch()

        def evaluate() -> None:
            self.run.mark("eval")
            self.run.adapter.evaluate(self.w, self.run.batch(*batch), self.run.model.loss)

        self.run.before_optimizer = evaluate

    def measure(self) -> None:
        """A forward with gradients whose backward never comes."""
        with self.run.phase(f"metric {self.asked}"):
            self.run.adapter.forward(self.w, self.run.batch(*self._batch()), self.run.model.loss)

    def drop(self) -> None:
        """A backward whose gradients are given up."""
        with self.run.phase(f"drop {self.asked}"):
            self._backward()
            self.run.adapter.zero_grad(self.w)

    def drop_unreduced(self) -> None:
        """A backward without reduction whose gradients are given up."""
        with self.run.phase(f"drop {self.asked}"):
            with self.run.adapter.no_sync(self.w):
                self._backward()
            self.run.adapter.zero_grad(self.w)

    def train_on_two(self) -> None:
        """Two forwards, then two backwards, then an optimizer step."""
        run, w, step = self.run, self.w, self.step
        with run.phase(f"step {step}"):
            run.train_on_two(w, step)
            run.observe_state(w, step)
            run.observe_stored(w, step)
        run.before_optimizer = None
        self.step += 1

    def _backward(self) -> None:
        self.w.observe = ignore  # the observer of the step before
        adapter, batch = self.run.adapter, self.run.batch(*self._batch())
        adapter.backward(self.w, adapter.forward(self.w, batch, self.run.model.loss))

    def _batch(self) -> tuple[int, int]:
        """The address of a batch that no step trains on."""
        self.asked += 1
        return 99, self.asked


@dataclass(frozen=True, kw_only=True)
class Act:
    """What a letter stands for.

    Attributes:
        do: does it.
        needs: capabilities without which it is not done.
    """

    do: Callable[[Course], None]
    needs: frozenset[str] = frozenset()

    @property
    def sentence(self) -> str:
        """What it does, in one line."""
        return (self.do.__doc__ or "").partition("\n")[0]


ACTS: Mapping[str, Act] = {
    "s": Act(do=Course.train),
    "c": Act(do=Course.clip),
    "e": Act(do=Course.evaluate),
    # who claims gradients says when they are there, which is when to evaluate
    "i": Act(do=Course.interrupt, needs=frozenset({"gradients"})),
    "m": Act(do=Course.measure, needs=frozenset({"gradients"})),
    "d": Act(do=Course.drop, needs=frozenset({"gradients"})),
    "n": Act(
        do=Course.drop_unreduced, needs=frozenset({"no_sync", "no_sync.dropped", "gradients"})
    ),
    "w": Act(do=Course.train_on_two, needs=frozenset({"two_forwards", "gradients"})),
}


def needs_of(acts: str) -> frozenset[str]:
    """Capabilities without which the sequence cannot be run."""
    return frozenset().union(*(ACTS[letter].needs for letter in acts))


def sequence(run: Run) -> None:
    """Every act of the option ``acts``, one after the other."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    course = Course(run=run, w=w)
    for letter in run.case.option("acts"):
        ACTS[letter].do(course)
