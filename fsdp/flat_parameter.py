"""Flat parameters: all parameters of a unit end to end, and what users see of them.

While a unit is sharded its module shows either one ``FlatParameter`` (``FlatExposure``) or the
user's own parameters as views of this rank's elements (``OriginalExposure``). While whole
parameters are summoned, both show them under their own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fsdp.engine.layout import Extent, Layout, end_to_end
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.param import FSDPParam, ParamModuleInfo, uid_of
from fsdp.engine.torch_private import post_accumulate_hooks

FLAT_PARAM = "_flat_param"
_TAKEN = "_fsdp_flattened"
_ALIGN_BYTES = 16


class _IsFlat(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Parameter) and getattr(instance, "_is_flat_param", False)


class FlatParameter(metaclass=_IsFlat):
    """What ``isinstance`` recognises flat parameters by.

    Their type is ``nn.Parameter`` itself: optimizers give subclasses their slow path.
    """

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Return a parameter over ``data`` (S,), marked as flat."""
        flat = nn.Parameter(data, requires_grad=requires_grad)
        flat._is_flat_param = True  # type: ignore[attr-defined]
        return flat


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """Lays parameters end to end, each at a multiple of ``align`` elements."""

    align: int

    @classmethod
    def of(cls, dtype: torch.dtype, *, use_orig_params: bool) -> EndToEnd:
        """Return it for parameters computed in ``dtype``: views of 16 bytes, or no gaps."""
        return cls(align=_ALIGN_BYTES // dtype.itemsize if use_orig_params else 1)

    def __call__(self, extents: Sequence[Extent], world: int, *, align: int) -> Layout:
        """Return the layout; the engine's ``align`` is for parameters cut by themselves."""
        return end_to_end(extents, world, align=self.align)


@dataclass(eq=False, slots=True, kw_only=True)
class FlatParam(FSDPParam):
    """One original parameter inside a flat one.

    Attributes:
        local: this rank's elements (n,), a part of the shard.
        original: the user's object, if it stays; else None.
        gradient: the gradient of ``original`` while whole parameters are summoned.
    """

    local: torch.Tensor
    original: nn.Parameter | None
    gradient: torch.Tensor | None = None


def check_flattenable(params: Sequence[nn.Parameter], *, use_orig_params: bool) -> None:
    """Refuse parameters that cannot share one flat parameter.

    Raises:
        ValueError: integers, several dtypes, flat already, or owned by another unit.
    """
    for param in params:
        if isinstance(param, FlatParameter):
            raise ValueError("Cannot flatten a `FlatParameter`: the module was wrapped before")
        if hasattr(param, _TAKEN):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is shared with a unit that was "
                "wrapped before: one copy would be trained without the other. Wrap all modules "
                "that share it in one unit."
            )
        if not (param.is_floating_point() or param.is_complex()):
            raise ValueError("Cannot flatten integer dtype tensors")
    for what, values in (
        ("dtype", {param.dtype for param in params}),
        ("`requires_grad` when `use_orig_params=False`", {p.requires_grad for p in params}),
    ):
        if len(values) > 1 and not (use_orig_params and "grad" in what):
            shown = sorted(map(str, values))
            raise ValueError(f"Must flatten tensors with uniform {what} but got {shown}")


def flatten(
    params: Sequence[nn.Parameter],
    owners: Sequence[ParamModuleInfo],
    info: DataParallelMeshInfo,
    lay_out: EndToEnd,
    *,
    use_orig_params: bool,
) -> list[FlatParam]:
    """Copy this rank's elements out of ``params``.

    *Memory*: one shard. *Collective*: no.
    """
    layout = lay_out([Extent.flat(p.numel()) for p in params], info.shard_size, align=1)
    found = []
    for index, (param, owner) in enumerate(zip(params, owners, strict=True)):
        piece = layout.piece(index, info.shard_rank)
        local = param.detach().reshape(-1)[piece.start : piece.stop].clone()
        setattr(param, _TAKEN, True)
        if not use_orig_params:
            refuse_in_optimizers(param, owner.param_name, "were flattened after it was made")
        found.append(
            FlatParam(
                info=owner,
                uid=uid_of(param),
                shape=param.shape,
                dim=None,
                dtype=param.dtype,
                local=local,
                original=param if use_orig_params else None,
            )
        )
    return found


