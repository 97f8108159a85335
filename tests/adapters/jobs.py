"""What ranks run in these tests: an adapter on a small model, beside the same model unwrapped.

Every rank gets the same batches, so the mean over ranks is what one process computes alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from conformance import models
from conformance.adapter import (
    Adapter,
    BuildConfig,
    OptimizerFactory,
    StateKind,
    Wrapped,
    named_parameters,
)
from conformance.adapters import adapter_class, make_adapter
from conformance.gather import full_copies
from conformance.optimizers import OPTIMIZERS, with_other_hyperparameters
from conformance.ranks import RankContext

TOLERANCE = 1e-5
STEPS = 2
ADAMW = OPTIMIZERS["adamw"]
SGD = OPTIMIZERS["sgd"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One adapter variant on one model case.

    Attributes:
        adapter: drives the wrapper.
        options: of its variant.
        model: the model case.
        context: of this rank.
    """

    adapter: Adapter
    options: Any
    model: models.ModelCase
    context: RankContext

    @classmethod
    def of(cls, context: RankContext, adapter: str, variant: str, model: str) -> Pair:
        """By the names of all three."""
        driver, options = make_adapter(adapter, variant)
        return cls(adapter=driver, options=options, model=models.case(model), context=context)

    def wrapped(self, factory: OptimizerFactory = ADAMW, *, shift: float = 0.0) -> Wrapped:
        """The wrapped model, its weights moved by `shift`."""
        config = BuildConfig(
            device=self.context.device,
            world_size=self.context.world_size,
            units=self.model.units,
            options=self.options,
            unused_parameters=self.model.leaves_out,
        )
        return self.adapter.build(shifted(self.model.build(), shift), factory, config)

    def train(self, w: Wrapped, first: int = 0, steps: int = STEPS) -> dict[str, Any]:
        """Steps through the adapter; returns the side door's gradients of the last."""
        seen: dict[str, Any] = {}

        def observe(moment: str, index: int = 0) -> None:
            if moment == "gradients":
                seen.update(full_copies(self.adapter.full_gradients(w)))

        w.observe = observe
        for step in range(first, first + steps):
            self.adapter.step(w, [self.model.batch(0, step, 0)], self.model.loss)
        return seen


def shifted(module: nn.Module, shift: float) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(shift)
    return module


def plain(
    model: models.ModelCase, steps: int, factory: OptimizerFactory = ADAMW
) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    """The module trained by hand, its optimizer, and the gradients of the last step."""
    module = model.build()
    optimizer = factory(module.parameters())
    gradients: dict[str, Any] = {}
    for step in range(steps):
        model.loss(module, model.batch(0, step, 0)).backward()
        gradients = {
            fqn: None if p.grad is None else p.grad.clone() for fqn, p in named_parameters(module)
        }
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer, gradients


def differences(got: Any, expected: Any, path: str = "") -> list[str]:
    """Where two trees of tensors differ by more than rounding, in words."""
    if isinstance(expected, dict):
        lost = [f"{path}{key} is missing" for key in expected if key not in got]
        lost += [f"{path}{key} should not exist" for key in got if key not in expected]
        both = [key for key in expected if key in got]
        inner = (differences(got[key], expected[key], f"{path}{key} ") for key in both)
        return [*lost, *(word for words in inner for word in words)]
    if got is None or expected is None or not torch.is_tensor(expected):
        return [] if got is expected or got == expected else [f"{path}is {got}, not {expected}"]
    if got.device.type != "cpu":
        return [f"{path}is on {got.device}"]
    if got.shape != expected.shape:
        return [f"{path}has shape {tuple(got.shape)}, not {tuple(expected.shape)}"]
    error = float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0
    return [f"{path}is off by {error:.3g}"] if not error <= TOLERANCE else []


def side_doors(context: RankContext, *, adapter: str, variant: str, model: str) -> list[str]:
    """Where the three side doors differ from a plain module's training."""
    pair = Pair.of(context, adapter, variant, model)
    w = pair.wrapped()
    start = full_copies(pair.adapter.full_parameters(w))
    expected_start = {fqn: p.detach() for fqn, p in named_parameters(pair.model.build())}
    found = differences(start, expected_start, "built: ")
    gradients = pair.train(w)
    module, optimizer, expected = plain(pair.model, STEPS)
    if pair.adapter.conventions.unused_grad == "unit":
        # no plain module has this convention; the conformance checks judge it
        gradients = {k: v for k, v in gradients.items() if expected[k] is not None}
        expected = {k: v for k, v in expected.items() if v is not None}
    trained = {fqn: p.detach() for fqn, p in named_parameters(module)}
    states = {
        fqn: optimizer.state[p] for fqn, p in named_parameters(module) if p in optimizer.state
    }
    found += differences(gradients, expected, "gradient: ")
    if "unused" not in pair.model.traits:
        found += differences(full_copies(pair.adapter.full_parameters(w)), trained, "trained: ")
        found += differences(full_state(pair.adapter, w), states, "state: ")
    return found


