"""Wrappers with the face of ``fully_shard``: a DTensor per parameter, no wrapper module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.adapter import (
    BuildConfig,
    OptimizerFactory,
    Refusal,
    StateKind,
    Wrapped,
    toggled,
)
from conformance.adapters import torch_checkpoint
from conformance.adapters.meshes import hybrid_mesh
from conformance.adapters.refusals import refusals
from conformance.adapters.torch_checkpoint import CheckpointDirectory

UNUSED_ANNOUNCED = (
    "built with set_reduce_scatter_unused_params(True), because some ranks use parameters that"
    " others do not"
)


class ComposableAdapter(CheckpointDirectory):
    """Shards the units that the model case names, then the root.

    Class attributes:
        shard: ``fully_shard``, called with a module, ``mesh`` and the variant's options.
    """

    shard: ClassVar[Callable[..., Any]]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "reshard_after_forward=True": {"reshard_after_forward": True},
        "reshard_after_forward=False": {"reshard_after_forward": False},
        "reshard_after_forward=1": {"reshard_after_forward": 1},
        "reshard_after_forward=2": {"reshard_after_forward": 2},
        "hybrid": {"replicas": 1},
        "hybrid,replicas=2": {"replicas": 2},
    }
    capabilities = frozenset(
        {
            "gradients",
            "no_sync",
            # no "no_sync.dropped": docs/findings/fsdp2-unreduced-gradients-stay.md
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            "two_forwards",
            "unused_parameters",
            "unused_parameters.varying",
            "unused_parameters.ranks",
            "optimizer.whole",
            "shard.parameters",
            "shard.optimizer",
            "model_state.full",
            "model_state.sharded",
            "optim_state.full",
            "optim_state.sharded",
            "scaler",
            "meta",
            "save",
        }
    )

    def configure(self, options: Mapping[str, Any]) -> None:
        """Unsharded parameters stay after an evaluation unless all of them are resharded."""
        if options.get("reshard_after_forward", True) is True:
            self.capabilities |= {"memory.reshard"}
        if options.get("reshard_after_forward") is False:
            self.conventions = replace(self.conventions, gathers="once")
        self.replicas = options.get("replicas", 1)

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Shard in place; the optimizer is made over the sharded parameters."""
        options, shard = dict(config.options), type(self).shard
        mesh = _mesh(config, options.pop("replicas", None))
        self._check_part(options.get("reshard_after_forward"), mesh)
        with refusals():
            for child in reversed(list(model.modules())):
                if isinstance(child, config.units):
                    shard(child, mesh=mesh, **self.of_unit(options))
            shard(model, mesh=mesh, **options)
        remarks = (UNUSED_ANNOUNCED,) if config.unused_on_some_ranks else ()
        if config.unused_on_some_ranks:
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        if any(parameter.is_meta for parameter in model.parameters()):
            self.give_storage(model, config.device)
        optimizer = make_optimizer(model.parameters())
        return Wrapped(module=model, optimizer=optimizer, remarks=remarks)

    def of_unit(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of the root's `options` the units inside are sharded with; all of them."""
        return options

    def give_storage(self, model: nn.Module, device: torch.device) -> None:
        """As a careful recipe does: ``to_empty`` unties parameters, and empties every buffer."""
        registered = [owner._parameters for owner in model.modules()]
        unsaved = [
            (owner._buffers, {name: owner._buffers[name] for name in names})
            for owner in model.modules()
            if (names := owner._non_persistent_buffers_set)
        ]
        before = [dict(own) for own in registered]
        poison(model.to_empty(device=device))
        given: dict[nn.Parameter, nn.Parameter | None] = {}
        for own, old in zip(registered, before, strict=True):
            for name, parameter in old.items():
                if parameter is not None:
                    own[name] = given.setdefault(parameter, own[name])
        for buffers, kept in unsaved:
            buffers.update(kept)

    @staticmethod
    def _check_part(reshard: object, mesh: DeviceMesh) -> None:
        """Parameters can be resharded over equal parts of the ranks that shard them."""
        ranks = mesh.size(mesh.ndim - 1)
        if isinstance(reshard, int) and not isinstance(reshard, bool) and ranks % reshard:
            raise Refusal(f"{ranks} ranks cannot be cut into equal parts of {reshard}")

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """This wrapper's form of it: reduction is switched off and on again."""
        return toggled(w.module.set_requires_gradient_sync)  # type: ignore[arg-type]

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Through the checkpoint package, which is this wrapper's documented way."""
        self._no_local(kind)
        return torch_checkpoint.model_state(w.module, kind, cpu=cpu)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Likewise."""
        self._no_local(kind)
        torch_checkpoint.load_model_state(w.module, kind, state)

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Likewise."""
        self._no_local(kind)
        return torch_checkpoint.optim_state(w.module, w.optimizer, kind, cpu=cpu)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Likewise."""
        self._no_local(kind)
        torch_checkpoint.load_optim_state(w.module, w.optimizer, kind, state)

    def _no_local(self, kind: StateKind) -> None:
        if kind == "local":
            raise NotImplementedError(f"{type(self).__name__} has no local state")


def _mesh(config: BuildConfig, replicas: int | None) -> Any:
    """All ranks in a row, or (replicas, ranks per replica)."""
    if replicas is None:
        return init_device_mesh(config.device.type, (config.world_size,))
    return hybrid_mesh(config, replicas)


def poison(model: nn.Module) -> None:
    """What fresh memory may hold: nothing that a load leaves alone can pass for a value."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
