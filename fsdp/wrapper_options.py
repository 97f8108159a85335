"""Options of ``FullyShardedDataParallel``: enums and frozen values. No modules, no groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """What is sharded, over which ranks, and what remains after forward; see ``STRATEGIES``."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One row of the table of strategies.

    Attributes:
        shards: whether parameters are sharded at all.
        replicates: whether there is a dim of replicas beside the ranks that shard.
        reshards: whether whole parameters are given up between forward and backward.
    """

    shards: bool
    replicates: bool
    reshards: bool


STRATEGIES: dict[ShardingStrategy, Strategy] = {
    ShardingStrategy.FULL_SHARD: Strategy(shards=True, replicates=False, reshards=True),
    ShardingStrategy.SHARD_GRAD_OP: Strategy(shards=True, replicates=False, reshards=False),
    ShardingStrategy.NO_SHARD: Strategy(shards=False, replicates=True, reshards=False),
    ShardingStrategy.HYBRID_SHARD: Strategy(shards=True, replicates=True, reshards=True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Strategy(shards=True, replicates=True, reshards=False),
}


class BackwardPrefetch(Enum):
    """When backward starts to gather the next unit: before this one's gradients, or after them."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtype each stage of a unit uses; None leaves that of the parameters.

    Attributes:
        param_dtype: of the all-gather and of the computation.
        reduce_dtype: of the gradient reduction. None: ``param_dtype``.
        buffer_dtype: of floating-point buffers, from the first forward on.
        keep_low_precision_grads: leave reduced gradients in ``param_dtype``; without sharding, in
            ``reduce_dtype``. For optimizers that take them; it saves their memory.
        cast_forward_inputs: cast this unit's floating-point inputs to ``param_dtype``.
        cast_root_forward_inputs: the same for the root of the tree alone.
        _module_classes_to_ignore: with a wrap policy, modules of these classes become units of
            their own in full precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)

    @property
    def lowers(self) -> bool:
        """Whether any dtype is named."""
        return any((self.param_dtype, self.reduce_dtype, self.buffer_dtype))


@dataclass
class CPUOffload:
    """Whether sharded parameters and their gradients live in host memory between uses."""

    offload_params: bool = False


class StateDictType(Enum):
    """In which form ``state_dict`` gives the parameters."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Options of every form: whether the tensors are moved to host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of the full form: whether the first rank of each shard group alone gets it."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of the local form."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of the sharded form.

    ``_use_dtensor`` is set from the presence of a device mesh: its values are DTensors then.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of optimizer states: whether the tensors are moved to host memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of full optimizer states: whether rank 0 alone gets it."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of local optimizer states."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of sharded optimizer states; ``_use_dtensor`` as in those of the model."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The form and its options, as set on a tree."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)
