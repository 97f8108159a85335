"""A group's tests are tried without a mutant, then its mutants run, then they are tried again.

Knows groups and runs; must not know how mutants are chosen or where results are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from crew import Answer, Crew, Order
from sites import Mutant
from targets import ROOT, Group
from verdict import KILLED, SURVIVED, outcome

_TRIAL_LIMIT = 900.0
_SLOWER, _MORE = 3.0, 60.0
"""A run may take so many times as long as without a mutant, and so many seconds more."""
_GREEN, _CANARY, _STILL_GREEN = "as it is: ", "canary: ", "as it is, once more: "
_WANTED = {_GREEN: SURVIVED, _CANARY: KILLED, _STILL_GREEN: SURVIVED}


class Session:
    """Mutants to run, by group.

    Attributes:
        spoilt: why a group's results do not count: its tests fail by themselves, or do not see the
            changed tree. Nothing of it is run after that.
    """

    def __init__(self, crew: Crew, mutants: list[tuple[Group, Mutant]]) -> None:
        """Ask for the trials of all groups."""
        self.spoilt: dict[str, str] = {}
        self._crew = crew
        self._mutants = {mutant.key: (group, mutant) for group, mutant in mutants}
        self._groups = {group.name: group for group, _ in mutants}
        self._limits: dict[str, float] = {}
        self._seen: set[str] = set()
        # The slowest groups have the most tests, so they begin first.
        for group in sorted(self._groups.values(), key=lambda group: -len(group.tests)):
            self._try(_GREEN, group)
        for group in self._groups.values():
            self._try(_CANARY, group)

    def answers(self, deadline: float) -> Iterator[tuple[Group, Mutant, Answer]]:
        """Yield what each mutant came to, until all are done or time is up."""
        for answer in self._crew.answers(deadline):
            if answer.order.key not in self._mutants:
                self._judge_trial(answer)
                continue
            group, mutant = self._mutants[answer.order.key]
            if group.name not in self.spoilt:
                yield group, mutant, answer

    def _try(self, kind: str, group: Group) -> None:
        module, text = (group.canary[0], group.canary_text(ROOT)) if kind == _CANARY else ("", None)
        self._crew.put(
            Order(
                key=kind + group.name,
                tests=group.tests,
                limit=_TRIAL_LIMIT,
                module=module,
                text=text,
            )
        )

    def _judge_trial(self, answer: Answer) -> None:
        kind = next(kind for kind in _WANTED if answer.order.key.startswith(kind))
        name = answer.order.key.removeprefix(kind)
        how, told = outcome(answer)
        say(f"{answer.order.key}: {answer.seconds:.1f} s, {how} {told}")
        if how != _WANTED[kind]:
            self.spoilt[name] = f"{answer.order.key} is {how}, want {_WANTED[kind]}; {told}"
            say(f"{self.spoilt[name]}\n{answer.output}")
        elif kind == _GREEN:
            self._limits[name] = _SLOWER * answer.seconds + _MORE
        elif kind == _CANARY:
            self._seen.add(name)
        if kind != _STILL_GREEN and name in self._limits and name in self._seen:
            self._begin(self._groups[name])

    def _begin(self, group: Group) -> None:
        for key, (owner, mutant) in self._mutants.items():
            if owner is group:
                self._crew.put(
                    Order(
                        key=key,
                        tests=group.tests,
                        limit=self._limits[group.name],
                        module=mutant.place.module,
                        text=mutant.text,
                    )
                )
        # Tests that fail now and then on a busy machine would count as kills.
        self._try(_STILL_GREEN, group)


def say(text: str) -> None:
    """Tell whoever waits; results go elsewhere."""
    print(text, file=sys.stderr, flush=True)
