"""How far a wrapper may be from the oracle: measured from the oracle's own noise.

The oracle runs three times: in the test precision, in float64, and in the test precision with ranks
added in the other order, which up to two ranks is the first run once more. What these differ by is
what correct arithmetic may differ by. Bounds are fixed before any wrapper or mutant is seen and are
the same for all of them.

Of a model that is itself in float64, the second run is in float32, and its distance counts as many
times less as its units of the last place are larger.

Where a wrapper computes in a low dtype all three runs do so, and there is a fourth one, in which
what lies next to a boundary of rounding goes to its other side. A correct sum of gradients in that
dtype may be a neighbour of the oracle's; a correct weight may be a few units off in its own last
place, and then its copy in the low dtype is another one. Nothing of that concerns the weights that
a model is built with, so a first forward and backward is compared as closely as in float32.

Three runs may agree by luck, above all in a tensor of one element: there the noise is the largest
of all steps. What an optimizer keeps is made of the state before and a gradient, so it may be as
far off as these may be together: who is within the bounds of both is never outside that of the
state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.history import History, as_tensor

FACTOR = 8.0
"""A wrapper may be this many times further off than the oracle's noise in one sample of it."""

ULPS = 8.0
"""Floor of a bound, in units of the last place of the largest expected element."""

FEW = 8
"""Elements that may all have come out alike. Of one, another correct run is FACTOR times further
off in 8 of 100 tries (`_noise_of_losses` says why); of all steps together, hardly ever."""

