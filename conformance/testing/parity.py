"""Train a wrapped model beside the unsharded one, and compare losses, gradients and parameters.

Runs on ranks. The bound of each comparison is measured: what the unsharded run itself is off by in
float64, and with its ranks added in the other order. Must not know test classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, StepResult, Wrapped, to_cpu
from conformance.adapters import make_adapter
from conformance.gather import full_copies
from conformance.models import ModelCase, map_tensors, move
from conformance.optimizers import OPTIMIZERS
from conformance.oracle import VirtualRanks, rank_seed
from conformance.per_rank import PerRank
from conformance.testing.place import here
from conformance.tolerance import FACTOR, ULPS, distance

__all__ = ["Parity", "assert_parity"]

Reference = dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How to train.

    Attributes:
        steps: optimizer steps.
        accumulation: micro-batches per step.
        optimizer: made over the wrapped parameters; it should have weight decay, without which a
            missing gradient and a zero one give the same parameters.
        options: of the adapter's variant, over those of a variant given by name.
        compute_dtype: dtype of forward and backward with float32 parameters, for mixed precision;
            None computes in float32.
        max_norm: clip to this norm, None for no clipping.
        seed: of the ranks' random numbers.
    """

    steps: int = 3
    accumulation: int = 1
    optimizer: OptimizerFactory = OPTIMIZERS["sgd"]
    options: Mapping[str, Any] = field(default_factory=dict)
    compute_dtype: torch.dtype | None = None
    max_norm: float | None = None
    seed: int = 0


def assert_parity(
    adapter: Adapter | str,
    model: ModelCase,
    *,
    variant: str = "default",
    parity: Parity | None = None,
) -> None:
    """Fail unless the wrapped model trains like the unsharded one.

    Every rank has its own data. Losses of each micro-batch, reduced gradients of each step (if the
    adapter claims "gradients") and parameters after each step are compared.

    Args:
        adapter: an adapter, or the name of one.
        model: what to train.
        variant: of an adapter given by name.
        parity: how to train.

    Collective: the wrapper's own, and those of the adapter's side doors.

    Raises:
        AssertionError: what is off, with its place, error and bound.
        conformance.Refusal: the wrapper refuses the configuration.
    """
    how = parity or Parity()
    options = dict(how.options)
    if isinstance(adapter, str):
        adapter, named = make_adapter(adapter, variant)
        options = {**named, **options}
    seen = _Training(how=how, model=model, adapter=adapter, options=options).run()
    references = [
        _reference(how, model, adapter, options, **flavour)
        for flavour in ({}, {"double": True}, {"reverse": True})
    ]
    wrong = list(filter(None, (_difference(what, seen, references) for what in references[0])))
    extra = sorted(seen.keys() - references[0].keys())
    if extra:
        wrong.append(f"the unsharded model has no {extra[0]}")
    if wrong:
        more = f"\nand {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise AssertionError(
            f"{type(adapter).__name__} does not train {model.name} like the "
            "unsharded model: " + "\n".join(wrong[:5]) + more
        )