class _Exposure:
    """What both exposures have in common."""

    def local(self, param: FlatParam) -> torch.Tensor:
        """Return this rank's elements of ``param``."""
        return param.local

    def show_post_forward(
        self, params: Sequence[FlatParam], pieces: Sequence[torch.Tensor], info: Any
    ) -> None:
        """Flat parameters are kept whole or not at all.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("a flat parameter is not resharded to a smaller mesh")

    def plain_gradient(self, param: FlatParam, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient``, which is plain."""
        return gradient


class FlatExposure(_Exposure):
    """Registers one flat parameter on the wrapped module; the original names are attributes.

    Args:
        owner: the wrapped module.
        requires_grad: of the flat parameter.
    """

    def __init__(self, owner: nn.Module, *, requires_grad: bool) -> None:
        self._owner = owner
        self._requires_grad = requires_grad
        self._flat: nn.Parameter | None = None
        self._places: list[tuple[int, int]] = []  # (offset, elements) in the shard
        self._absent: dict[FlatParam, torch.Tensor] = {}

    @property
    def flat(self) -> nn.Parameter:
        """The flat parameter, (S,)."""
        assert self._flat is not None, "a shard is bound when a group is made"
        return self._flat

    def bind(
        self, params: Sequence[FlatParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Point the flat parameter at ``shard``; optimizers keep the object."""
        self._places = [(int(p.storage_offset()), p.numel()) for p in pieces]
        for param, piece in zip(params, pieces, strict=True):
            param.local = piece
            # Outside of forward there is no such tensor; code that prints modules asks for it.
            self._absent[param] = torch.empty(param.shape, dtype=param.dtype, device="meta")
        if self._flat is None:
            self._flat = FlatParameter(shard, self._requires_grad)
            for param in params:
                for module, name, _ in param.slots:
                    module._parameters.pop(name, None)
            self.show_sharded(params)
            self._owner._parameters[FLAT_PARAM] = self._flat
        else:
            self._flat.data = shard

    def reread(self, params: Sequence[FlatParam]) -> None:
        """Adopt where the user has moved the flat parameter, or what it was replaced by.

        Raises:
            ValueError: it has another size.
        """
        found = self._owner._parameters.get(FLAT_PARAM)
        if found is None:
            return
        if found.shape != self.flat.shape:
            raise ValueError(
                f"the flat parameter was replaced by one of shape {tuple(found.shape)}; wanted "
                f"{tuple(self.flat.shape)}"
            )
        if found is not self._flat:
            self._flat = found
            found._is_flat_param = True  # type: ignore[attr-defined]
        data = found.data
        for param, (offset, numel) in zip(params, self._places, strict=True):
            param.local = data.narrow(0, offset, numel)

    def requires_grad(self, param: FlatParam) -> bool:
        """Whether the flat parameter is to be trained."""
        return self.flat.requires_grad

    def leaf(self, param: FlatParam, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf, a plain tensor: no parameter but the flat one is registered."""
        return cast("nn.Parameter", whole.requires_grad_(self.flat.requires_grad))

    def show_sharded(self, params: Sequence[FlatParam]) -> None:
        """Put tensors without memory where the whole ones were."""
        for param in params:
            _set_attributes(param, self._absent[param])

    def show_whole(self, params: Sequence[FlatParam]) -> None:
        """Put the leaves there."""
        for param in params:
            assert param.unsharded is not None
            _set_attributes(param, param.unsharded)

    def accumulates(self, params: Sequence[FlatParam]) -> bool:
        """Whether a gradient is there already, or user code waits for one."""
        return self.flat.grad is not None or bool(post_accumulate_hooks(self.flat))

    def hand_over(
        self, params: Sequence[FlatParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Set the flat gradient (S,), or add to the one that is there."""
        flat = self.flat
        if flat.grad is None:
            flat.grad = shard
        else:
            flat.grad += shard
        for hook in post_accumulate_hooks(flat):
            hook(flat)

    def show_full(self, params: Sequence[FlatParam], wholes: Sequence[torch.Tensor]) -> None:
        """Register ``wholes`` under the original names instead of the flat parameter."""
        self._owner._parameters.pop(FLAT_PARAM)
        for param, whole in zip(params, wholes, strict=True):
            parameter = nn.Parameter(whole, requires_grad=self.flat.requires_grad)
            for module, name, _ in param.slots:
                module.__dict__.pop(name, None)
                module.register_parameter(name, parameter)

    def full(self, param: FlatParam) -> torch.Tensor:
        """Return what is registered as ``param`` while ``show_full`` holds."""
        return cast("nn.Parameter", param.registered()).data

    def hide_full(self, params: Sequence[FlatParam]) -> None:
        """Undo ``show_full``."""
        for param in params:
            for module, name, _ in param.slots:
                module._parameters.pop(name, None)
        self.show_sharded(params)
        self._owner._parameters[FLAT_PARAM] = self.flat


def _set_attributes(param: FlatParam, tensor: torch.Tensor) -> None:
    for module, name, plain in param.slots:
        if plain:
            module.__dict__[name] = tensor
        else:
            setattr(module, name, tensor)  # a class that keeps a list of its weights


class OriginalExposure(_Exposure):
    """Keeps the user's parameters registered, each a view (n,) of this rank's elements of it.

    Args:
        keeps_shape: nothing is sharded, so each has all its elements and keeps its shape.
    """

    def __init__(self, *, keeps_shape: bool) -> None:
        self._keeps_shape = keeps_shape

    def _shown(self, param: FlatParam, piece: torch.Tensor) -> torch.Tensor:
        return piece.view(param.shape) if self._keeps_shape else piece

    def bind(
        self, params: Sequence[FlatParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Point the user's parameters at their pieces; optimizers keep the objects."""
        for param, piece in zip(params, pieces, strict=True):
            param.local = piece
            original_of(param).data = self._shown(param, piece)

    def reread(self, params: Sequence[FlatParam]) -> None:
        """Adopt what the user has put in the place of a parameter or of its data.

        Raises:
            RuntimeError: it has another shape.
        """
        for param in params:
            found = param.registered()
            if found is None or found is param.unsharded:
                continue
            wanted = self._shown(param, param.local).shape
            if found.shape != wanted:
                raise RuntimeError(
                    "Cannot writeback when the parameter shape changes\n"
                    f"'{param.fqn or param.info.param_name}' expects {tuple(wanted)} "
                    f"but got {tuple(found.shape)}"
                )
            if found is not param.original:
                param.original = found
                setattr(found, _TAKEN, True)
                param.install(found)
            param.local = found.data.reshape(-1)

    def requires_grad(self, param: FlatParam) -> bool:
        """Whether the user's parameter is to be trained."""
        return original_of(param).requires_grad

    def leaf(self, param: FlatParam, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf of forward and backward."""
        return nn.Parameter(whole, requires_grad=original_of(param).requires_grad)

    def show_sharded(self, params: Sequence[FlatParam]) -> None:
        """Register the user's parameters."""
        for param in params:
            param.install(param.original)

    def show_whole(self, params: Sequence[FlatParam]) -> None:
        """Register the leaves."""
        for param in params:
            param.install(param.unsharded)

    def accumulates(self, params: Sequence[FlatParam]) -> bool:
        """Whether a gradient is there already, or user code waits for one."""
        originals = [original_of(param) for param in params]
        return any(o.grad is not None or post_accumulate_hooks(o) for o in originals)

    def hand_over(
        self, params: Sequence[FlatParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Set each gradient, or add to it; none where nothing is trained or nothing lies here."""
        for param, piece in zip(params, pieces, strict=True):
            original = original_of(param)
            if not original.requires_grad or not piece.numel():
                continue
            gradient = self._shown(param, piece)
            if original.grad is None:
                original.grad = gradient
            else:
                original.grad += gradient
            for hook in post_accumulate_hooks(original):
                hook(original)

    def show_full(self, params: Sequence[FlatParam], wholes: Sequence[torch.Tensor]) -> None:
        """Point the user's parameters at ``wholes``; their gradients are put aside."""
        for param, whole in zip(params, wholes, strict=True):
            original = original_of(param)
            param.gradient, original.grad = original.grad, None
            original.data = whole

    def full(self, param: FlatParam) -> torch.Tensor:
        """Return what is registered as ``param`` while ``show_full`` holds."""
        return cast("nn.Parameter", param.registered()).data

    def hide_full(self, params: Sequence[FlatParam]) -> None:
        """Undo ``show_full``."""
        for param in params:
            original = original_of(param)
            original.data = self._shown(param, param.local)
            original.grad, param.gradient = param.gradient, None
            param.install(original)


def original_of(param: FSDPParam) -> nn.Parameter:
    """Return the user's parameter, which stays with original names."""
    assert isinstance(param, FlatParam)
    assert param.original is not None, "the user's parameter stays with original names"
    return param.original
