"""The private names of torch that the engine stands on, each with its reason.

One test asserts that every name still exists, and lists the few that stand in other modules.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.autograd import Variable
from torch.distributed._composable.contract import _get_registry
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "LocalShard",
    "ShardMetadata",
    "ShardedTensor",
    "all_gather",
    "chunk_cat",
    "concatenate_meshes",
    "current_stream",
    "dtensor_of",
    "gather_now",
    "graph_task",
    "group_allocate",
    "group_of",
    "has_replicate",
    "hook_gradient",
    "in_compiled_backward",
    "is_persistent",
    "load_hooks",
    "local_tensor",
    "make_spec",
    "post_accumulate_hooks",
    "premul_sum",
    "queue_callback",
    "reduce_scatter",
    "save_hooks",
    "set_gradients",
    "set_local_tensor",
    "sharded_tensor_of",
    "spec_of",
    "spec_with_dtype",
    "split_factor_of",
    "strided_shard",
    "transform_level",
    "untraced",
    "untraced_frame",
    "without_dispatch",
    "without_transforms",
]


def _gather_options(*, async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


_GATHER = {flag: _gather_options(async_op=flag) for flag in (False, True)}


_SCATTER: dict[tuple[Any, bool], ReduceScatterOptions] = {}


def all_gather(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Gather through the group itself: the public function costs more than the launch.

    Both torch 2.11 and 2.13 have this method; the public function changed its name between them.
    """
    if shard.is_complex():  # backends know pairs of real numbers only
        output, shard = torch.view_as_real(output), torch.view_as_real(shard)
    work: dist.Work | None = group._allgather_base(output, shard, _GATHER[async_op])
    return work


def gather_now(own: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return every rank's ``own`` (n,) as (W * n,); ``own`` itself on a rank that is alone.

    *Collective* over ``group``. *Blocks* the current stream (the host, without streams).
    """
    if group is None or group.size() == 1:
        return own
    everyone = torch.empty(group.size() * own.numel(), dtype=own.dtype, device=own.device)
    work = all_gather(everyone, own, group, async_op=True)
    assert work is not None, "an asynchronous collective has a handle"
    work.wait()
    return everyone


def reduce_scatter(
    output: torch.Tensor,
    packed: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any,
    *,
    async_op: bool,
) -> dist.Work | None:
    """Reduce-scatter through the group itself, for the reason of ``all_gather``."""
    if packed.is_complex():
        output, packed = torch.view_as_real(output), torch.view_as_real(packed)
    options = _SCATTER.get((op, async_op)) if isinstance(op, dist.ReduceOp.RedOpType) else None
    if options is None:
        options = ReduceScatterOptions()
        options.reduceOp = op
        options.asyncOp = async_op
        if isinstance(op, dist.ReduceOp.RedOpType):  # others have a factor, and are equal without
            _SCATTER[op, async_op] = options
    work: dist.Work | None = group._reduce_scatter_base(output, packed, options)
    return work


# The stream that is current on the device of an index, which the public function looks for first in
# two calls of Python.
current_stream: Callable[[int], torch.Stream] = torch._C._accelerator_getStream


def premul_sum(factor: float) -> Any:
    """Return the reduction "multiply by ``factor``, then sum"; only nccl knows it."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def chunk_cat(tensors: Sequence[torch.Tensor], world: int, out: torch.Tensor) -> None:
    """Cut each tensor on dim 0 into ``world`` padded chunks and fill ``out`` (world, n).

    One kernel that also casts; no public operator does it.
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=world, out=out)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Put meshes of one root mesh side by side; public slicing cannot reorder dims."""
    return DeviceMesh._concatenate(list(meshes))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    """Wrap without checks and without autograd: ten times cheaper than ``DTensor.from_local``.

    ``__init__`` does nothing, but goes through the compiler's guard and costs more than the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor object itself; ``to_local`` makes a view through autograd."""
    return cast("DTensor", tensor)._local_tensor


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Point a DTensor at other memory and keep the object, which an optimizer may hold."""
    cast("DTensor", tensor)._local_tensor = local


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Return mesh, placements and meta data of a DTensor in one object."""
    return cast("DTensor", tensor)._spec


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Describe a DTensor; needed by ``dtensor_of``."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return ``spec`` for the same tensor in another dtype."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == dtype:
        return spec
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype)
    )


