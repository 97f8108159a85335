"""Examples for the search: models, cases and variants, drawn by Hypothesis and small when shrunk.

Every example is a number of ranks, a variant and a case, whose strings say all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias, get_type_hints

from hypothesis import strategies as st

from conformance.adapter import Adapter, Conventions, TravelDtype
from conformance.case import Case
from conformance.checks import Check
from conformance.item import Item
from conformance.models import ModelCase, case, drawn
from conformance.names import Depth
from conformance.optimizers import OPTIMIZERS
from conformance.plan import Planned, judges, plan
from conformance.report.words import number
from conformance.scenarios.sequence import ACTS, SEQUENCE
from conformance.subject import Subject
from conformance.verdicts import adapter_label

Part: TypeAlias = drawn.Layer | drawn.Unit
MAX_SIZE, MAX_ITEMS, MAX_DEPTH, MAX_ACTS, MAX_ACCUMULATION = 9, 3, 2, 5, 4
PROGRAMS = (False, True, True)
"""Whether it is one of a run: Hypothesis draws what comes first more often."""
FLOAT64 = (False, False, False, True)
"""Whether a model is in float64."""
LEAST_NORMALISED = 3
"""Features; of fewer a normalisation leaves little, and of one nothing."""

MAX_LETTERS = 3
"""Of one layer."""

SIZES = st.integers(1, MAX_SIZE)


@dataclass(frozen=True, kw_only=True)
class Example(Item):
    """What is drawn: an item, and the ranks that it is run on.

    Attributes:
        world: how many there are.
    """

    world: int

    def __str__(self) -> str:
        label = adapter_label(self.subject.adapter, self.subject.variant)
        return f"{label}/{self.planned.case} of {number(self.world, 'rank')}"


@lru_cache
def letters_of_layers(some: str, size: int) -> st.SearchStrategy[str]:
    """Up to `MAX_LETTERS` of `some`, in their order, that suit a layer of `size`."""
    suitable = some if size >= LEAST_NORMALISED else some.replace("n", "")
    return st.sampled_from(
        ["".join(few) for n in range(MAX_LETTERS + 1) for few in combinations(suitable, n)]
    )


@st.composite
def layers(draw: st.DrawFn, some: str, size: int | None = None) -> drawn.Layer:
    """A layer with some of the letters `some`, of `size` if that is given."""
    size = size or draw(SIZES)
    return drawn.Layer(size=size, letters=draw(letters_of_layers(some, size)))


@st.composite
def items(draw: st.DrawFn, some: str, inputs: int, depth: int, least: int) -> tuple[Part, ...]:
    """At least `least` layers and units in a row, of which the first takes `inputs` features."""
    found: list[Part] = []
    for _ in range(draw(st.integers(least, MAX_ITEMS))):
        if depth < MAX_DEPTH and draw(st.booleans()):
            found.append(draw(units(some, inputs, depth)))
        else:
            found.append(draw(layers(some)))
        inputs = drawn.size_of(found[-1:], inputs)
    return tuple(found)


@st.composite
def units(draw: st.DrawFn, some: str, inputs: int, depth: int) -> drawn.Unit:
    """A unit; one that is called twice ends with a layer of as many features as it takes."""
    letters = "".join(letter for letter in drawn.UNIT_LETTERS if draw(st.booleans()))
    if "r" in letters:
        inside = (*draw(items(some, inputs, depth + 1, 0)), draw(layers(some, inputs)))
    else:
        inside = draw(items(some, inputs, depth + 1, 1))
    return drawn.Unit(items=inside, letters=letters)


@st.composite
def models(draw: st.DrawFn, *, double: bool = True) -> ModelCase:
    """A model with a head that trains, whatever is before it; in float64 only if `double`.

    Which letters its layers may have is drawn first. Were each layer free to have any, hardly a
    model would be without one of them, and what a wrapper refuses would be in most.
    """
    whole = "d" if double and draw(st.sampled_from(FLOAT64)) else ""
    some = "".join(letter for letter in drawn.LAYER_LETTERS if draw(st.booleans()))
    inputs = draw(SIZES)
    body = draw(items(some, inputs, 0, 0))
    head = draw(layers(some))
    return case(str(drawn.Drawing(inputs=inputs, items=(*body, head), letters=whole)))


@lru_cache(maxsize=1024)
def planned(
    traits: frozenset[str], capabilities: frozenset[str], checks: tuple[Check, ...]
) -> list[list[Case]]:
    """By check, the cases that a run takes of a model with these traits; of another name."""
    model = replace(case("mlp"), name="drawn", traits=traits)
    known = plan(capabilities, checks, [model], depth=Depth.FULL)
    judged = [[each.case for each in known if check in each.checks] for check in checks]
    return [cases for cases in judged if cases]


@st.composite
def cases(
    draw: st.DrawFn, model: ModelCase, capabilities: frozenset[str], checks: Sequence[Check]
) -> Case:
    """A sequence of acts, or a case that a run of `model` would have, each check as often."""
    allowed = [letter for letter, act in ACTS.items() if act.needs <= capabilities]
    # no st.text: it takes words now and then from whatever source files happen to be imported
    acts = "".join(draw(st.lists(st.sampled_from(allowed), max_size=MAX_ACTS)))
    found = Case.of(
        model.name,
        SEQUENCE,
        acts=f"{acts}ss",  # what an act has done is seen in the step after it
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS, reverse=True))),
        accumulation=draw(st.integers(1, MAX_ACCUMULATION)),
    )
    # after all draws of the other kind, so that one shrinks to it
    if draw(st.sampled_from(PROGRAMS)):
        known = planned(model.traits, capabilities, tuple(checks))
        found = replace(draw(st.sampled_from(draw(st.sampled_from(known)))), model=model.name)
    return found


def takes_float64(adapter: Adapter) -> bool:
    """Whether a model in float64 makes sense: what is told dtypes would take it for another."""
    told = [name for name, kind in get_type_hints(Conventions).items() if kind == TravelDtype]
    return all(getattr(adapter.conventions, name) == "parameter" for name in told)


@st.composite
def examples(
    draw: st.DrawFn,
    subjects: Sequence[tuple[Subject, Adapter]],
    checks: Sequence[Check],
    worlds: Sequence[int],
) -> Example:
    """Some ranks, a subject that they can be divided for, and a case of those that it claims.

    `worlds` and `subjects` stand in order, the one that is best shrunk to first.
    """

    def able(world: int, index: int) -> bool:
        return world % subjects[index][1].replicas == 0

    # by place: a subject itself would be drawn by what its text happens to be; and by the same
    # place in every world, so that fewer ranks are tried with the same subject
    places = range(len(subjects))
    usable = [world for world in worlds if any(able(world, index) for index in places)]
    # with the fewest ranks least can go wrong, but what does is best seen
    world = draw(st.sampled_from([*usable, *usable[1:]]))
    chosen = st.sampled_from(places).filter(lambda index: able(world, index))
    subject, adapter = subjects[draw(chosen)]
    model = draw(models(double=takes_float64(adapter)))
    drawn_case = draw(cases(model, adapter.capabilities, checks))
    judging = judges(drawn_case, model, checks)
    return Example(world=world, subject=subject, planned=Planned(case=drawn_case, checks=judging))
