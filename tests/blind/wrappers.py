"""Twenty wrappers with one silent defect each, written without a look at the checks.

Knows the catalogue of reports, the public adapters and the closed list of causes. Must not know
scenarios, checks or the suite's own mutants: what they miss shall show here. Every docstring says
the defect, the reports it is like, the cause that a good suite names, and where it first shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import fsdp
from conformance.adapter import (
    Adapter,
    BuildConfig,
    LossFn,
    OptimizerFactory,
    StateKind,
    Wrapped,
    local,
)
from conformance.adapters.fsdp_composable import FullyShardAdapter as OurFullyShard
from conformance.adapters.fsdp_wrapper import FullyShardedAdapter as OurWrapper
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.adapters.torch_fsdp1 import FullyShardedAdapter as TorchWrapper
from conformance.adapters.torch_fsdp2 import FullyShardAdapter as TorchFullyShard
from conformance.adapters.torch_zero import ZeroRedundancyAdapter

DEFAULT: Mapping[str, Mapping[str, Any]] = {"default": {}}
WRAPPER_DEFAULT: Mapping[str, Mapping[str, Any]] = {
    "default": {"use_orig_params": False, "sharding_strategy": "FULL_SHARD"}
}


class AfterLastBackward(Adapter):
    """Calls `finished` after each backward that is not under ``no_sync``. No defect by itself."""

    waiting = False

    @contextmanager
    def no_sync(self, w: Wrapped) -> Iterator[None]:
        self.waiting = True
        try:
            with super().no_sync(w):
                yield
        finally:
            self.waiting = False

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        super().backward(w, loss)
        if not self.waiting:
            self.finished(w)

    def finished(self, w: Wrapped) -> None:
        """Gradients are reduced."""


def units_of(w: Wrapped, config: BuildConfig) -> list[nn.Module]:
    return [m for m in w.module.modules() if isinstance(m, config.units)]


def distributed_state(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(state of a parameter, key, DTensor) for all of an optimizer's DTensors."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if hasattr(value, "device_mesh"):
                yield state, key, value


# -- gradient scale, accumulation, precision ------------------------------------------------------


class DividesTinyGradientsTwice(AfterLastBackward, TorchFullyShard):
    """Parameters under 8 elements take a path of their own, which divides after an average.

    Like pytorch/torchtitan#2318, pytorch/pytorch#144045. Cause: divided-twice.
    Shows with any parameter of fewer than 8 elements, a last bias; AdamW nearly hides it.
    """

    variants = DEFAULT

    def finished(self, w: Wrapped) -> None:
        for p in w.module.parameters():
            if p.grad is not None and p.numel() < 8:
                p.grad.div_(dist.get_world_size())


class AccumulatesInHalfPrecision(DataParallelAdapter):
    """What waits between micro-batches is kept in bfloat16; the last one is added in float32.

    Like pytorch/pytorch#106395, pytorch/pytorch#85134. Cause: dtype-round-trip.
    Shows with two micro-batches; never without accumulation.
    """

    variants = DEFAULT

    @contextmanager
    def no_sync(self, w: Wrapped) -> Iterator[None]:
        with super().no_sync(w):
            yield
        for p in w.module.parameters():
            if p.grad is not None:
                p.grad.copy_(p.grad.bfloat16())


class StaleGradientWhereNoneTookPart(AfterLastBackward, TorchFullyShard):
    """A parameter that took part before and does not now keeps its gradient of that step.

    Like pytorch/pytorch#83195, pytorch/pytorch#196996. Cause: stale.
    Shows with a model that uses other parameters from step to step.
    """

    variants = DEFAULT

    def finished(self, w: Wrapped) -> None:
        kept = w.native = w.native or {}
        for name, p in w.module.named_parameters():
            if p.grad is not None:
                kept[name] = p.grad.clone()
            elif name in kept:
                p.grad = kept[name].clone()


class OffloadsThroughTwoBuffersPerShape(AfterLastBackward, OurFullyShard):
    """Offloaded gradients pass through two pinned buffers per shape, emptied only at the end.

    Like pytorch/pytorch#180665, pytorch/pytorch#73535, deepspeedai/DeepSpeed#7965.
    Cause: permuted (another parameter's values).
    Shows where three parameters have one shape: all but the last two of backward are lost.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
    }

    def finished(self, w: Wrapped) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for p in reversed(list(w.module.parameters())):  # in the order of backward
            if p.grad is not None:
                by_shape.setdefault(tuple(p.shape), []).append(local(p.grad))
        for gradients in (g for g in by_shape.values() if len(g) > 2):
            buffers = [gradients[-1 - (len(gradients) - 1 - i) % 2].clone() for i in range(2)]
            for index, gradient in enumerate(gradients):
                gradient.copy_(buffers[index % 2])