def sharded_tensor_of(
    own: torch.Tensor | None,
    shards: Sequence[ShardMetadata],
    *,
    size: Sequence[int],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """Wrap this rank's shard, None if it has none, without the exchange of the public functions.

    ``shards`` are those of all ranks. This form is what checkpoints of flat parameters hold.
    """
    rank = dist.get_rank()
    mine = [each for each in shards if each.placement is not None and each.placement.rank() == rank]
    metadata = ShardedTensorMetadata(
        shards_metadata=list(shards),
        size=torch.Size(size),
        tensor_properties=TensorProperties(
            dtype=dtype,
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            # As the shard is: of an offloaded unit it lies on the host, and torch compares.
            pin_memory=own is not None and own.is_pinned(),
        ),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(own, each) for each in mine if own is not None], metadata, group
    )


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a dim that another mesh dim to the right also shards."""
    return _StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Placement) -> int | None:
    """Return over how many ranks the dims to the right cut before this one; None: not strided."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward is over; autograd has no public hook for it."""
    Variable._execution_engine.queue_callback(callback)


def graph_task() -> int:
    """Return the number of the backward that runs in this thread, -1 if none does."""
    return torch._C._current_graph_task_id()


def in_compiled_backward() -> bool:
    """Whether the compiler runs the backward under way; asking does not import the compiler."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


# Turns the recording of gradients on or off; the public contexts are three objects each.
set_gradients: Callable[[bool], None] = torch._C._set_grad_enabled

_OURS = -1  # handles of hooks count from zero


def hook_gradient(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Run ``hook`` when the gradient of ``tensor`` is complete, for good: without a handle.

    What ``register_hook`` does, which spends three quarters of its time on the handle. Users may
    register hooks on the same tensor before and after: autograd keeps a list of such dictionaries.
    """
    node = tensor.grad_fn
    if node is None or type(tensor) is not torch.Tensor:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = OrderedDict({_OURS: hook})
    node._register_hook_dict(tensor)


def post_accumulate_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Return the user's post-accumulate-grad hooks; autograd never runs them on a sharded leaf."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def group_allocate(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate through the backend of ``group``, which may then skip a copy; not public."""
    backend = group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def group_of(value: ShardedTensor) -> dist.ProcessGroup:
    """Return the ranks that hold a ShardedTensor; it has no public way to say which."""
    return value._process_group


def save_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks around the save of one module; there is no public way to see them."""
    return [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]


def load_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks before the load of one module, out of what torch wraps them in."""
    found = module._load_state_dict_pre_hooks.values()
    return [getattr(hook, "hook", hook) for hook in found]


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` belongs to the state; modules tell only in state dicts."""
    return name not in module._non_persistent_buffers_set


def has_replicate(module: torch.nn.Module) -> bool:
    """Whether torch's composable ``replicate`` was applied to ``module``."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def without_dispatch() -> AbstractContextManager[Any]:
    """Let a tensor subclass call the operator that it was asked about; the public way copies."""
    return cast("AbstractContextManager[Any]", torch._C._DisableTorchDispatch())


transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""How many functions of ``torch.func`` the caller is inside of; None outside."""


def without_transforms() -> AbstractContextManager[Any]:
    """Make plain tensors inside a function that ``torch.func`` transforms.

    Those made there are the transform's own, which cannot be sent and do not outlive it.
    """
    return cast("AbstractContextManager[Any]", torch._C._DisableFuncTorch())


F = TypeVar("F", bound=Callable[..., Any])

_ALL, _FRAME = (
    _FrameExecStrategy(_FrameAction.SKIP, callees)
    for callees in (_FrameAction.SKIP, _FrameAction.DEFAULT)
)
_REASON = (
    "FSDP gathers and frees parameters here, so no graph goes on from outside a sharded module to "
    "its inside; with fullgraph=True, compile sharded modules, not what is around them"
)


def untraced(function: F) -> F:
    """Keep ``function`` and all that it calls out of graphs that the compiler captures.

    As ``torch.compiler.disable`` does, which imports the compiler (seconds) and wraps the function
    at a price per call above that of most hooks. Marks cost nothing.
    """
    return _marked(function, _ALL)


def untraced_frame(function: F) -> F:
    """Keep ``function`` alone out of graphs, not what it calls: see ``untraced``."""
    return _marked(function, _FRAME)


def _marked(function: F, strategy: _FrameExecStrategy) -> F:
    # For when it runs in what the compiler was told to capture.
    set_code_exec_strategy(function.__code__, strategy)
    # For when it would become a part of a graph: there the graph ends.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function
