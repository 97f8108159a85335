"""Defects that show inside the model, or in what a training loop puts around its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    LossFn,
    OptimizerFactory,
    StateKind,
    Wrapped,
    local,
)
from conformance.causes import Cause
from conformance.mutants.registry import mutant

OURS, FLAT = "fsdp.fully_shard", "fsdp.FullyShardedDataParallel"


@mutant(
    check="forward.strides",
    cause=Cause.WRONG_STRIDES,
    case="strided/witness",
    bugs=("pytorch/pytorch#137382",),
    world=1,
)
class ContiguousInForward(Adapter):
    """Parameters are flattened and viewed again as contiguous; their values are right."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Lose the strides, then wrap."""
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        return super().build(model, make_optimizer, config)


@mutant(check="hooks.modules", cause=Cause.WRONG_COUNT, case="mlp/witness", world=1)
class ForwardRunsTwice(Adapter):
    """Forward is run once more, to learn the order of modules; hooks of the user run with it."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Run it for nothing, then in earnest."""
        with torch.no_grad():
            loss_fn(w.module, batch)
        return super().forward(w, batch, loss_fn)


@mutant(
    check="hooks.parameters",
    cause=Cause.WRONG_COUNT,
    case="mlp/witness",
    bugs=("meta-pytorch/torchrec#4268",),
    world=1,
)
class HooksOfParametersNeverRun(Adapter):
    """What the graph holds are copies of the parameters, whose gradients are assigned."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """With copies in the place of parameters."""
        bare = self.bare(w)
        self._copies = {n: p.detach().requires_grad_() for n, p in bare.named_parameters()}

        def module(*args: Any) -> Any:
            return torch.func.functional_call(bare, self._copies, args)

        return loss_fn(module, batch)  # type: ignore[arg-type]

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Reduce the copies' gradients and assign them."""
        super().backward(w, loss)
        for name, parameter in self.bare(w).named_parameters():
            gradient = self._copies[name].grad
            assert gradient is not None
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()


class OfBody(Adapter):
    """Base of what a wrapper does around the part of a unit that runs again in backward."""

    _recomputing = False

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Put `around` in the place of the body's forward."""
        body = model.get_submodule("inside.body")
        forward = body.forward
        body.forward = lambda x: self.around(forward, x)
        return super().build(model, make_optimizer, config)

    def around(self, forward: Any, x: Tensor) -> Tensor:
        """What runs instead."""
        raise NotImplementedError

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Everything forward that runs inside is a recomputation."""
        self._recomputing = True
        try:
            super().backward(w, loss)
        finally:
            self._recomputing = False


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="recomputed/witness",
    bugs=("pytorch/pytorch#148831",),
    world=1,
)
class AutocastLostInRecomputation(OfBody):
    """The second run of a checkpointed unit does not see the autocast of the first."""

    def around(self, forward: Any, x: Tensor) -> Tensor:
        """Switch it off while backward runs."""
        enabled = torch.is_autocast_enabled(x.device.type) and not self._recomputing
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=enabled):
            out: Tensor = forward(x)
        return out.float()


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="recomputed/witness",
    bugs=("pytorch/pytorch#159359",),
    world=1,
)
class InputNotCastInRecomputation(OfBody):
    """A unit's input is cast to bfloat16 in forward and left as it is when it runs again."""

    def around(self, forward: Any, x: Tensor) -> Tensor:
        """Compute in bfloat16 the first time only."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=not self._recomputing):
            out: Tensor = forward(x)
        return out.float()


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="recomputed/two_forwards",
    base=OURS,
    bugs=("facebookresearch/fairscale#617",),
    world=1,
)
class SecondForwardOfARecomputedUnit(Adapter):
    """A unit that is to be recomputed refuses a second forward before its backward."""

    _waiting = False

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Insist on taking turns."""
        if self._waiting:
            raise AssertionError("expected the unit to be idle, it is in forward")
        self._waiting = True
        return super().forward(w, batch, loss_fn)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """The turn is over."""
        super().backward(w, loss)
        self._waiting = False


