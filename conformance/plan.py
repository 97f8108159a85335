"""Which cases a run consists of. Data in, data out; nothing is built or run here.

Options are crossed in full on the plain model. How much the other models take is a `Depth`: by
default each value of each option once; a variant beyond an adapter's first shares most of its code
with that one, and takes one training and one checkpoint of each model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from conformance import models
from conformance.adapter import state_claims
from conformance.case import Case
from conformance.checks import CHECKS, Check
from conformance.checks.registry import TRAINING
from conformance.errors import unknown
from conformance.globs import matches
from conformance.names import CAPABILITIES, Depth
from conformance.optimizers import OPTIMIZERS, WHOLE_TENSOR
from conformance.releases import ids_of
from conformance.scenarios import SCENARIOS
from conformance.scenarios.resume import KINDS, RANKS, RESUME
from conformance.scenarios.sequence import SEQUENCE

PLAIN_MODEL = "mlp"
STATE_KINDS = ("full", "sharded", "local")


ORDERS = frozenset({"two_forwards", "eval_first", "eval_in_step", "dropped_gradients"})
"""Scenarios that are about the order of passes."""
SENSITIVE = frozenset({"tied", "buffers", "reused", "nested_io", "recomputed"})
"""Traits of models for which that order is another code path."""
SAME_STATES = frozenset({"recomputed", "mixed", "scalar", "varying", "reused", "nested_io"})
"""Traits of models whose states are made like those of others: one checkpoint shows as much."""
SHOWN_BY: Mapping[str, frozenset[str]] = {
    "witness": frozenset({PLAIN_MODEL, "recomputed", "strided"}),
    "scaled": frozenset({PLAIN_MODEL, "tiny"}),
    "averaged": frozenset({PLAIN_MODEL}),
    "materialised": frozenset({"tiny", "transformer", "batchnorm"}),
    "unfrozen": frozenset({PLAIN_MODEL}),
    "repeated": frozenset({PLAIN_MODEL}),
}
"""Scenarios that a few models take, and their names."""


NEEDED: Mapping[str, frozenset[str]] = {"routed": frozenset({"unused_parameters.ranks"})}
"""Traits of models, and the claims without which such a model is not run.

Unless all combinations are asked for, one training shows what it is for: one backward a step, since
a rank that takes several uses more, and plain steps, which do not hide the size of a gradient.
"""


OWN_OPTIONS: Mapping[str, Mapping[str, object]] = {
    # with the order of three additions, and with steps that do not hide a gradient's last bits
    "repeated": {"accumulation": 3, "optimizer": "sgd"},
    "scaled": {"optimizer": "sgd"},  # the other one does not mind a scale
}
"""Options of scenarios that have one case."""


RECUT: Mapping[str, str] = {"uneven": "double", "buffers": "half"}
"""Traits of models of which another number of ranks, this one, cuts or keeps something else."""


TRAININGS = tuple(product(OPTIMIZERS, (1, 3)))
"""Optimizer and micro-batches of a step."""
TRAINING_ALONE = ("sgd", 3)
"""The only training of a model, unless all combinations are asked for.

