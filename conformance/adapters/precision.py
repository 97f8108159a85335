"""Variants that compute and reduce in low dtypes, for both faces.

Knows the arguments that such wrappers have in common. Imports no wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from conformance.adapter import (
    BuildConfig,
    Conventions,
    OptimizerFactory,
    TravelDtype,
    Wrapped,
    named_parameters,
)
from conformance.adapters.composable import ComposableAdapter
from conformance.adapters.wrapping import HYBRID, WrapperAdapter

BFLOAT16, FLOAT16, FLOAT32 = "bfloat16", "float16", "float32"

MIXED = "param_dtype=bfloat16,reduce_dtype=float32"
"""The usual choice, by its name as a variant."""

DTYPES: Mapping[str, Mapping[str, str]] = {
    "param_dtype=bfloat16": {"param_dtype": BFLOAT16},
    MIXED: {"param_dtype": BFLOAT16, "reduce_dtype": FLOAT32},
    "param_dtype=float16,reduce_dtype=float32": {"param_dtype": FLOAT16, "reduce_dtype": FLOAT32},
    "reduce_dtype=bfloat16": {"reduce_dtype": BFLOAT16},
}
"""What both faces take."""


def composable_variants() -> dict[str, dict[str, Any]]:
    """Every choice of dtypes, a result in float32, and other ways to keep parameters."""
    mixed = DTYPES[MIXED]
    return {
        **{name: {"dtypes": dtypes} for name, dtypes in DTYPES.items()},
        f"{MIXED},output_dtype=float32": {"dtypes": {**mixed, "output_dtype": FLOAT32}},
        f"reshard_after_forward=False,{MIXED}": {"dtypes": mixed, "reshard_after_forward": False},
        f"hybrid,{MIXED}": {"dtypes": mixed, "replicas": 1},
    }


def flat_variants() -> dict[str, dict[str, Any]]:
    """Every choice of dtypes, buffers in bfloat16, and each strategy once."""
    mixed = DTYPES[MIXED]
    buffers = {**mixed, "buffer_dtype": BFLOAT16}
    found = {name: _flat(dtypes) for name, dtypes in DTYPES.items()}
    found[f"use_orig_params,{MIXED},buffer_dtype=bfloat16"] = _flat(buffers, original=True)
    for original, strategy in (
        (True, "SHARD_GRAD_OP"),
        (False, "NO_SHARD"),
        (True, "HYBRID_SHARD"),
        (False, "_HYBRID_SHARD_ZERO2"),
    ):
        prefix = "use_orig_params," if original else ""
        found[f"{prefix}{strategy},{MIXED}"] = _flat(mixed, original=original, strategy=strategy)
    return found


def _flat(
    dtypes: Mapping[str, str], *, original: bool = False, strategy: str = "FULL_SHARD"
) -> dict[str, Any]:
    return {
        "use_orig_params": original,
        "sharding_strategy": strategy,
        "dtypes": dtypes,
        **({"replicas": 1} if strategy in HYBRID else {}),
    }


def keeping(
    conventions: Conventions, dtypes: Mapping[str, str], *, inputs: Literal["root", "units"]
) -> Conventions:
    """`conventions` with what `dtypes` make of them; `inputs`: whose are cast for a computation."""
    computes = cast(TravelDtype, dtypes.get("param_dtype", "parameter"))
    return replace(
        conventions,
        gathered_as=computes,
        computes_as=computes,
        reduced_as=cast(TravelDtype, dtypes.get("reduce_dtype", computes)),
        buffers_as=computes,
        casts_inputs=inputs if "param_dtype" in dtypes else "none",
        returns_as=cast(TravelDtype, dtypes.get("output_dtype", "parameter")),
    )


def in_torch(dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `dtypes` name, as a wrapper takes them."""
    return {k: getattr(torch, v) if isinstance(v, str) else v for k, v in dtypes.items()}


def lower_buffers(model: nn.Module, dtypes: Mapping[str, str]) -> None:
    """Cast floating buffers to the parameters' low dtype: kernels of norms want one for both.

    Unless the wrapper is told to do so, its user has to.
    """
    wanted = dtypes.get("param_dtype")
    if wanted is None or "buffer_dtype" in dtypes:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(getattr(torch, wanted))


class ComposablePrecision(ComposableAdapter):
    """Mixed into an adapter of a ``fully_shard``.

    Class attributes:
        precision: the wrapper's policy of dtypes.
    """

    precision: ClassVar[Callable[..., Any]]
    variants = composable_variants()

    def configure(self, options: Mapping[str, Any]) -> None:
        """What is declared of dtypes: micro-batches wait in the dtype of the reduction."""
        super().configure(options)
        declared = keeping(self.conventions, options["dtypes"], inputs="units")
        self.conventions = replace(declared, accumulates_as=declared.reduced_as)

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Build with one policy for all units; the dtype of results is the root's alone."""
        options = dict(config.options)
        dtypes = options.pop("dtypes")
        lower_buffers(model, dtypes)
        options["mp_policy"] = type(self).precision(**in_torch(dtypes))
        w = super().build(model, make_optimizer, replace(config, options=options))
        w.native = dict(named_parameters(model))
        return w

    def of_unit(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Another unit would have to take what a unit returns."""
        return {**options, "mp_policy": replace(options["mp_policy"], output_dtype=None)}

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """Of the shards that were there at first: after an evaluation a copy may take their place.

        That of the root, say, which is whole until the next step, and in a low dtype.
        """
        return {fqn: p.detach() for fqn, p in w.native.items()}


class FlatPrecision(WrapperAdapter):
    """Mixed into an adapter of a ``FullyShardedDataParallel``.

    Class attributes:
        precision: the wrapper's option of dtypes.
    """

    precision: ClassVar[Callable[..., Any]]
    variants = flat_variants()

    def configure(self, options: Mapping[str, Any]) -> None:
        """What is declared of dtypes: micro-batches wait in the dtype of the computation."""
        super().configure(options)
        declared = keeping(self.conventions, options["dtypes"], inputs="root")
        self.conventions = replace(declared, accumulates_as=declared.computes_as)

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Build with one choice of dtypes for all units, and no exception for norms."""
        options = dict(config.options)
        dtypes = options.pop("dtypes")
        lower_buffers(model, dtypes)
        options["mixed_precision"] = type(self).precision(
            **in_torch(dtypes), _module_classes_to_ignore=()
        )
        return super().build(model, make_optimizer, replace(config, options=options))
