"""Examples for the search: models, cases and variants, drawn by Hypothesis and small when shrunk.

Every example is a number of ranks, a variant and a case, whose strings say all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias

from hypothesis import strategies as st

from conformance.adapter import Adapter
from conformance.case import Case
from conformance.checks import Check
from conformance.item import Item
from conformance.models import ModelCase, case, drawn
from conformance.optimizers import OPTIMIZERS
from conformance.plan import Depth, Planned, judges, plan
from conformance.report.text import number
from conformance.scenarios.sequence import ACTS, SEQUENCE
from conformance.subject import Subject
from conformance.verdicts import adapter_label

Part: TypeAlias = drawn.Layer | drawn.Unit
MAX_SIZE, MAX_ITEMS, MAX_DEPTH, MAX_ACTS, MAX_ACCUMULATION = 9, 3, 2, 5, 4
LEAST_NORMALISED = 3
"""Features; of fewer a normalisation leaves little, and of one nothing."""

SIZES = st.integers(1, MAX_SIZE)
ANY = st.sampled_from(
    ["".join(some) for n in range(4) for some in combinations(drawn.LAYER_LETTERS, n)]
)
"""Up to three letters of a layer, in their order."""
PLAIN = ANY.filter(lambda letters: "n" not in letters)


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


@st.composite
def layers(draw: st.DrawFn, size: int | None = None) -> drawn.Layer:
    """A layer, of `size` if that is given."""
    size = size or draw(SIZES)
    return drawn.Layer(size=size, letters=draw(ANY if size >= LEAST_NORMALISED else PLAIN))


@st.composite
def items(draw: st.DrawFn, inputs: int, depth: int, least: int) -> tuple[Part, ...]:
    """At least `least` layers and units in a row, of which the first takes `inputs` features."""
    found: list[Part] = []
    for _ in range(draw(st.integers(least, MAX_ITEMS))):
        if depth < MAX_DEPTH and draw(st.booleans()):
            found.append(draw(units(inputs, depth)))
        else:
            found.append(draw(layers()))
        inputs = drawn.size_of(found[-1:], inputs)
    return tuple(found)


@st.composite
def units(draw: st.DrawFn, inputs: int, depth: int) -> drawn.Unit:
    """A unit; one that is called twice ends with a layer of as many features as it takes."""
    letters = "".join(letter for letter in drawn.UNIT_LETTERS if draw(st.booleans()))
    if "r" in letters:
        inside = (*draw(items(inputs, depth + 1, 0)), draw(layers(inputs)))
    else:
        inside = draw(items(inputs, depth + 1, 1))
    return drawn.Unit(items=inside, letters=letters)


@st.composite
def models(draw: st.DrawFn) -> ModelCase:
    """A model with a head that trains, whatever is before it."""
    inputs = draw(SIZES)
    body = draw(items(inputs, 0, 0))
    head = draw(layers())
    return case(str(drawn.Drawing(inputs=inputs, items=(*body, head))))


@lru_cache(maxsize=1024)
def planned(
    traits: frozenset[str], capabilities: frozenset[str], checks: tuple[Check, ...]
) -> list[Case]:
    """The cases that a run takes of a model with these traits; their model is another one."""
    model = replace(case("mlp"), name="drawn", traits=traits)
    return [each.case for each in plan(capabilities, checks, [model], depth=Depth.FULL)]


@st.composite
def cases(
    draw: st.DrawFn, model: ModelCase, capabilities: frozenset[str], checks: Sequence[Check]
) -> Case:
    """A sequence of acts, or a case that a run of `model` would have."""
    if draw(st.booleans()):
        known = planned(model.traits, capabilities, tuple(checks))
        return replace(draw(st.sampled_from(known)), model=model.name)
    allowed = [letter for letter, act in ACTS.items() if act.needs <= capabilities]
    # no st.text: it takes words now and then from whatever source files happen to be imported
    acts = "".join(draw(st.lists(st.sampled_from(allowed), max_size=MAX_ACTS)))
    return Case.of(
        model.name,
        SEQUENCE,
        acts=f"{acts}ss",  # what an act has done is seen in the step after it
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS, reverse=True))),
        accumulation=draw(st.integers(1, MAX_ACCUMULATION)),
    )


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
    world = draw(st.sampled_from(usable))
    chosen = st.sampled_from(places).filter(lambda index: able(world, index))
    subject, adapter = subjects[draw(chosen)]
    model = draw(models())
    drawn_case = draw(cases(model, adapter.capabilities, checks))
    judging = judges(drawn_case, model, checks)
    return Example(world=world, subject=subject, planned=Planned(case=drawn_case, checks=judging))