Its checkpoints are trained with the other optimizer and one micro-batch: each value is there once.
A common factor, which `gradients.scale` sees with one micro-batch, `gradients.value` names as well.
"""
OTHERWISE = ("adamw", 1)
"""The second training of a model for an adapter that claims no states: there is no checkpoint."""
VARYING = (("sgd", 1), TRAINING_ALONE)
"""With one micro-batch another set of parameters is used in each step, with three within a step."""
EVERY_CHECKPOINT = (*product(STATE_KINDS, ("default", "explicit")), ("save", ""))
"""Forms of a checkpoint, and the options of those that have any."""
CHECKPOINTS = (("sharded", "default"), ("full", "explicit"), ("local", "default"), ("save", ""))
"""The same unless all are asked for; where one is enough it is the first that is claimed."""
UNASKED = frozenset({"uneven"})
"""Traits of models that take a full state in the wrapper's own options, not in explicit ones: with
several parameters of one shape, of which those options may mistake one for another."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One case to run.

    Attributes:
        case: the case.
        probe: capabilities that the adapter does not claim and that this case tries out.
        checks: those that judge it.
    """

    case: Case
    probe: tuple[str, ...] = ()
    checks: tuple[Check, ...]


def select_checks(profiles: Collection[str] = (), patterns: Sequence[str] = ()) -> list[Check]:
    """The checks of the given profiles whose id matches one of the patterns.

    Raises:
        UsageError: an unknown profile or release, or a pattern that matches no check.
    """
    chosen = ids_of(profiles)
    for pattern in patterns:
        if not any(matches(id, pattern) for id in CHECKS):
            raise unknown("check", pattern, CHECKS, listed="checks", patterns=True)
    return [
        check
        for check in CHECKS.values()
        if (not profiles or check.id in chosen)
        and (not patterns or any(matches(check.id, p) for p in patterns))
    ]


def select_models(patterns: Sequence[str] = ()) -> list[models.ModelCase]:
    """The model cases whose name matches one of the patterns; all without patterns.

    Raises:
        UsageError: a pattern that matches no model.
    """
    registry = models.cases()
    for pattern in patterns:
        if not any(matches(name, pattern) for name in registry):
            raise unknown("model", pattern, registry, listed="models", patterns=True)
    return [
        model
        for name, model in registry.items()
        if not patterns or any(matches(name, p) for p in patterns)
    ]


def plan(
    capabilities: frozenset[str],
    checks: Sequence[Check],
    chosen: Sequence[models.ModelCase],
    *,
    depth: Depth = Depth.WIDE,
) -> list[Planned]:
    """The cases that the given checks judge, for an adapter with these claims."""
    # what only asks whether ranks come to the end asks it of every case
    everywhere = bool(checks) and all(check.judge is None for check in checks)
    planned: list[Planned] = []
    for model in chosen:
        for case in _cases(model, capabilities, depth):
            judging = judges(case, model, checks)
            if judging or everywhere:
                planned.append(Planned(case=case, checks=judging))
    return planned


def every_case() -> dict[str, Depth]:
    """Every case of an adapter that claims everything, with the least depth that takes it."""
    claims, checks, every = frozenset(CAPABILITIES), list(CHECKS.values()), models.cases().values()
    least: dict[str, Depth] = {}
    for depth in Depth:
        for planned in plan(claims, checks, list(every), depth=depth):
            least.setdefault(str(planned.case), depth)
    return least


def judges(case: Case, model: models.ModelCase, checks: Sequence[Check]) -> tuple[Check, ...]:
    """Those of `checks` that say something about `case`."""
    return tuple(check for check in checks if check.judges(case, model))


def plan_probes(
    capabilities: frozenset[str], checks: Sequence[Check], chosen: Sequence[models.ModelCase]
) -> list[Planned]:
    """One case for each unclaimed capability that some check or scenario is about.

    It is the first case, on the first model, that the claim would add, or that a check which needs
    the claim judges.
    """
    claimed = plan(capabilities, checks, chosen)
    cases = {planned.case for planned in claimed}
    found: list[Planned] = []
    for probe in unclaimed(capabilities):
        for planned in plan(capabilities | set(probe), checks, chosen):
            about = about_claim(planned.checks, probe)
            if planned.case not in cases or about:
                judging = about or planned.checks
                found.append(Planned(case=planned.case, probe=probe, checks=judging))
                break
    return found


def about_claim(checks: Sequence[Check], probe: Sequence[str]) -> tuple[Check, ...]:
    """Those of `checks` that are about one of the capabilities in `probe`."""
    return tuple(check for check in checks if (check.needs | check.any_of) & set(probe))


def _cases(model: models.ModelCase, capabilities: frozenset[str], depth: Depth) -> Iterator[Case]:
    """The cases of one model that an adapter with these claims is asked for."""
    crossed = Depth.FULL if model.name == PLAIN_MODEL else depth
    training = training_of(model)
    needed = needed_by(model)
    if needed - capabilities:
        return
    if needed and depth is not Depth.FULL:
        if not SCENARIOS[training].needs - capabilities:
            yield Case.of(model.name, training, optimizer="sgd", accumulation=1)
        return
    for scenario in SCENARIOS.values():
        if scenario.needs - capabilities or scenario.name == SEQUENCE:
            continue
        # of a wide model only the live bytes say what a small one does not
        if (scenario.name == "memory") != ("wide" in model.traits):
            continue
        if scenario.name == training:
            saved = any(_checkpoints(model, capabilities, crossed))
            for optimizer, accumulation in _trainings(model, crossed, saved=saved):
                yield Case.of(model.name, training, optimizer=optimizer, accumulation=accumulation)
            if "optimizer.whole" in capabilities and model.name == PLAIN_MODEL:
                for optimizer in WHOLE_TENSOR:
                    yield Case.of(model.name, training, optimizer=optimizer)
        elif scenario.name == "checkpoint":
            yield from _checkpoints(model, capabilities, crossed)
        elif scenario.name == RESUME:
            yield from _resumptions(model, capabilities, depth)
        elif scenario.name in TRAINING or training != "train":
            continue
        elif takes(scenario.name, model, depth):
            yield Case.of(model.name, scenario.name, **OWN_OPTIONS.get(scenario.name, {}))
            if scenario.name == "eval_first" and model.name == PLAIN_MODEL:
                yield Case.of(model.name, scenario.name, mode="inference")


def _trainings(model: models.ModelCase, depth: Depth, *, saved: bool) -> Sequence[tuple[str, int]]:
    """Optimizer and micro-batches of each training of a model, of which there are checkpoints."""
    if depth is Depth.FULL:
        return TRAININGS
    varying = depth is Depth.WIDE and "varying" in model.traits
    alone = VARYING if varying else (TRAINING_ALONE,)
    return alone if saved else (*alone, OTHERWISE)


def needed_by(model: models.ModelCase) -> frozenset[str]:
    """The claims without which a model is not run."""
    return frozenset().union(*(NEEDED[trait] for trait in model.traits & NEEDED.keys()))


def training_of(model: models.ModelCase) -> str:
    """The scenario in which a model is trained."""
    if "varying" in model.traits:
        return "varying"
    return "unused" if "unused" in model.traits else "train"


def takes(scenario: str, model: models.ModelCase, depth: Depth) -> bool:
    """Whether a model is run in a scenario that has no options."""
    if scenario in ORDERS:
        own = Depth.FULL if model.name == PLAIN_MODEL else depth
        return takes_orders(model, own)
    return scenario not in SHOWN_BY or model.name in SHOWN_BY[scenario]


def takes_orders(model: models.ModelCase, depth: Depth) -> bool:
    """Whether a model is run with an unusual order of passes."""
    return depth is Depth.FULL or (depth is Depth.WIDE and bool(model.traits & SENSITIVE))


def _checkpoints(
    model: models.ModelCase, capabilities: frozenset[str], depth: Depth
) -> Iterator[Case]:
    if SCENARIOS[training_of(model)].needs - capabilities:
        return
    full = depth is Depth.FULL
    ways = EVERY_CHECKPOINT if full else CHECKPOINTS
    claimed = [way for way in ways if capabilities.issuperset(state_claims(way[0]))]
    one = depth is Depth.NARROW or (not full and model.traits & SAME_STATES)
    for kind, options in claimed[:1] if one else claimed:
        if not full and kind == "full" and model.traits & UNASKED:
            options = "default"
        own = {"options": options} if options else {}
        yield Case.of(model.name, "checkpoint", kind=kind, **own)


def _resumptions(
    model: models.ModelCase, capabilities: frozenset[str], depth: Depth
) -> Iterator[Case]:
    """Each number of ranks once, and each way of saving, on models that differ in what is cut."""
    if depth is Depth.NARROW or SCENARIOS[training_of(model)].needs - capabilities:
        return
    kinds = [kind for kind in KINDS if capabilities.issuperset(state_claims(kind))]
    chosen = list(product(kinds, RANKS))
    if depth is Depth.WIDE:
        plain = model.name == PLAIN_MODEL
        numbers = ["half"] if plain else [RECUT[t] for t in RECUT if t in model.traits]
        chosen = list(product(kinds[:1] if plain else kinds[-1:], numbers))
    for kind, ranks in chosen:
        yield Case.of(model.name, RESUME, kind=kind, ranks=ranks)


def unclaimed(capabilities: frozenset[str]) -> list[tuple[str, ...]]:
    """Capabilities that are not claimed, those that only make sense together as one."""
    missing = [name for name in CAPABILITIES if name not in capabilities]
    pairs = [state_claims(kind) for kind in STATE_KINDS]
    together = [pair for pair in pairs if set(pair) <= set(missing)]
    paired = {name for pair in together for name in pair}
    return [*((name,) for name in missing if name not in paired), *together]
