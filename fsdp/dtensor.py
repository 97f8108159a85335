"""The exposure of ``fully_shard``: one DTensor per parameter while it is sharded.

Turns an original parameter into (plain local tensor, DTensor spec), and plain memory back into
DTensors. Which placements they have is decided in ``placement.py``. No order, no hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp.dtensor_optimizers import expect_served
from fsdp.empty_shard import EmptyShard
from fsdp.engine.exposure import CutShard
from fsdp.engine.extension import extends
from fsdp.engine.layout import Extent, side_by_side
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.optimizer_guard import is_looked_at, refuse_in_optimizers
from fsdp.engine.param import WHOLE, FSDPParam, ParamModuleInfo, install_all, uid_of
from fsdp.engine.torch_private import (
    DTensorSpec,
    dtensor_of,
    local_tensor,
    make_spec,
    post_accumulate_hooks,
    set_local_tensor,
    spec_of,
    spec_with_dtype,
)
from fsdp.outer_form import local_gradient
from fsdp.placement import data_parallel_dims, sharding_spec


@dataclass(eq=False, slots=True, kw_only=True, repr=False)
class DTensorParam(FSDPParam):
    """A parameter that is a DTensor while its group is sharded.

    Attributes:
        dim: the dim that is cut.
        sharded: what is registered and what the optimizer steps on.
        spec: mesh, placements and meta data of ``sharded``.
        whole_spec: the same of the whole parameter under tensor parallelism; None: a plain tensor.
        data_parallel_dims: dims of the parameter's mesh over which this package reduces.
        address: of the memory in the shard to which ``sharded`` was last bound; None: it has memory
            of its own, for an extension, or none, as a fake tensor.
        shown: what was registered in its place when it was last gathered.
        whole: the memory of ``unsharded``; None: that of a tensor subclass.
    """

    dim: int
    sharded: nn.Parameter
    spec: DTensorSpec
    whole_spec: DTensorSpec | None
    data_parallel_dims: frozenset[int]
    address: int | None = None
    shown: nn.Parameter | None = None
    whole: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a parameter is to be cut: along which dim, and as what it is shown then."""

    dim: int
    spec: DTensorSpec


def cut_of(original: nn.Parameter, name: str, info: DataParallelMeshInfo, placement: Shard) -> Cut:
    """Return how ``original`` is cut over the mesh of ``info``; changes nothing.

    Raises:
        NotImplementedError: not contiguous, or a dim other than 0 that does not divide.
        AssertionError: the parameter has no such dim.
        ValueError: a parameter that does not fit ``dp_mesh_dims``.
    """
    if not original.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {name} has "
            f"shape={tuple(original.shape)} stride={original.stride()}"
        )
    shape = local_tensor(original).shape if isinstance(original, DTensor) else original.shape
    dim = placement.dim + original.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise AssertionError(
            f"Shard dim {placement.dim} is invalid for {len(shape)}D tensor: {original.shape}"
        )
    if dim > 0 and shape[dim] % info.shard_size:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {name} has "
            f"{tuple(shape)} (world size: {info.shard_size})"
        )
    return Cut(dim=dim, spec=sharding_spec(original, name, info, dim))


def shard_parameter(
    original: nn.Parameter,
    owners: ParamModuleInfo,
    info: DataParallelMeshInfo,
    cut: Cut,
    *,
    offload: bool,
) -> DTensorParam:
    """Replace ``original`` on its owners by this rank's part of it, on the CPU if ``offload``.

    *Memory*: one padded piece. *Collective*: no.
    """
    whole = local_tensor(original) if isinstance(original, DTensor) else original.data
    dim, spec = cut.dim, cut.spec
    piece = side_by_side([Extent.of(whole.shape, dim)], info.shard_size).piece(0, info.shard_rank)
    # A copy: a view would keep the whole parameter alive until it is moved into a shard.
    local = whole.narrow(dim, piece.start, piece.stop - piece.start).clone(
        memory_format=torch.contiguous_format
    )
    if offload and local.device.type != "meta":
        # Before it is wrapped: a DTensor reports the device it was made with.
        local = local.cpu()
    sharded = nn.Parameter(
        dtensor_of(local, spec, requires_grad=False), requires_grad=original.requires_grad
    )
    param = DTensorParam(
        info=owners,
        uid=uid_of(original),
        shape=whole.shape,
        dim=dim,
        dtype=original.dtype,
        sharded=sharded,
        spec=spec,
        whole_spec=spec_of(original) if isinstance(original, DTensor) else None,
        data_parallel_dims=data_parallel_dims(original, info),
    )
    param.install(sharded)
    _guard(param)
    return param


