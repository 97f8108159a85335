"""Defects of gradient clipping."""

from __future__ import annotations

from math import inf

import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import Adapter, Wrapped, local, named_parameters
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="clip.norm",
    cause=Cause.LOCAL_NORM,
    case="mlp/train/optimizer=sgd",
    base="torch.fully_shard",
    bugs=("pytorch/pytorch#170862",),
)
class NormOfLocalShard(Adapter):
    """Each rank clips by the norm of its own shard."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """No collective."""
        parts = [local(p.grad) for p in w.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(parts, norm_type)
        for part in parts:
            part.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


@mutant(
    check="clip.norm",
    cause=Cause.COUNTED_TWICE,
    case="mlp/train/optimizer=sgd",
    bugs=("ByteDance-Seed/VeOmni#862",),
)
class NormCountsReplicas(Adapter):
    """The norm counts every replica's gradients, as if they were parts of one whole."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """The 2-norm over W equal replicas is the square root of W times that of one."""
        twice = [p.grad for p in w.module.parameters() if p.grad is not None] * 2
        norm = nn.utils.get_total_norm(twice, norm_type)
        nn.utils.clip_grads_with_norm_(w.module.parameters(), max_norm, norm)
        return norm


@mutant(
    check="clip.norm",
    cause=Cause.COUNTED_TWICE,
    case="transformer/train/optimizer=sgd",
    bugs=("deepspeedai/DeepSpeed#1945",),
)
class NormCountsTiedTwice(Adapter):
    """A tied parameter counts once per name."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Walk over names instead of parameters."""
        named = [p for _, p in named_parameters(w.module)]
        norm = nn.utils.get_total_norm([p.grad for p in named if p.grad is not None], norm_type)
        nn.utils.clip_grads_with_norm_(w.module.parameters(), max_norm, norm)
        return norm


@mutant(
    check="clip.norm",
    cause=Cause.COUNTED_TWICE,
    case="mlp/train/optimizer=sgd",
    bugs=("ByteDance-Seed/VeOmni#862",),
)
class OneNormCountsReplicas(NormCountsReplicas):
    """Only the 1-norm counts every replica."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """The other norms are right."""
        right = super(NormCountsReplicas, self).clip_grad_norm
        return (super().clip_grad_norm if norm_type == 1 else right)(w, max_norm, norm_type)


@mutant(
    check="clip.norm",
    cause=Cause.PADDING_COUNTED,
    case="uneven/train/optimizer=sgd",
)
class NormCountsPadding(Adapter):
    """Ones that fill uneven parameters up to equal parts count as their gradients."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Rows of ones that no parameter has."""
        grads = [p.grad for p in w.module.parameters() if p.grad is not None]
        rows = dist.get_world_size()
        padding = [g.new_ones(-len(g) % rows, *g.shape[1:]) for g in grads if g.dim()]
        filled = [ones for ones in padding if ones.numel()]
        norm = nn.utils.get_total_norm([*grads, *filled], norm_type)
        nn.utils.clip_grads_with_norm_(w.module.parameters(), max_norm, norm)
        return norm


@mutant(
    check="clip.norm",
    cause=Cause.LOCAL_NORM,
    case="mlp/train/optimizer=sgd",
    base="torch.fully_shard",
    bugs=("meta-pytorch/torchrec#3199",),
)
class InfinityNormOfLocalShard(NormOfLocalShard):
    """Only the maximum norm is that of a rank's own shard."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """The other norms are right."""
        right = super(NormOfLocalShard, self).clip_grad_norm
        return (super().clip_grad_norm if norm_type == inf else right)(w, max_norm, norm_type)


@mutant(check="clip.norm", cause=Cause.OTHER_NORM, case="mlp/train/optimizer=sgd", world=1)
class OneNormIsTheTwoNorm(Adapter):
    """Whatever p is asked for, but infinity, the 2-norm is taken."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """The maximum is a case of its own."""
        return super().clip_grad_norm(w, max_norm, norm_type if norm_type == inf else 2.0)


@mutant(check="clip.norm", cause=Cause.DTYPE_ROUND_TRIP, case="mlp/train/optimizer=sgd", world=1)
class NormAddedUpInBfloat16(Adapter):
    """The powers of the norms of parameters are added up in bfloat16, one by one."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """The maximum is no sum."""
        if norm_type == inf:
            return super().clip_grad_norm(w, max_norm, norm_type)
        grads = [p.grad for p in w.module.parameters() if p.grad is not None]
        powers = [grad.norm(norm_type).bfloat16() ** norm_type for grad in grads]
        norm: Tensor = (sum(powers[1:], powers[0]) ** (1 / norm_type)).float()
        nn.utils.clip_grads_with_norm_(w.module.parameters(), max_norm, norm)
        return norm


@mutant(check="clip.gradients", cause=Cause.NOT_CLIPPED, case="mlp/train/optimizer=sgd", world=1)
class NormWithoutClipping(Adapter):
    """The right norm is returned and nothing is clipped."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Measure only."""
        return super().clip_grad_norm(w, inf, norm_type)


@mutant(
    check="clip.gradients",
    cause=Cause.SCALED,
    case="mlp/train/optimizer=sgd",
    world=1,
)
class SmallGradientsScaledUp(Adapter):
    """Gradients below the threshold are scaled, too: up to it."""

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Without the bound at one."""
        parts = [p.grad for p in w.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(parts, norm_type)
        for part in parts:
            part.mul_(max_norm / norm)
        return norm
