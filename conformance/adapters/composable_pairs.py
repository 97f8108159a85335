"""Variants in which any two options of ``fully_shard`` meet: a covering array.

Resharding, meshes, offloading and dtypes make 36 combinations; nine rows hold every pair of values.
It is a literal, as that of wrapper classes (`conformance.adapters.covering`) is.

Knows the arguments that such wrappers have in common. Imports no wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import starmap
from typing import Any, ClassVar

from torch import nn

from conformance.adapter import BuildConfig, OptimizerFactory, Wrapped
from conformance.adapters.precision import FLOAT32, ComposablePrecision

ROWS: tuple[tuple[bool | int, bool, bool, str | None], ...] = (
    # reshard_after_forward, hybrid, offloaded, what is float64
    (True, False, True, None),
    (True, True, False, "param_dtype"),
    (True, False, True, "reduce_dtype"),
    (False, True, True, None),
    (False, False, True, "param_dtype"),
    (False, False, False, "reduce_dtype"),
    (1, True, False, None),
    (1, False, True, "param_dtype"),
    (1, True, True, "reduce_dtype"),
)


def pairs() -> dict[str, dict[str, Any]]:
    """The rows as variants."""
    return dict(starmap(_variant, ROWS))


def _variant(
    reshard: bool | int,  # noqa: FBT001 - a row's columns
    hybrid: bool,  # noqa: FBT001
    offloaded: bool,  # noqa: FBT001
    doubled: str | None,
) -> tuple[str, dict[str, Any]]:
    names = [f"reshard_after_forward={reshard}"]
    names += ["hybrid"] if hybrid else []
    names += ["cpu_offload"] if offloaded else []
    names += [] if doubled is None else [f"{doubled}=float64"]
    return ",".join(names), {
        "reshard_after_forward": reshard,
        "cpu_offload": offloaded,
        # losses are float32 numbers, whatever a model computes in
        "dtypes": {} if doubled is None else {doubled: "float64", "output_dtype": FLOAT32},
        **({"replicas": 1} if hybrid else {}),
    }


class PairsOfComposable(ComposablePrecision):
    """Takes the options of the covering array.

    Class attributes:
        offload: the wrapper's policy of offloading, made with ``pin_memory``.
    """

    variants = pairs()
    offload: ClassVar[Callable[..., Any]]

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Build with the options in the wrapper's own types."""
        options = dict(config.options)
        if options.pop("cpu_offload"):
            # no host memory is pinned for a device that is the host
            options["offload_policy"] = type(self).offload(pin_memory=config.device.type != "cpu")
        return super().build(model, make_optimizer, replace(config, options=options))