def _guard(param: DTensorParam) -> None:
    """Let what cannot be done to the registered DTensor be refused. Idempotent."""
    if not is_looked_at(param.sharded):
        expect_served(param.sharded, param.name)


def _registered(module: nn.Module, name: str, plain: bool) -> torch.Tensor | None:  # noqa: FBT001
    """Return what ``module`` has as the parameter ``name``; ``plain``: it sets it as torch does."""
    found: torch.Tensor | None = (
        module._parameters.get(name) if plain else getattr(module, name, None)
    )
    return found


def _kind(found: object) -> str:
    if found is None:
        return "nothing"
    kind = type(found).__name__
    return f"a plain {kind}" if isinstance(found, torch.Tensor) else f"a {kind}"


def _cut_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether the same elements lie in the same places; names of mesh dims do not matter."""
    return (one.shape, one.placements) == (other.shape, other.placements) and (
        one.mesh == other.mesh or _ranks(one) == _ranks(other)
    )


def _ranks(spec: DTensorSpec) -> tuple[object, ...]:
    return spec.mesh.device_type, spec.mesh.mesh.tolist()


def _shown(spec: DTensorSpec) -> str:
    kind, ranks = _ranks(spec)
    return f"shape {tuple(spec.shape)} and placements {spec.placements} over {kind} ranks {ranks}"


def _check_places(params: Sequence[DTensorParam]) -> None:
    """Refuse what was replaced where it is registered first, or later, but not everywhere."""
    for param in params:
        found, *others = [_registered(*slot) for slot in param.slots]
        if any(other is not found for other in others):
            raise ValueError(
                f"parameter '{param.name}' was replaced after sharding in one of its places only; "
                "wanted the same Parameter in all of them"
            )


def _detach(param: DTensorParam) -> None:
    """Leave the DTensor that was replaced its values: users may put it back.

    *Memory*: those of this rank, as long as somebody has the DTensor.
    """
    if param.address is not None:
        with torch.inference_mode(False), torch.no_grad():
            set_local_tensor(param.sharded, local_tensor(param.sharded).clone())


def with_own_storage(piece: torch.Tensor) -> torch.Tensor:
    """Return the contiguous ``piece`` of a shard as a tensor with a storage over its bytes alone.

    A DTensor takes over the storage offset of what it is made around: one around a view would be
    taken for a view by whoever saves, copies or compiles, and fail there.
    """
    memory = piece.untyped_storage()
    if memory.device.type == "meta":  # so it is behind fake tensors, on whatever device they are
        return torch.empty_like(piece)
    start = piece.storage_offset() * piece.element_size()
    storage = memory[start : start + piece.nbytes]
    return piece.new_empty(0).set_(storage, 0, piece.shape, piece.stride())


class DTensorExposure:
    """Registers one DTensor per parameter; gradients are DTensors of the same placements."""

    def local(self, param: DTensorParam) -> torch.Tensor:
        """Return the local tensor of the registered parameter."""
        return local_tensor(param.sharded)

    def bind(
        self, params: Sequence[DTensorParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Point each DTensor at its piece; optimizers keep the object."""
        for param, piece in zip(params, pieces, strict=True):
            local = with_own_storage(piece)
            set_local_tensor(param.sharded, local)
            param.address = local.data_ptr() if type(local) is torch.Tensor else None

    def changed(self, params: Sequence[DTensorParam]) -> bool:
        """Whether a DTensor was replaced, or has other memory: it was swapped, or that was moved.

        On the host, to share a tensor with another process, or to send it there, moves its memory.

        Raises:
            ValueError: one was replaced in one of its places only.
        """
        for param in params:
            sharded = param.sharded
            for module, name, plain in param.slots:
                # As ``_registered``: the call costs more than all else here, before each gather.
                if (
                    module._parameters.get(name) if plain else getattr(module, name, None)
                ) is not sharded:
                    _check_places(params)
                    return True
            local = sharded._local_tensor  # type: ignore[attr-defined]
            if param.address is not None and local.data_ptr() != param.address:
                return True
        return False

    def optimized(self, params: Sequence[DTensorParam]) -> Iterable[torch.Tensor]:
        """Return the DTensors."""
        return (param.sharded for param in params)

    def requires_grad(self, params: Sequence[DTensorParam]) -> list[bool]:
        """Return which of the DTensors are to be trained."""
        return [param.sharded.requires_grad for param in params]

    def reread(self, params: Sequence[DTensorParam]) -> None:
        """Adopt parameters that the user registered since.

        Raises:
            ValueError: one is no DTensor, or is cut in another way.
        """
        for param in params:
            self._reread(param)

    def _reread(self, param: DTensorParam) -> None:
        found = _registered(*param.slots[0])
        if found is not None and found is param.unsharded:
            # Who puts back what was there, as ``functional_call`` does, may have found it whole.
            found = param.sharded
        if not isinstance(found, DTensor) or not isinstance(found, nn.Parameter):
            raise ValueError(
                f"parameter '{param.name}' was replaced after sharding by {_kind(found)}; wanted a "
                f"Parameter that is a DTensor with placements {param.spec.placements}. Use "
                "distribute_tensor on the mesh, or replace it before sharding."
            )
        spec = spec_of(found)
        if not _cut_alike(spec, param.spec):
            raise ValueError(
                f"parameter '{param.name}' was replaced after sharding by one of {_shown(spec)}; "
                f"wanted {_shown(param.spec)}"
            )
        if found is not param.sharded:
            _detach(param)
            param.sharded = cast("nn.Parameter", found)
        # A load replaces it in one place after another.
        if any(_registered(*slot) is not param.sharded for slot in param.slots):
            param.install(param.sharded)
        if extends(local_tensor(found)):
            param.address = None
        _guard(param)
        param.spec = spec

    def leaf(self, param: DTensorParam, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf of forward and backward: a plain tensor, or a DTensor under TP."""
        if param.whole_spec is not None:
            spec = spec_with_dtype(param.whole_spec, whole.dtype)
            whole = dtensor_of(whole, spec, requires_grad=False)
        # What is given to ``.data`` of a subclass changes nothing.
        param.whole = whole if type(whole) is torch.Tensor else None
        return nn.Parameter(whole, requires_grad=param.sharded.requires_grad)

    def show_sharded(self, params: Sequence[DTensorParam]) -> None:
        """Register the DTensors; what users have put in the place of whole ones stays.

        Before the next gather ``reread`` adopts it, or names it.
        """
        for param in params:
            shown, sharded = param.shown, param.sharded
            for module, name, plain in param.slots:
                if plain:
                    if module._parameters.get(name) is shown:
                        module._parameters[name] = sharded
                elif getattr(module, name, None) is shown:
                    setattr(module, name, sharded)

    def show_whole(self, params: Sequence[DTensorParam]) -> None:
        """Register the leaves; one that was given other memory is over that of its group again."""
        install_all(params, map(WHOLE, params))
        for param in params:
            leaf, whole = param.unsharded, param.whole
            assert leaf is not None
            param.shown = leaf
            if whole is not None and leaf.data_ptr() != whole.data_ptr():
                leaf.data = whole

    def check_whole(self, params: Sequence[DTensorParam]) -> None:
        """Refuse what has taken the place of a leaf or its memory: gradients would be of neither.

        Raises:
            ValueError: names the parameter.
        """
        for param in params:
            leaf, whole = param.unsharded, param.whole
            assert leaf is not None
            ours = whole is None or leaf.data_ptr() == whole.data_ptr()
            for module, name, plain in param.slots:
                found = module._parameters.get(name) if plain else getattr(module, name, None)
                # The sharded one is there if ``functional_call`` has put it back.
                ours = ours and (found is leaf or found is param.sharded)
            if not ours:
                raise ValueError(
                    f"parameter '{param.name}', or its memory, was replaced between forward and "
                    "backward while it was whole. Call reshard() first, or replace it after "
                    "backward."
                )

    def show_post_forward(
        self,
        params: Sequence[DTensorParam],
        pieces: Sequence[torch.Tensor],
        info: DataParallelMeshInfo,
    ) -> None:
        """Register DTensors over the smaller mesh: replicated over its groups, sharded inside."""
        for param, piece in zip(params, pieces, strict=True):
            shown = self._over_smaller_mesh(param, piece, info)
            refuse_in_optimizers(
                shown, param.name, "were kept over a smaller mesh when it was made"
            )
            param.install(shown)
            param.shown = shown

    def _over_smaller_mesh(
        self, param: DTensorParam, piece: torch.Tensor, info: DataParallelMeshInfo
    ) -> nn.Parameter:
        if param.whole_spec is not None:
            raise NotImplementedError(
                "Resharding to smaller mesh is not supported for DTensor parameters yet: "
                f"'{param.fqn}'"
            )
        meta = param.spec.tensor_meta
        assert meta is not None
        spec = make_spec(
            info.mesh,
            (Replicate(), Shard(param.dim)),
            shape=param.shape,
            stride=meta.stride,
            dtype=piece.dtype,
        )
        return nn.Parameter(
            dtensor_of(piece, spec, requires_grad=False), requires_grad=param.sharded.requires_grad
        )

    def plain_gradients(
        self, params: Sequence[DTensorParam], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the local gradients, in the parameters' own placements under TP.

        *Collective* over the tensor-parallel mesh for gradients that are partial sums there.
        """
        return [
            gradient
            if param.whole_spec is None
            else local_gradient(
                gradient, param.whole_spec.placements, param.fqn, free=param.data_parallel_dims
            )
            for param, gradient in zip(params, gradients, strict=True)
        ]

    def accumulates(self, params: Sequence[DTensorParam]) -> bool:
        """Whether a gradient is there already, or user code waits for one."""
        return any(p.sharded.grad is not None or post_accumulate_hooks(p.sharded) for p in params)

    def hand_over(self, params: Sequence[DTensorParam], shard: torch.Tensor, cut: CutShard) -> None:
        """Set the gradients, or add to those that are there; then run the users' hooks."""
        sums: list[torch.Tensor] = []
        addends: list[torch.Tensor] = []
        hooked: list[nn.Parameter] = []
        for param, piece in zip(params, cut(), strict=True):
            sharded = param.sharded
            present = sharded.grad
            if sharded._post_accumulate_grad_hooks:
                hooked.append(sharded)
            if present is None:
                if not piece.numel():
                    piece = EmptyShard.of(piece)
                sharded.grad = dtensor_of(piece, param.spec, requires_grad=False)
                continue
            if not isinstance(present, DTensor):
                raise AssertionError(
                    f"Expected the gradient of '{param.fqn}' to be a DTensor, got {type(present)}"
                )
            sums.append(local_tensor(present))
            addends.append(piece)
        if sums:
            torch._foreach_add_(sums, addends)
        for sharded in hooked:
            for hook in post_accumulate_hooks(sharded):
                hook(sharded)