@mutant(
    check="scaler.together",
    cause=Cause.RANKS_DIFFER,
    case="mlp/scaled/optimizer=sgd",
)
class InfinityStaysOnOneRank(Adapter):
    """Each rank's scaler looks at that rank's own gradients and decides for itself."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Infinite gradients are not handed on."""
        super().backward(w, loss)
        if dist.get_rank() == 0:
            for parameter in w.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(nan=1.0, posinf=1.0, neginf=-1.0)


@mutant(
    check="scaler.step",
    cause=Cause.NOT_UNSCALED,
    case="mlp/scaled/optimizer=sgd",
    world=1,
)
class LossScaleIsForgotten(Adapter):
    """The optimizer steps by gradients of the scaled loss."""

    def scaled_step(self, w: Wrapped, scaler: Any) -> None:
        """Undo the division, once it has been looked for infinities."""
        scaler.unscale_(w.optimizer)
        for parameter in w.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= scaler.get_scale()
        super().scaled_step(w, scaler)


@mutant(
    check="scaler.shards",
    cause=Cause.RANKS_DIFFER,
    case="mlp/scaled/optimizer=sgd",
    base=FLAT,
)
class ScalerLooksAtItsOwnShard(Adapter):
    """Torch's own scaler: what is infinite in another rank's shard, it does not hear of."""

    def make_scaler(self, w: Wrapped, device: torch.device) -> Any:
        """It knows DTensors, and no other form of shards."""
        return torch.amp.GradScaler(device.type)


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="tiny/scaled/optimizer=sgd",
    base=OURS,
    bugs=("pytorch/pytorch#99174",),
)
class ScalerWantsAShardOnEveryRank(Adapter):
    """Whoever holds no element of a parameter has nothing to look for infinities in, and fails."""

    def scaled_step(self, w: Wrapped, scaler: Any) -> None:
        """Fail there."""
        if any(local(p).numel() == 0 for p in w.module.parameters()):
            raise AssertionError("no inf checks were recorded for this optimizer")
        super().scaled_step(w, scaler)


@mutant(check="average.values", cause=Cause.NOT_LOADED, case="mlp/averaged", world=1)
class AverageIsNotWrittenBack(Adapter):
    """What a user sees as the weights are copies of them."""

    def weights(self, w: Wrapped) -> list[Tensor]:
        """Copies."""
        return [weight.detach().clone() for weight in super().weights(w)]


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="mlp/averaged",
    bugs=("pytorch/pytorch#82070",),
    world=1,
)
class WeightsCannotBeCopied(Adapter):
    """The wrapper cannot be copied, which is how an average of weights is begun."""

    def weights(self, w: Wrapped) -> list[Tensor]:
        """Refuse."""
        raise TypeError("cannot pickle a process group")


@mutant(
    check="materialised.values",
    cause=Cause.NON_FINITE,
    case="mlp/materialised",
    base=OURS,
    world=1,
)
class LoadMissesAParameter(Adapter):
    """A load leaves one parameter of a model that had no storage as its memory was."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """All but one."""
        super().load_model_state(w, kind, state)
        with torch.no_grad():
            next(w.module.parameters()).fill_(torch.nan)


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="tiny/materialised",
    base=OURS,
    bugs=("huggingface/transformers#48237",),
)
class EmptyShardsAreInitialised(Adapter):
    """A rank whose part of a parameter is empty takes it for one that was not loaded."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Ask for the norm of what is not there."""
        super().load_model_state(w, kind, state)
        for parameter in w.module.parameters():
            if local(parameter.detach()).numel() == 0:
                raise RuntimeError("cannot initialise a parameter of no elements")


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="scalar/checkpoint/kind=full",
    bugs=("pytorch/pytorch#132934",),
    world=1,
)
class ScalarsCannotBeSaved(Adapter):
    """A parameter without dimensions trains, and fails when the state is asked for."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Look for rows."""
        state = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        return {key: value.narrow(0, 0, value.shape[0]) for key, value in state.items()}
