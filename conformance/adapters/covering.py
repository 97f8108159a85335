"""Variants in which any two options of a flat-parameter wrapper meet: a covering array.

Kinds of parameters, strategies, prefetching, offloading and dtypes make 180 combinations; the table
has fifteen rows, and every pair of values stands in one of them. It is a literal, so that the names
of variants, which stand in ids and expectations, never change; a test counts the pairs.

Knows the arguments that such wrappers have in common. Imports no wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from conformance.adapter import BuildConfig, LossFn, OptimizerFactory, Refusal, Wrapped
from conformance.adapters.wrapping import HYBRID, WrapperAdapter

# Low precision has adapters of its own, in `conformance.adapters.precision`, and rounds where a bug
# may hide. Higher precision goes the same ways, casts parameters, inputs, gradients and back, and
# keeps to the bounds of float32.
DTYPES = ("reduce_dtype", "param_dtype")

ROWS: tuple[tuple[bool, str, str | None, bool, str | None], ...] = (
    # original, strategy, backward prefetch, offloaded, what is float64
    (True, "FULL_SHARD", "BACKWARD_PRE", True, "param_dtype"),
    (False, "FULL_SHARD", "BACKWARD_POST", False, "reduce_dtype"),
    (True, "FULL_SHARD", None, False, None),
    (False, "SHARD_GRAD_OP", "BACKWARD_PRE", False, "param_dtype"),
    (True, "SHARD_GRAD_OP", "BACKWARD_POST", False, None),
    (False, "SHARD_GRAD_OP", None, True, "reduce_dtype"),
    (True, "NO_SHARD", "BACKWARD_PRE", True, "reduce_dtype"),
    (False, "NO_SHARD", "BACKWARD_POST", False, "param_dtype"),
    (True, "NO_SHARD", None, True, None),
    (False, "HYBRID_SHARD", "BACKWARD_PRE", True, None),
    (True, "HYBRID_SHARD", "BACKWARD_POST", False, "param_dtype"),
    (True, "HYBRID_SHARD", None, False, "reduce_dtype"),
    (True, "_HYBRID_SHARD_ZERO2", "BACKWARD_PRE", False, "reduce_dtype"),
    (True, "_HYBRID_SHARD_ZERO2", "BACKWARD_POST", True, None),
    (False, "_HYBRID_SHARD_ZERO2", None, False, "param_dtype"),
)
FOUR_RANKS = (0, 4, 7, 11, 14)
"""Rows that four ranks are worth: each strategy once, the hybrid ones in two replicas."""


def covering(*, replicas: int = 1) -> dict[str, dict[str, Any]]:
    """The rows as variants, by names that all contain ``prefetch=``.

    Args:
        replicas: of the hybrid strategies. With two, only the rows for four ranks.
    """
    rows = ROWS if replicas == 1 else tuple(ROWS[index] for index in FOUR_RANKS)
    made = dict(starmap(_variant, rows))
    if replicas == 1:
        return made
    return {
        f"{name},replicas={replicas}": {**options, "replicas": replicas}
        for name, options in made.items()
        if "replicas" in options
    }


def pairs() -> dict[str, dict[str, Any]]:
    """All rows, and those in two replicas, as the variants of an adapter."""
    return {**covering(), **covering(replicas=2)}


def at_four_ranks() -> list[str]:
    """The variants that four ranks are worth, by name."""
    plain = [ROWS[index] for index in FOUR_RANKS if ROWS[index][1] not in HYBRID]
    return [*dict(starmap(_variant, plain)), *covering(replicas=2)]


def _variant(
    original: bool,  # noqa: FBT001 - a row's columns
    strategy: str,
    prefetch: str | None,
    offloaded: bool,  # noqa: FBT001
    doubled: str | None,
) -> tuple[str, dict[str, Any]]:
    names = ["use_orig_params"] if original else []
    names += [] if strategy == "FULL_SHARD" else [strategy]
    names += [f"prefetch={prefetch}"]
    names += ["cpu_offload"] if offloaded else []
    names += [] if doubled is None else [f"{doubled}=float64"]
    return ",".join(names), {
        "use_orig_params": original,
        "sharding_strategy": strategy,
        "backward_prefetch": prefetch,
        "cpu_offload": offloaded,
        "mixed_precision": doubled,
        **({"replicas": 1} if strategy in HYBRID else {}),
    }


class CoveringAdapter(WrapperAdapter):
    """Takes the options of the covering array too.

    Class attributes:
        prefetches: the wrapper's enumeration of backward prefetches.
        offload: its option of offloading, made with ``offload_params``.
        precision: its option of dtypes, made with one of `DTYPES`.
    """

    prefetches: ClassVar[Any]
    offload: ClassVar[Callable[..., Any]]
    precision: ClassVar[Callable[..., Any]]
    _computes_in_float64 = False

    def configure(self, options: Mapping[str, Any]) -> None:
        """Claims by strategy."""
        super().configure(options)
        doubled = options.get("mixed_precision")
        self._computes_in_float64 = doubled == "param_dtype"
        if doubled is not None:  # gradients travel as parameters do, unless they are told apart
            self.conventions = replace(
                self.conventions,
                gathered_as="float64" if doubled == "param_dtype" else "parameter",
                reduced_as="float64",
            )

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Build with the options in the wrapper's own types."""
        own, options = type(self), dict(config.options)
        if options.get("backward_prefetch") is not None:
            options["backward_prefetch"] = own.prefetches[options["backward_prefetch"]]
        if options.pop("cpu_offload", False):
            options["cpu_offload"] = own.offload(offload_params=True)
        dtypes = options.pop("mixed_precision", None)
        if isinstance(dtypes, str):  # what is doubled, in every module, as is declared
            if dtypes == "param_dtype" and any(isinstance(m, _BatchNorm) for m in model.modules()):
                raise Refusal("a batch norm in float64 wants its statistics in float64 too")
            dtypes = own.precision(**{dtypes: torch.float64}, _module_classes_to_ignore=())
        if dtypes is not None:
            options["mixed_precision"] = dtypes
        return super().build(model, make_optimizer, replace(config, options=options))

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """The loss in float32, also if the wrapper was told to compute in float64."""
        return self._in_float32(super().forward(w, batch, loss_fn))

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Likewise."""
        return self._in_float32(super().evaluate(w, batch, loss_fn))

    def _in_float32(self, loss: Tensor) -> Tensor:
        return loss.float() if self._computes_in_float64 else loss
