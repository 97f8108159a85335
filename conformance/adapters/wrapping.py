"""What adapters of wrapper classes with flat parameters share: variants, building, side doors.

Knows the constructor that such classes have in common. Imports no wrapper.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, Conventions, OptimizerFactory, Wrapped
from conformance.adapters import flat
from conformance.adapters.meshes import hybrid_mesh, meshes_of_four
from conformance.adapters.refusals import refusals

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)


def variants() -> dict[str, dict[str, Any]]:
    """Both kinds of parameters under every strategy; hybrid meshes are (replicas, the rest)."""
    table: dict[str, dict[str, Any]] = {}
    for original in (False, True):
        for strategy in STRATEGIES:
            names = ["use_orig_params"] if original else []
            names += [] if strategy == "FULL_SHARD" else [strategy]
            table[",".join(names) or "default"] = {
                "use_orig_params": original,
                "sharding_strategy": strategy,
                **({"replicas": 1} if strategy in HYBRID else {}),
            }
    for original in (False, True):
        name = "use_orig_params,HYBRID_SHARD,replicas=2" if original else "HYBRID_SHARD,replicas=2"
        table[name] = {
            "use_orig_params": original,
            "sharding_strategy": "HYBRID_SHARD",
            "replicas": 2,
        }
    return table


def hybrid_variants() -> dict[str, dict[str, Any]]:
    """Hybrid sharding over every mesh of four ranks, with both kinds of parameters."""
    hybrid = "HYBRID_SHARD"
    flat = meshes_of_four(use_orig_params=False, sharding_strategy=hybrid)
    original = meshes_of_four(use_orig_params=True, sharding_strategy=hybrid)
    return flat | {f"use_orig_params,{name}": options for name, options in original.items()}


class WrapperAdapter(Adapter):
    """Wraps the units that the model case names, then the root.

    Class attributes:
        wrapper: the class.
        strategies: its enumeration of sharding strategies.
        policy: makes the policy that wraps modules of a set of classes.
    """

    wrapper: ClassVar[Any]
    strategies: ClassVar[Any]
    policy: ClassVar[Any]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = variants()

    # one flat gradient per unit: a unit that took part has zeros where a parameter did not
    conventions = Conventions(unused_grad="unit")

    def configure(self, options: Mapping[str, Any]) -> None:
        """Claims by strategy."""
        strategy = options["sharding_strategy"]
        if strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            self.capabilities |= {"memory.reshard"}
        if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            self.conventions = replace(self.conventions, gathers="once")
        if strategy == "NO_SHARD":
            self.capabilities -= {"shard.parameters", "shard.optimizer"}
        self.replicas = options.get("replicas", 1)

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap by module class; the optimizer is made over what the wrapper exposes."""
        own, options = type(self), dict(config.options)
        strategy = own.strategies[options.pop("sharding_strategy")]
        replicas = options.pop("replicas", None)
        if replicas is not None:
            options["device_mesh"] = hybrid_mesh(config, replicas)
        with strategy_warnings_ignored(), refusals():
            wrapped = own.wrapper(
                model,
                sharding_strategy=strategy,
                auto_wrap_policy=own.policy(set(config.units)),
                device_id=config.device,
                **options,
            )
        return Wrapped(module=wrapped, optimizer=make_optimizer(wrapped.parameters()))

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """The wrapper's own context."""
        context: AbstractContextManager[Any] = w.module.no_sync()  # type: ignore[operator]
        return context

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor:
        """The wrapper's own method, which sees all shards."""
        norm: Tensor = w.module.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator]
        return norm

    def entries(self, root: nn.Module) -> list[flat.Entry]:
        """Every original parameter of every flat parameter under `root`."""
        raise NotImplementedError(f"{type(self).__name__} has no entries()")

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """Gathered by position."""
        return flat.full_parameters(self.entries(w.module))

    def full_gradients(self, w: Wrapped) -> dict[str, Tensor | None]:
        """Gathered by position."""
        return flat.full_gradients(self.entries(w.module))

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """Gathered by position."""
        return flat.full_optimizer_state(self.entries(w.module), w.optimizer)


@contextmanager
def strategy_warnings_ignored() -> Iterator[None]:
    """Inside, NO_SHARD is not reported as deprecated, nor as the choice for a single rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        yield
