"""The optimizers that cases train with, by the name that stands in case ids.

Adam alone hides a wrong gradient scale, and a zero gradient differs from none only under weight
decay; hence SGD with momentum beside AdamW, both with decay. What looks at whole parameters stands
apart: a wrapper that cuts them may not be able to serve it, and claims it if it is.

SGD and AdamW update all parameters together on every device, as is torch's default on accelerators:
what a run on CPU says then holds there too. It is also faster: DTensor takes hardly more time for
an operator on a list of tensors than for one on a single tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import SGD, AdamW

from conformance.adapter import OptimizerFactory
from conformance.trust_ratio import TrustRatio

OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": OptimizerFactory(
        name="sgd",
        optimizer_class=SGD,
        defaults={"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "foreach": True},
    ),
    "adamw": OptimizerFactory(
        name="adamw",
        optimizer_class=AdamW,
        defaults={"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "foreach": True},
    ),
}

WHOLE_TENSOR: Mapping[str, OptimizerFactory] = {
    "trust": OptimizerFactory(
        name="trust", optimizer_class=TrustRatio, defaults={"lr": 0.05, "weight_decay": 0.01}
    ),
}
"""Optimizers for which the elements of a parameter are not enough: they need norms of it."""


def optimizer_named(name: str) -> OptimizerFactory:
    """The optimizer that a case id calls `name`."""
    return {**OPTIMIZERS, **WHOLE_TENSOR}[name]


_OTHER: Mapping[str, Mapping[str, object]] = {
    "sgd": {"lr": 0.011, "momentum": 0.5, "weight_decay": 0.2},
    "adamw": {"lr": 0.0013, "betas": (0.7, 0.8), "weight_decay": 0.3},
}


def with_other_hyperparameters(factory: OptimizerFactory) -> OptimizerFactory:
    """The same optimizer with every hyper-parameter changed: what a load must bring back."""
    return OptimizerFactory(
        name=factory.name,
        optimizer_class=factory.optimizer_class,
        defaults={**factory.defaults, **_OTHER[factory.name]},
    )