SINGLE = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""A rounding error in float64, of one in float32."""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The runs of the oracle for one case.

    Attributes:
        reference: what wrappers are compared with.
        double: the same in float64; ``None`` if the reference is in float64.
        single: then the same in float32.
        reversed: the same with ranks added in the other order.
        nudged: the same with the other side of roundings in a low dtype; ``None`` without one.
    """

    reference: History
    double: History | None = None
    single: History | None = None
    reversed: History
    nudged: History | None = None
    _bounds: dict[tuple[Any, ...], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _noises: dict[tuple[Any, ...], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def bound(self, rank: int, what: str, where: dict[str, Any], key: str | None = None) -> float:
        """Largest allowed absolute error of any element of one observed tensor."""
        # several checks, and in the reference all ranks, look at one recorded value
        rank = self.reference.holder(rank, what, where)
        place = (rank, what, *sorted(where.items()), key)
        if place not in self._bounds:
            least = self._inherited(rank, where, key or "") if what == "optimizer_state" else 0.0
            self._bounds[place] = max(self._measured(rank, what, where, key), least)
        return self._bounds[place]

    def _inherited(self, rank: int, where: dict[str, Any], key: str) -> float:
        """What correct arithmetic makes of the state before and of a gradient at their bounds."""
        fqn, _, name = key.rpartition("/")
        step = int(where.get("step", -1))
        options = self.reference.find(rank, "hyperparameters", where)
        gradient = self._gradient(rank, step, fqn)
        if options is None or gradient is None:
            return 0.0
        largest, off = gradient
        group = options.value[0]
        kept, taken = _weights(name, group, largest)
        before = {**where, "step": step - 1}
        state = self.reference.find(rank, "optimizer_state", before)
        found = taken * off
        if state is not None and key in state.value:
            found += kept * self.bound(rank, "optimizer_state", before, key)
        return found

    def _gradient(self, rank: int, step: int, fqn: str) -> tuple[float, float] | None:
        """Largest element and bound of the gradient that the optimizer took, if it was observed."""
        where = {"step": step}
        for what in ("clipped", "gradients"):
            seen = self.reference.find(rank, what, where)
            if seen is not None and seen.value.get(fqn) is not None:
                value = as_tensor(seen.value[fqn])
                largest = float(value.double().abs().max()) if value.numel() else 0.0
                return largest, self.bound(rank, what, where, fqn)
        return None

    def _measured(self, rank: int, what: str, where: dict[str, Any], key: str | None) -> float:
        expected = _pick(self.reference, rank, what, where, key)
        # in a low dtype later steps have roundings that earlier ones cannot have
        if key is not None and expected.numel() <= FEW and self.nudged is None:
            noise = self._noise_in_all_steps(rank, what, where, key)
        else:
            noise = self._noise(rank, what, where, key)
        if what == "loss" and self.nudged is not None:
            noise = max(noise, self._noise_of_losses(self.nudged, where.get("step")))
        eps = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
        scale = float(expected.double().abs().max()) if expected.numel() else 0.0
        return FACTOR * noise + ULPS * eps * scale

    def _noise_in_all_steps(self, rank: int, what: str, where: dict[str, Any], key: str) -> float:
        """The largest noise of the same tensor in any step; of this one if ``where`` names none."""
        step = {"step": where["step"]} if "step" in where else {}
        rest = sorted(item for item in where.items() if item[0] not in step)
        place = (rank, what, bool(step), *rest, key)
        if place not in self._noises:  # each step of the tensor asks for it
            made = [o for o in self.reference.every(what, rank) if o.value.get(key) is not None]
            places = [dict(o.where) for o in made if {**o.where, **step} == where]
            self._noises[place] = max(self._noise(rank, what, where, key) for where in places)
        return self._noises[place]

    def _noise(self, rank: int, what: str, where: dict[str, Any], key: str | None) -> float:
        """What the runs of the oracle differ by in one observed tensor."""
        expected = _pick(self.reference, rank, what, where, key)
        runs = [h for h in (self.double, self.reversed, self.nudged) if h is not None]
        others = [_pick(h, rank, what, where, key) for h in runs]
        if what == "gradients_big_batch" and self.nudged is not None:
            # one batch rounds once in the low dtype, several do several times
            others.append(_pick(self.reference, rank, "gradients", where, key))
        noise = max((distance(other, expected) for other in others), default=0.0)
        if self.single is not None:
            coarse = distance(_pick(self.single, rank, what, where, key), expected)
            noise = max(noise, SINGLE * coarse)
        return noise

    def _noise_of_losses(self, nudged: History, step: int | None) -> float:
        """The most by which any rank's loss in a step is another one on the other side.

        An estimate, not a bound of arithmetic. That would have every copy of a weight, and what
        each layer returns, a unit of the last place off in the worst direction: twice as many units
        as there are layers, times the product of the weights' absolute values. No defect that
        leaves the magnitude of a loss alone would be outside of it.

        What happens is a sum of roundings up and down, nearly a normal variable around zero. How
        wide it is depends on the weights, which all batches of a step share; each loss is one draw
        from it. Of two draws one is more than FACTOR times the other with a probability of
        2 / pi * atan(1 / FACTOR), 8 %: so often a correct wrapper would be outside of the bound of
        one loss alone. That it is outside of FACTOR times the largest of k draws has 1 % for k = 2,
        0.03 % for 4 and 0.001 % for 6. On one rank without micro-batches nothing helps; the two
        other runs are draws as well.
        """
        pairs = (
            (nudged.find(rank, "loss", seen.where), seen)
            for rank in range(self.reference.world)
            for seen in self.reference.every("loss", rank)
            if seen.where.get("step") == step
        )
        gaps = [distance(as_tensor(o.value), as_tensor(seen.value)) for o, seen in pairs if o]
        return max(gaps, default=0.0)


def _weights(name: str, group: Mapping[str, Any], largest: float) -> tuple[float, float]:
    """Of a state called `name`: (part of the old that stays, error per error of the gradient).

    Both zero for a state that is no known average of gradients with a largest element `largest`.
    """
    if name in ("exp_avg", "exp_avg_sq") and "betas" in group:
        kept = float(group["betas"][name == "exp_avg_sq"])
        return kept, (1.0 - kept) * (2.0 * largest if name == "exp_avg_sq" else 1.0)
    if name == "momentum_buffer":
        return float(group.get("momentum", 0.0)), 1.0
    return 0.0, 0.0


def _pick(history: History, rank: int, what: str, where: dict[str, Any], key: str | None) -> Tensor:
    value = history.get(rank, what, **where)
    return as_tensor(value if key is None else value[key])


def distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape; infinite if a NaN stands alone."""
    if not left.numel() or (left.dtype == right.dtype and torch.equal(left, right)):
        return 0.0
    a, b = left.double(), right.double()
    difference = (a - b).abs()
    largest = float(difference.max())
    if math.isfinite(largest):
        return largest
    difference = torch.where(a == b, 0.0, difference)
    both_nan = a.isnan() & b.isnan()
    return float(
        torch.where(both_nan, 0.0, difference).nan_to_num(nan=torch.inf, posinf=torch.inf).max()
    )
