"""Canaries and mutants are run with the tests that run their lines; whoever kills is tried alone.

Knows mutants and runs; must not know how mutants are drawn or where results are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from cover import Cover, Test, within
from crew import Answer, Crew, Order
from reach import reach
from sites import Mutant
from targets import ROOT, Canary
from verdict import KILLED, SURVIVED, outcome

UNREACHED = "no test runs this line"
_SLOWER, _MORE = 4.0, 75.0
"""A run may take so many times as long as without a mutant, and so many seconds more."""
_CANARY, _ALONE = "canary: ", "alone: "


class SpoiltError(RuntimeError):
    """The tests do not see the changed tree: no result holds."""


class Session:
    """Mutants to run.

    Attributes:
        steady: tests that have killed and pass by themselves without a mutant.
        unsteady: those that do not, and why. Their kills do not count, and are tried again.
        left: keys of the mutants that have come to nothing yet.
    """

    def __init__(
        self,
        crew: Crew,
        cover: Cover,
        mutants: Sequence[Mutant],
        *,
        canaries: Sequence[Canary],
        seconds: float,
        long: bool,
    ) -> None:
        """Ask for all runs; each mutant's tests take at most about `seconds`, `long` ones too."""
        self.steady: set[str] = set()
        self.unsteady: dict[str, str] = {}
        self.left: set[str] = set()
        self._crew, self._cover = crew, cover
        self._seconds, self._long = seconds, long
        self._mutants = {mutant.key: mutant for mutant in mutants}
        self._unreached: list[Mutant] = []
        self._of: dict[str, int] = {}
        self._alone: set[str] = set()
        self._killed: dict[str, list[Mutant]] = {}
        for canary in canaries:
            line, text = canary.changed(ROOT)
            tests, key = self._able(canary.module, line), f"{_CANARY}{canary.module}:{line}"
            if not tests:
                raise SpoiltError(f"{key}: {UNREACHED}")
            self._put(key, tests, canary.module, text)
        for mutant in mutants:
            self._ask(mutant)

    def answers(self, deadline: float) -> Iterator[tuple[Mutant, str, str, Answer | None]]:
        """Yield each mutant with what it came to and why, until all are done or time is up.

        A mutant comes again if the test that had killed it turns out to fail without one.

        Raises:
            SpoiltError: a canary lives.
        """
        yield from self._survivors()
        for answer in self._crew.answers(deadline):
            how, told = outcome(answer)
            key = answer.order.key
            if key.startswith(_CANARY):
                say(f"{key}: {answer.seconds:.1f} s, {how} {told}")
                if how != KILLED:
                    raise SpoiltError(f"{key} is {how} and must be {KILLED}; {answer.output}")
            elif key.startswith(_ALONE):
                self._judge_test(key.removeprefix(_ALONE), how, answer)
                yield from self._survivors()
            else:
                mutant = self._mutants[key]
                if how == KILLED and told in self.unsteady:
                    self._ask(mutant)
                    yield from self._survivors()
                    continue
                if how == KILLED:
                    self._killed.setdefault(told, []).append(mutant)
                    self.try_alone(told)
                if how == SURVIVED:
                    told = f"{len(answer.order.tests)} of {self._of[key]} tests that may tell"
                self.left.discard(key)
                yield mutant, how, told, answer

    def try_alone(self, test: str) -> None:
        """Run a test that has killed once more, without a mutant and without those before it.

        If it needs them, or fails now and then, its kills are none.
        """
        if test in self._alone | self.steady:
            return
        self._alone.add(test)
        file = test.partition("::")[0]
        order = Order(key=_ALONE + test, files=(file,), tests=(test,), limit=_MORE, first=True)
        self._crew.put(order)

    def _survivors(self) -> Iterator[tuple[Mutant, str, str, None]]:
        """Yield the mutants that no test reaches, or none any more."""
        while self._unreached:
            mutant = self._unreached.pop()
            self.left.discard(mutant.key)
            yield mutant, SURVIVED, UNREACHED, None

    def _ask(self, mutant: Mutant) -> None:
        self.left.add(mutant.key)
        tests = self._able(mutant.place.module, mutant.line)
        if self._long:
            tests += self._cover.perhaps(mutant.place.module)
        if tests:
            self._put(mutant.key, tests, mutant.place.module, mutant.text)
            self._of[mutant.key] = len(tests)
        else:
            self._unreached.append(mutant)

    def _able(self, module: str, line: int) -> list[Test]:
        source = (ROOT / module).read_text(encoding="utf-8")
        return self._cover.able(module, reach(source, line))

    def _put(self, key: str, able: Sequence[Test], module: str, text: str) -> None:
        tests = within(able, self._seconds)
        self._crew.put(
            Order(
                key=key,
                files=tuple(dict.fromkeys(test.file for test in tests)),
                tests=tuple(test.name for test in tests),
                limit=_SLOWER * sum(test.seconds for test in tests) + _MORE,
                module=module,
                text=text,
            )
        )

    def _judge_test(self, test: str, how: str, answer: Answer) -> None:
        if how == SURVIVED:
            self.steady.add(test)
            return
        why = answer.failures[0]["text"] if answer.failures else answer.output
        self.unsteady[test] = why
        self._cover.drop(test, why)
        say(f"{test} is {how} by itself, without a mutant")
        for mutant in self._killed.pop(test, ()):
            self._ask(mutant)


def say(text: str) -> None:
    """Tell whoever waits; results go elsewhere."""
    print(text, file=sys.stderr, flush=True)
