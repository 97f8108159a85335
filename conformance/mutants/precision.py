"""Defects that only a wrapper in low precision can have, planted in real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    Conventions,
    LossFn,
    OptimizerFactory,
    Wrapped,
)
from conformance.adapters.precision import MIXED
from conformance.causes import Cause
from conformance.mutants.registry import mutant
from conformance.mutants.training import ForwardWithStaleParameters

COMPOSABLE = "conformance.adapters.fsdp_composable:PrecisionAdapter"
FLAT = "conformance.adapters.fsdp_wrapper:PrecisionAdapter"


class OtherDtypes(Adapter):
    """Base of what is built with other dtypes than those that were asked for."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Build with them."""
        options = {**config.options, "dtypes": self.changed(dict(config.options["dtypes"]))}
        return super().build(model, make_optimizer, replace(config, options=options))

    def changed(self, dtypes: dict[str, Any]) -> Mapping[str, Any]:
        """The dtypes that the wrapper gets."""
        raise NotImplementedError


@mutant(
    check="losses.value",
    cause=Cause.WRONG_DTYPE,
    case="mlp/train/optimizer=sgd",
    base=COMPOSABLE,
    variant=MIXED,
    world=1,
)
class ComputesInFloat32(OtherDtypes):
    """Forward and backward run in float32 although bfloat16 was asked for."""

    def changed(self, dtypes: dict[str, Any]) -> Mapping[str, Any]:
        """No dtype of parameters."""
        return {"reduce_dtype": dtypes["reduce_dtype"]}


@mutant(
    check="losses.fresh",
    cause=Cause.STALE,
    case="transformer/train/optimizer=sgd",
    base=COMPOSABLE,
    variant=MIXED,
    world=1,
)
class ForwardWithOlderParametersInShort(ForwardWithStaleParameters):
    """Forward uses the parameters of the step before, and no loss alone has digits to tell."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """What an evaluation has left gathered is given up before values are swapped."""
        wrapped: Any = w.module
        wrapped.reshard()
        return super().forward(w, batch, loss_fn)


@mutant(
    check="dtypes.reduced",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/train/optimizer=sgd",
    base=COMPOSABLE,
    variant=MIXED,
    bugs=("pytorch/pytorch#106395", "pytorch/pytorch#186998"),
)
class ReducedAsComputed(OtherDtypes):
    """Gradients are reduced in the dtype of the computation although float32 was asked for."""

    def changed(self, dtypes: dict[str, Any]) -> Mapping[str, Any]:
        """No dtype of the reduction."""
        return {"param_dtype": dtypes["param_dtype"]}


@mutant(
    check="gradients.value",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/train/accumulation=3,optimizer=sgd",
    base=FLAT,
    variant=MIXED,
    world=1,
)
class WaitsAsComputed(Adapter):
    """Micro-batches are added up in the dtype of the computation, and float32 was promised."""

    conventions = Conventions(
        unused_grad="unit",
        gathered_as="bfloat16",
        computes_as="bfloat16",
        accumulates_as="float32",
        reduced_as="float32",
        buffers_as="bfloat16",
        casts_inputs="root",
    )


@mutant(
    check="clip.norm",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/train/optimizer=sgd",
    base=FLAT,
    variant=MIXED,
    world=1,
)
class NormInBfloat16(Adapter):
    """The norm for clipping is taken in the dtype of the computation."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Round it as it is there."""
        norm = super().clip_grad_norm(w, max_norm, norm_type)
        return norm.bfloat16().float() if isinstance(norm, Tensor) else norm


@mutant(
    check="dtypes.results",
    cause=Cause.WRONG_DTYPE,
    case="mlp/train/optimizer=sgd",
    base=FLAT,
    variant=MIXED,
    bugs=("pytorch/pytorch#85134", "pytorch/pytorch#111317"),
    world=1,
)
class GradientsKeptAsComputed(OtherDtypes):
    """The optimizer gets gradients in bfloat16 beside weights in float32."""

    def changed(self, dtypes: dict[str, Any]) -> Mapping[str, Any]:
        """They are not cast back."""
        return {**dtypes, "keep_low_precision_grads": True}

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """The kernels for many parameters at once, default on accelerators, take one dtype only."""
        one_by_one = {**make_optimizer.defaults, "foreach": False}
        return super().build(model, replace(make_optimizer, defaults=one_by_one), config)


@mutant(
    check="dtypes.results",
    cause=Cause.WRONG_DTYPE,
    case="transformer/train/optimizer=sgd",
    base=COMPOSABLE,
    variant=f"{MIXED},output_dtype=float32",
    world=1,
)
class ResultsAsComputed(OtherDtypes):
    """The model returns what it computes in bfloat16 although float32 was asked for."""

    def changed(self, dtypes: dict[str, Any]) -> Mapping[str, Any]:
        """No dtype of results."""
        return {name: dtype for name, dtype in dtypes.items() if name != "output_dtype"}