class NoSyncHoldsInTheFirstStepOnly(OurWrapper):
    """The flag that ``no_sync`` sets is never restored after the first step: all later reduce.

    Like pytorch/pytorch#187732, NVIDIA/Megatron-LM#7186. Cause: reduced-in-no-sync.
    Shows from the second step on, and only in traffic: the sums are the same.
    """

    variants = WRAPPER_DEFAULT

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        return nullcontext() if w.native == "stepped" else super().no_sync(w)

    def optimizer_step(self, w: Wrapped) -> None:
        super().optimizer_step(w)
        w.native = "stepped"


# -- clipping -------------------------------------------------------------------------------------


class ScalesSmallGradientsUp(DataParallelAdapter):
    """Clipping by hand without the bound at one: small gradients grow to the threshold.

    Like deepspeedai/DeepSpeed#7718, meta-pytorch/torchrec#3199. Cause: scaled.
    Shows only when the norm is below the threshold.
    """

    variants = DEFAULT

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor:
        gradients = [p.grad for p in w.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
        return norm


class ClipsByTheMaximumOfItsShard(OurFullyShard):
    """With the maximum norm each rank scales by its own shard's maximum, and reports the whole.

    Like pytorch/pytorch#170862, meta-pytorch/torchrec#3199. Cause: local-norm.
    Shows with the maximum norm only; the norm that is returned is right.
    """

    variants = DEFAULT

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        if norm_type != inf:
            return super().clip_grad_norm(w, max_norm, norm_type)
        gradients = [local(p.grad) for p in w.module.parameters() if p.grad is not None]
        own = torch.stack([g.abs().max() for g in gradients if g.numel()]).max()
        for gradient in gradients:
            gradient.mul_((max_norm / (own + 1e-6)).clamp(max=1.0))
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own


# -- frozen and tied parameters -------------------------------------------------------------------


class DecaysFrozenNeighbours(OurFullyShard):
    """Before the step, missing gradients of a unit that trains at all become zeros.

    Like pytorch/pytorch#104690, facebookresearch/fairscale#605. Cause: frozen-changed.
    Shows with weight decay, where frozen and trainable parameters share a unit.
    """

    variants = DEFAULT

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        w = super().build(model, make_optimizer, config)
        w.native = units_of(w, config)
        return w

    def optimizer_step(self, w: Wrapped) -> None:
        for unit in w.native:
            parameters = list(unit.parameters())
            if any(p.requires_grad for p in parameters):
                for p in parameters:
                    if not p.requires_grad:
                        p.grad = torch.zeros_like(p)
        super().optimizer_step(w)


class UntiesAtTheLoad(DataParallelAdapter):
    """Loading gives each name of a tied parameter a tensor of its own.

    Like deepspeedai/DeepSpeed#1945, pytorch/pytorch#105840, NVIDIA-NeMo/Automodel#3822.
    Cause: untied.
    Shows with tied parameters at the first step after a load; outputs right after it agree.
    """

    variants = DEFAULT

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        super().load_model_state(w, kind, state)
        seen: set[nn.Parameter] = set()
        for module in self.bare(w).modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if p in seen:
                    setattr(module, name, nn.Parameter(p.detach().clone()))
                seen.add(p)


# -- checkpoints and resuming ---------------------------------------------------------------------


class ShiftsMomentsOfUnevenParameters(TorchFullyShard):
    """Reading a directory, the last rank begins one row late where rows do not divide evenly.

    Like pytorch/pytorch#94109, Lightning-AI/pytorch-lightning#16815. Cause: off-by-one-shard.
    Shows with odd sizes after `load`, in the optimizer's state alone.
    """

    variants = DEFAULT

    def load(self, w: Wrapped, directory: Path) -> None:
        super().load(w, directory)
        world = dist.get_world_size()
        for _, _, value in distributed_state(w.optimizer):
            rows = local(value)
            if value.shape[0] % world and dist.get_rank() == world - 1 and len(rows):
                rows.copy_(rows.roll(1, 0))


class SecondSaveWritesTheFirst(OurFullyShard):
    """The staging copy of an asynchronous save is made once and written by every later save.

    Like pytorch/pytorch#149100, Open-Athena/MarinFold#236. Cause: stale.
    Shows at the second save of one process.
    """

    variants = DEFAULT

    def save(self, w: Wrapped, directory: Path) -> None:
        live = [local(p.detach()) for p in w.module.parameters()]
        live += [local(value) for _, _, value in distributed_state(w.optimizer)]
        if w.native is None:
            w.native = [t.clone() for t in live]
        now = [t.clone() for t in live]
        overwrite(live, w.native)
        super().save(w, directory)
        overwrite(live, now)


class LoadsMomentsInAlphabeticalOrder(TorchWrapper):
    """A full optimizer state is matched by position, the saved names sorted, the model's not.

    Like pytorch/pytorch#54736, NVIDIA/Megatron-LM#7452. Cause: permuted.
    Shows where parameters of one shape are not registered in alphabetical order: a
    normalisation's weight and bias.
    """

    variants = WRAPPER_DEFAULT

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        entries = state.get("state", {})
        if kind == "full" and entries:
            state = {**state, "state": by_sorted_name(entries)}
        super().load_optim_state(w, kind, state)


def by_sorted_name(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per shape, the entries in the order of their names under the names in their own order."""
    shapes: dict[Any, list[str]] = {}
    for name, entry in entries.items():
        shape = next((t.shape for t in entry.values() if torch.is_tensor(t) and t.dim()), None)
        shapes.setdefault(shape, []).append(name)
    wrong = dict(entries)
    for names in shapes.values():
        wrong |= dict(zip(names, (entries[n] for n in sorted(names)), strict=True))
    return wrong


class LoadsMomentsByGlobalRank(OurFullyShard):
    """A full optimizer state is dealt out by global rank: later replicas get shards of others.

    Like pytorch/pytorch#128444, pytorch/torchtitan#4598. Cause: other-rank.
    Shows in the second replica alone, after a load, on a mesh (2, 2).
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"hybrid,replicas=2": {"replicas": 2}}

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        super().load_optim_state(w, kind, state)
        for _, _, value in distributed_state(w.optimizer):
            replica, shard = value.device_mesh.get_coordinate()
            ranks = value.device_mesh.size(1)
            if kind != "full" or replica == 0 or value.shape[0] % ranks:
                continue
            own = local(value)
            everyone = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(everyone, own.contiguous(), group=value.device_mesh.get_group(1))
            own.copy_(everyone[(shard + 1) % ranks])


class LoadedMomentsKeepWholeTensorsAlive(OurFullyShard):
    """After a full load, each rank's part of a moment is a view into storage of the whole.

    Like axolotl-ai-cloud/axolotl#3597, pytorch/pytorch#128004. Cause: not-sharded.
    Shows only in memory and only after a load: shapes and values are right.
    """

    variants = DEFAULT

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        super().load_optim_state(w, kind, state)
        for _, _, value in distributed_state(w.optimizer):
            own = local(value)
            whole = own.new_empty(value.numel())  # every element, of which this rank needs a part
            value._local_tensor = whole[: own.numel()].view_as(own).copy_(own)


def overwrite(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=False):
            target.copy_(value)


# -- evaluation, what is gathered and when --------------------------------------------------------


class EvaluatesFromACacheOfBeforeTheLoad(DataParallelAdapter):
    """Weights merged for evaluation are cached; a step drops the cache, a load does not.

    Like pytorch/pytorch#117421, Open-Athena/MarinFold#236. Cause: not-loaded.
    Shows at an evaluation after a load if there was another before it.
    """

    variants = DEFAULT

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        live = [p.detach() for p in w.module.parameters()]
        cached = w.module.__dict__.setdefault("merged", [p.clone() for p in live])
        now = [p.clone() for p in live]
        overwrite(live, cached)
        loss = super().evaluate(w, batch, loss_fn)
        overwrite(live, now)
        return loss

    def optimizer_step(self, w: Wrapped) -> None:
        super().optimizer_step(w)
        w.module.__dict__.pop("merged", None)


class LeavesTheLastUnitInEvalMode(TorchWrapper):
    """Going back to training mode does not reach the last unit.

    Like PsycheFoundation/nousnet#285, facebookresearch/fairscale#710. Cause: changed-by-eval.
    Shows with batch normalisation (or dropout) in the first step after an evaluation.
    """

    variants = WRAPPER_DEFAULT

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        w = super().build(model, make_optimizer, config)
        w.native = units_of(w, config)
        return w

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        loss = super().evaluate(w, batch, loss_fn)
        for unit in w.native[-1:]:
            unit.eval()
        return loss


class KeepsTheLastUnitAfterEvaluation(TorchFullyShard):
    """Without a backward to come, the last unit's parameters stay gathered after an evaluation.

    Like pytorch/xla#5484, pytorch/pytorch#149100. Cause: not-freed.
    Shows in memory after an evaluation, one unit of several; training frees it.
    """

    variants = DEFAULT

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        w = super().build(model, make_optimizer, config)
        w.native = units_of(w, config)[-1:]
        return w

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        for unit in w.native:
            unit.set_reshard_after_forward(False, recurse=False)
        loss = super().evaluate(w, batch, loss_fn)
        for unit in w.native:
            unit.set_reshard_after_forward(True, recurse=False)
        return loss

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        for unit in w.native:
            unit.reshard()  # or the load would not be seen, which is another defect
        super().load_model_state(w, kind, state)


class PrefetchesTheFirstUnitBeforeTheStep(TorchFullyShard):
    """The first unit's next all-gather is issued before the optimizer's step, not after it.

    Like pytorch/pytorch#178142, pytorch/pytorch#117421. Cause: stale.
    Shows from the second step on, in the first micro-batch's use of one unit.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "reshard_after_forward=False": {"reshard_after_forward": False}
    }

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        w = super().build(model, make_optimizer, config)
        first = (units_of(w, config) or [w.module])[0]
        w.native = [list(first.parameters()), None]  # what is prefetched, and what came
        return w

    def optimizer_step(self, w: Wrapped) -> None:
        w.native[1] = [local(p.detach()).clone() for p in w.native[0]]
        super().optimizer_step(w)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        prefetched, w.native[1] = w.native[1], None
        if prefetched is None:
            return super().forward(w, batch, loss_fn)
        live = [local(p.detach()) for p in w.native[0]]
        now = [t.clone() for t in live]
        overwrite(live, prefetched)
        loss = super().forward(w, batch, loss_fn)  # gathers; backward finds it gathered
        overwrite(live, now)
        return loss

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        w.native[1] = None
        super().load_model_state(w, kind, state)


class LastParameterArrivesAtTheNextForward(ZeroRedundancyAdapter):
    """The broadcast of the last parameter after a step is waited for in the next forward only.

    Like deepspeedai/DeepSpeed#8061, pytorch/pytorch#144535, Megatron's overlapped gather.
    Cause: stale.
    Shows on ranks that do not own it, in an evaluation or a save between step and forward;
    training goes on as if nothing were wrong.
    """

    variants = DEFAULT
    pending: tuple[Tensor, Tensor] | None = None

    def optimizer_step(self, w: Wrapped) -> None:
        self.arrive()
        last = list(w.module.parameters())[-1]
        before = last.detach().clone()
        super().optimizer_step(w)
        if last not in w.optimizer.optim.state:  # type: ignore[attr-defined]
            self.pending = (last.detach(), last.detach().clone())
            overwrite([last.detach()], [before])

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        self.arrive()
        return super().forward(w, batch, loss_fn)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        self.arrive()
        super().load_model_state(w, kind, state)

    def arrive(self) -> None:
        if self.pending is not None:
            overwrite(self.pending[:1], self.pending[1:])
        self.pending = None


# -- hybrid meshes --------------------------------------------------------------------------------


class ReplicatedByHand(AfterLastBackward, TorchFullyShard):
    """Shards within each of two replicas, averages over replicas by hand. No defect.

    Every micro-batch is reduced within its replica, so nothing is claimed of ``no_sync``.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {"replicas": 2}}
    capabilities = TorchFullyShard.capabilities - {"no_sync", "two_forwards"}

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        shape = (2, config.world_size // 2)
        mesh = init_device_mesh(config.device.type, shape, mesh_dim_names=("replicas", "shards"))
        shard: Callable[..., Any] = type(self).shard
        for child in reversed(list(model.modules())):
            if isinstance(child, config.units):
                shard(child, mesh=mesh["shards"])
        shard(model, mesh=mesh["shards"])
        optimizer = make_optimizer(model.parameters())
        return Wrapped(module=model, optimizer=optimizer, native=mesh.get_group("replicas"))

    @contextmanager
    def no_sync(self, w: Wrapped) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def finished(self, w: Wrapped) -> None:
        self.average(w, [local(p.grad) for p in w.module.parameters() if p.grad is not None])

    def average(self, w: Wrapped, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=w.native)
            gradient.div_(2)


class EarlierMicroBatchesStayInTheirReplica(ReplicatedByHand):
    """Only the last micro-batch's gradient crosses replicas; what waited is added after that.

    Like pytorch/pytorch#125484. Cause: not-reduced.
    Shows on a mesh (2, 2) with two micro-batches; replicas drift apart.
    """

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        if self.waiting:
            super().backward(w, loss)
            return
        parameters = list(w.module.parameters())
        waited = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        super().backward(w, loss)
        for p, earlier in zip(parameters, waited, strict=True):
            if earlier is not None:
                p.grad = earlier if p.grad is None else p.grad.add_(earlier)
