"""The search for an example that a wrapper gets wrong, and for the smallest of its kind.

Knows Hypothesis and what makes two failures one deviation. Runs nothing: what an example shows
comes from a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from conformance.causes import Cause
from conformance.drawing import Example
from conformance.verdicts import BAD, COMPLETED, Finding, Verdict

Judge = Callable[[Example], Sequence[Finding]]
_PARTICULAR = re.compile(r"'[^']*'|\[[^\]]*\]|\d+(\.\d+)?(e-?\d+)?")
TELLING = 80
"""Characters of an exception's sentence that say which exception it is."""
ROUND = 20
"""Examples that Hypothesis is asked for at a time, however many are wanted: what it draws depends
on how many it may. The first tenth are small ones, of which a short search should not consist."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One way in which a wrapper is wrong.

    Attributes:
        finding: the first divergence of the smallest example.
        example: that example.
        met: the example in which it was first met.
        tried: examples that were judged until then, in this search.
        steady: whether it was wrong again when it was repeated.
        smallest: whether the search came to its end, which makes the example as small as it gets.
    """

    finding: Finding
    example: Example
    met: Example
    tried: int
    steady: bool
    smallest: bool = True


def kind_of(finding: Finding) -> tuple[str, ...]:
    """What two findings of one deviation have in common, in different examples."""
    if finding.cause is not Cause.EXCEPTION:
        return (finding.check, str(finding.cause))
    return (finding.check, _PARTICULAR.sub("#", finding.sentence)[:TELLING])


def is_refusal(finding: Finding) -> bool:
    """Whether it says that the example was refused, so that nothing of it was judged."""
    return finding.check == COMPLETED and finding.verdict is Verdict.UNSUPPORTED


@dataclass(kw_only=True)
class Search:
    """A search by number of examples; a longer one begins with those of a shorter one.

    Attributes:
        judge: runs an example and says what came of it, first divergence first.
        strategy: draws examples.
        examples: how many to judge, those of shrinking not counted.
        seed: of the drawing.
        tried: how many were judged so far.
        refused: of how many of these the wrapper refused to build.
    """

    judge: Judge
    strategy: SearchStrategy[Example]
    examples: int
    seed: int = 0
    tried: int = 0
    refused: int = 0
    _met: list[tuple[Example, Finding]] = field(default_factory=list, init=False)

    @property
    def unfinished(self) -> Deviation | None:
        """The deviation that is made smaller just now, with the smallest example so far."""
        return self._deviation(steady=True, smallest=False) if self._met else None

    def deviations(self) -> Iterator[Deviation]:
        """Every kind of deviation that is met, each as small as it gets."""
        known: set[tuple[str, ...]] = set()
        rounds = 0
        while self.tried < self.examples:
            found = self._next(known, rounds)
            rounds += 1
            if found is None:
                continue
            if found.steady:  # else what is wrong every time may yet be met behind it
                known.add(kind_of(found.finding))
            yield found

    def _next(self, known: set[tuple[str, ...]], rounds: int) -> Deviation | None:
        """Search until something new is met, or the examples of this round or all are used up."""
        met = self._met

        def one(example: Example) -> None:
            first = not met
            if first and self.tried == self.examples:
                raise SkipTest("as many examples as were asked for")
            said = self.judge(example)
            self.tried += first
            self.refused += first and any(map(is_refusal, said))
            found = [f for f in said if f.verdict in BAD]
            # what fails later in the same example is a consequence as likely as not
            if not found or kind_of(found[0]) in known:
                return
            # shrinking must not slip from one deviation to another
            if met and kind_of(found[0]) != kind_of(met[0][1]):
                return
            met.append((example, found[0]))
            raise AssertionError(found[0].id)

        quiet = settings(
            max_examples=ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
        )
        steady = True
        try:
            seed(f"{self.seed}/{rounds}")(quiet(given(self.strategy)(one)))()
        except SkipTest:
            return None
        except Flaky:
            steady = False
        except AssertionError:
            if not met:
                raise
        if not met:
            return None
        found = self._deviation(steady=steady)
        met.clear()
        return found

    def _deviation(self, *, steady: bool, smallest: bool = True) -> Deviation:
        example, finding = self._met[-1 if steady else 0]
        return Deviation(
            finding=finding,
            example=example,
            met=self._met[0][0],
            tried=self.tried,
            steady=steady,
            smallest=smallest,
        )