def round_trip(
    context: RankContext, *, adapter: str, variant: str, model: str, kind: StateKind | str
) -> list[str]:
    """Where a fresh pair differs from the saved one after loading, and after one more step."""
    pair = Pair.of(context, adapter, variant, model)
    saved = pair.wrapped()
    pair.train(saved)
    fresh = pair.wrapped(with_other_hyperparameters(ADAMW), shift=0.5)
    if kind == "save":
        pair.adapter.save(saved, context.directory / "checkpoint")
        pair.adapter.load(fresh, context.directory / "checkpoint")
    else:
        state_kind: Any = kind
        state = pair.adapter.model_state(saved, state_kind)
        optimizer = pair.adapter.optim_state(saved, state_kind)
        pair.adapter.load_model_state(fresh, state_kind, state)
        pair.adapter.load_optim_state(fresh, state_kind, optimizer)
    found = pair_differences(pair.adapter, fresh, saved, "loaded: ")
    # a third pair, because states in memory share tensors with the pair that gave them
    uninterrupted = pair.wrapped()
    pair.train(uninterrupted, steps=STEPS + 1)
    pair.train(fresh, STEPS, 1)
    return found + pair_differences(pair.adapter, fresh, uninterrupted, "one step later: ")


def full_state(adapter: Adapter, w: Wrapped) -> dict[str, dict[str, Any]]:
    """The side door's optimizer state, whole and copied."""
    return {fqn: full_copies(state) for fqn, state in adapter.full_optimizer_state(w).items()}


def pair_differences(adapter: Adapter, got: Wrapped, expected: Wrapped, path: str) -> list[str]:
    return [
        *differences(
            full_copies(adapter.full_parameters(got)),
            full_copies(adapter.full_parameters(expected)),
            path,
        ),
        *differences(full_state(adapter, got), full_state(adapter, expected), path),
        *(
            []
            if json.dumps(adapter.hyperparameters(got))
            == json.dumps(adapter.hyperparameters(expected))
            else [f"{path}hyper-parameters are {adapter.hyperparameters(got)}"]
        ),
    ]


def explicit_full_state(context: RankContext, *, adapter: str, variant: str) -> list[str]:
    """What is wrong with a full state on CPU for rank 0 alone, and after loading it."""
    pair = Pair.of(context, adapter, variant, "mlp")
    saved, fresh = pair.wrapped(), pair.wrapped(shift=0.5)
    pair.train(saved)
    state = pair.adapter.model_state(saved, "full", cpu=True, rank0_only=True)
    optimizer = pair.adapter.optim_state(saved, "full", cpu=True, rank0_only=True)
    found = [] if bool(state) == (context.rank == 0) else [f"rank {context.rank}: {list(state)}"]
    pair.adapter.load_model_state(fresh, "full", state)
    pair.adapter.load_optim_state(fresh, "full", optimizer)
    return found + pair_differences(pair.adapter, fresh, saved, "loaded: ")


def every_variant_builds(context: RankContext, *, adapter: str, wrong: list[str]) -> list[str]:
    """What building and one step say, variant by variant; values only of those not in `wrong`."""
    found: list[str] = []
    for variant in adapter_class(adapter).variants:
        pair = Pair.of(context, adapter, variant, "mlp")
        w = pair.wrapped(SGD)
        pair.train(w, steps=1)
        expected = {fqn: p.detach() for fqn, p in named_parameters(plain(pair.model, 1, SGD)[0])}
        got = full_copies(pair.adapter.full_parameters(w))
        found += differences(got, got if variant in wrong else expected, f"[{variant}] ")
    return found


def remarks(context: RankContext, *, adapter: str, variant: str, model: str) -> list[str]:
    """What the adapter remarks about a build."""
    return list(Pair.of(context, adapter, variant, model).wrapped().remarks)


def parts(context: RankContext, *, adapter: str, variant: str) -> dict[str, int]:
    """Elements that this rank stores, and elements of the whole model."""
    pair = Pair.of(context, adapter, variant, "mlp")
    w = pair.wrapped()
    pair.train(w, steps=1)
    held = pair.adapter.local_tensors(w)
    return {
        key: sum(t.untyped_storage().nbytes() // 4 for t in v) for key, v in _once(held).items()
    } | {"whole": sum(p.numel() for p in pair.model.build().parameters())}


def _once(held: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """Each storage once."""
    return {
        key: list({t.untyped_storage().data_ptr(): t for t in tensors}.values())
        for key, tensors in held.items()
    }