@dataclass(kw_only=True)
class _Training:
    """One run: of the wrapper on this rank, or of the oracle for all ranks."""

    how: Parity
    model: ModelCase
    adapter: Adapter
    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None

    def run(self) -> Reference:
        """Train; gives everything observed by what it is."""
        device = here().device
        config = BuildConfig(
            device=device,
            world_size=dist.get_world_size(),
            units=self.model.units,
            options=self.options,
            accumulation=self.how.accumulation,
            unused_parameters=self.model.leaves_out,
            unused_on_some_ranks=self.model.routes and dist.get_world_size() > 1,
            max_norm=self.how.max_norm,
        )
        module = self.model.build().to(device=device)
        if self.dtype != torch.float32:
            module = module.to(self.dtype)
        wrapped = self.adapter.build(module, self.how.optimizer, config)
        torch.manual_seed(rank_seed(self.how.seed, dist.get_rank()))
        found: Reference = {}
        for step in range(self.how.steps):
            wrapped.observe = self._observer(wrapped, step, found)
            self._add(found, step, self._step(wrapped, step))
            for fqn, parameter in full_copies(self.adapter.full_parameters(wrapped)).items():
                found[f"parameter {fqn} after step {step}"] = parameter
        return found

    def _step(self, wrapped: Wrapped, step: int) -> StepResult:
        batches = [self._batch(step, micro) for micro in range(self.how.accumulation)]
        return self.adapter.step(wrapped, batches, self._loss, max_norm=self.how.max_norm)

    def _loss(self, module: nn.Module, batch: Any) -> Tensor:
        called: Any = module
        if self.compute_dtype is not None:
            called = _InLowPrecision(module, self.compute_dtype)
        return self.model.loss(called, batch)

    def _batch(self, step: int, micro: int) -> Any:
        if isinstance(self.adapter, VirtualRanks):
            return PerRank(tuple(self._of_rank(r, step, micro) for r in range(self.adapter.world)))
        return self._of_rank(dist.get_rank(), step, micro)

    def _of_rank(self, rank: int, step: int, micro: int) -> Any:
        batch = move(self.model.batch(rank, step, micro), here().device)
        return map_tensors(lambda tensor: _cast(tensor, self.dtype), batch)

    def _observer(self, wrapped: Wrapped, step: int, found: Reference) -> Callable[..., None]:
        def observe(moment: str, index: int = 0) -> None:
            if moment == "gradients" and "gradients" in self.adapter.capabilities:
                for fqn, gradient in full_copies(self.adapter.full_gradients(wrapped)).items():
                    found[f"gradient of {fqn} in step {step}"] = gradient

        return observe

    def _add(self, found: Reference, step: int, result: StepResult) -> None:
        for micro, loss in enumerate(result.losses):
            given: Any = loss
            own = given.values[dist.get_rank()] if isinstance(given, PerRank) else given
            found[f"loss of micro-batch {micro} in step {step}"] = to_cpu(own)


def _reference(
    how: Parity,
    model: ModelCase,
    adapter: Adapter,
    options: Mapping[str, Any],
    *,
    double: bool = False,
    reverse: bool = False,
) -> Reference:
    """The unsharded run, in one of its flavours. The random state is as it was afterwards."""
    oracle = VirtualRanks(
        dist.get_world_size(), adapter.conventions, adapter.capabilities, seed=how.seed,
        reverse=reverse,
    )  # fmt: skip
    training = _Training(
        how=how,
        model=model,
        adapter=oracle,
        options=options,
        dtype=torch.float64 if double else torch.float32,
        compute_dtype=None if double else how.compute_dtype,
    )
    found = training.run()
    if "gradients" not in adapter.capabilities:
        return {what: value for what, value in found.items() if not what.startswith("gradient ")}
    return found


def _difference(what: str, seen: Reference, references: list[Reference]) -> str:
    """Why one observation is wrong, "" if it is right."""
    if what not in seen:
        return f"{what}: the wrapper has none"
    got, wanted = seen[what], references[0][what]
    if got is None or wanted is None:
        return "" if got is wanted else f"{what}: got {_kind(got)}, expected {_kind(wanted)}"
    if got.shape != wanted.shape:
        return f"{what}: got shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    noise = max(distance(other[what], wanted) for other in references[1:])  # type: ignore[arg-type]
    scale = float(wanted.double().abs().max()) if wanted.numel() else 0.0
    precise = min((got.dtype, wanted.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    bound = FACTOR * noise + ULPS * torch.finfo(precise).eps * scale
    error = distance(got, wanted)
    if error <= bound:
        return ""
    index = int((got.double() - wanted.double()).abs().nan_to_num(nan=torch.inf).argmax())
    one, other = got.flatten()[index].item(), wanted.flatten()[index].item()
    return f"{what}: off by {error:.3g}, allowed {bound:.3g}; [{index}] is {one}, expected {other}"


def _kind(value: Tensor | None) -> str:
    return "none" if value is None else "a tensor"


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class _InLowPrecision:
    """A module whose forward computes with casts of its parameters and inputs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = {n: _cast(p, self._dtype) for n, p in self._module.named_parameters()}
        args, kwargs = tree_map(lambda leaf: _cast(leaf, self._dtype), (args, kwargs))
        return functional_call(self._module, parameters, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
