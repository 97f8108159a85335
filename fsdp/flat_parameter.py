"""Flat parameters: all parameters of a unit end to end, in the order in which they lie in memory.

Says what may share a flat parameter, how a unit's parameters are laid out and cut, and what is
known of each. What users see of them is in ``flat_exposure.py`` and ``original_exposure.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fsdp.engine.layout import Extent, Layout, end_to_end
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.param import FSDPParam, ParamModuleInfo, uid_of
from fsdp.engine.torch_private import local_tensor, post_accumulate_hooks
from fsdp.outer_form import OuterForm, local_gradient, outer_form

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


def flat_params(params: Iterable[FSDPParam]) -> list[FlatParam]:
    """Return those of ``params`` that lie in a flat parameter: all plain ones of its group."""
    return [param for param in params if isinstance(param, FlatParam)]


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
        stride: of the user's parameter, if it is dense; else that of a copy of it.
        order: its dims from the outermost in memory to the innermost; None if that is their order.
        whole: the memory behind ``unsharded``, whatever the user has put in its place.
        address: of ``local``, when it was last bound.
        gradient: the gradient of ``original`` while whole parameters are summoned.
        held: whether ``original`` shows a whole gradient that waits for a reduction.
        earlier: the reduced gradient that it hides.
        outer: what it is outside, if tensor parallelism has cut it: everything else here is about
            this rank's part; None: a plain tensor.
    """

    local: torch.Tensor
    original: nn.Parameter | None
    stride: tuple[int, ...]
    order: tuple[int, ...] | None
    whole: torch.Tensor | None = None
    address: int = 0
    gradient: torch.Tensor | None = None
    held: bool = False
    earlier: torch.Tensor | None = None
    outer: OuterForm | None = None

    @property
    def outer_shape(self) -> torch.Size:
        """The shape that users know."""
        return self.shape if self.outer is None else self.outer.shape

    def shown(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what users see of ``whole``, this rank's part; the memory is the same."""
        return whole if self.outer is None else self.outer.around(whole)

    def inside(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of what users see, or of a whole value."""
        return value if self.outer is None else self.outer.inside(value)

    def leaf_gradient(self) -> torch.Tensor | None:
        """Return this rank's part of the gradient that the leaf has; None if it has none.

        *Collective* over the tensor-parallel mesh for one that is a partial sum there.
        """
        gradient = None if self.unsharded is None else self.unsharded.grad
        return None if gradient is None else self.own_gradient(gradient)

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient as autograd has left it; see ``leaf_gradient``."""
        if self.outer is None:
            return gradient
        return local_gradient(gradient, self.outer.spec.placements, self.fqn)

    @property
    def contiguous(self) -> bool:
        """Whether the user's parameter lies in the order of its indices."""
        return self.order is None and self.stride[-1] == 1

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a whole ``tensor`` that enumerates it as the flat parameter does."""
        return tensor if self.order is None else tensor.permute(self.order)

    def restored(self, run: torch.Tensor) -> torch.Tensor:
        """Return ``run`` (numel,) of a whole flat parameter in the user's shape and strides."""
        return run.as_strided(self.shape, self.stride)


def order_in_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims of ``tensor`` from the outermost in memory to the innermost.

    None if that is their order, or if the tensor is not dense and has to be copied in any case.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def check_flattenable(params: Sequence[nn.Parameter], *, use_orig_params: bool) -> None:
    """Refuse parameters that cannot share one flat parameter.

    Raises:
        ValueError: integers, several dtypes, flat already, or owned by another unit.
        RuntimeError: an optimizer is to step in backward on parameters that will be gone.
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
        if not use_orig_params and hasattr(param, "_in_backward_optimizers"):
            raise RuntimeError(
                "FSDP optimizer in backward only supported with use_orig_params=True!"
            )
    for what, values in (
        ("dtype", {param.dtype for param in params}),
        ("`requires_grad` when `use_orig_params=False`", {p.requires_grad for p in params}),
    ):
        if len(values) > 1 and not (use_orig_params and "grad" in what):
            shown = sorted(map(str, values))
            raise ValueError(f"Must flatten tensors with uniform {what} but got {shown}")


def leave_values(param: nn.Parameter) -> None:
    """Give a parameter that was replaced memory of its own: users may put it back.

    *Memory*: its values, as long as somebody has it.
    """
    if param.untyped_storage().nbytes():  # else it was freed, and there is nothing to read
        with torch.inference_mode(False), torch.no_grad():
            param.data = param.data.clone()


def mark_taken(param: nn.Parameter) -> None:
    """Let another unit refuse ``param``."""
    setattr(param, _TAKEN, True)


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
    shapes = [p.shape if outer_form(p) is None else local_tensor(p).shape for p in params]
    layout = lay_out([Extent.flat(s.numel()) for s in shapes], info.shard_size, align=1)
    found = []
    for index, (param, owner) in enumerate(zip(params, owners, strict=True)):
        piece, outer = layout.piece(index, info.shard_rank), outer_form(param)
        data = param.detach() if outer is None else local_tensor(param).detach()
        order = order_in_memory(data)
        dense = order is not None or data.is_contiguous()
        run = (data if order is None else data.permute(order)).reshape(-1)
        mark_taken(param)
        stays = use_orig_params and outer is None
        if not stays:
            refuse_in_optimizers(param, owner.param_name, "were flattened after it was made")
        local = run[piece.start : piece.stop].clone()
        made = FlatParam(
            info=owner,
            uid=uid_of(param),
            shape=data.shape,
            dim=None,
            dtype=param.dtype,
            stride=data.stride() if dense else run.view(data.shape).stride(),
            order=order,
            local=local,
            original=param if stays else None,
            outer=outer,
        )
        if use_orig_params and not stays:
            made.original = _stand_in(param, local)
            made.install(made.original)
        found.append(made)
    return found


def _stand_in(param: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
    """Return a plain parameter in the place of a DTensor, which cannot show a part of itself."""
    found = nn.Parameter(local, requires_grad=param.requires_grad)
    mark_taken(found)
    return found


class BaseExposure:
    """What the exposures of flat parameters have in common.

    Args:
        low_dtype: the dtype in which reduced gradients are left to users; None: the parameters'.
        watches: whether parameters that the user has replaced are looked for before each gather.
    """

    def __init__(self, *, low_dtype: torch.dtype | None, watches: bool) -> None:
        self._low_dtype = low_dtype
        self._watches = watches
        self._as_they_are = False  # whether gradients lie as the flat parameter has them

    def _look_at(self, params: Sequence[FlatParam]) -> None:
        """Note what ``bind`` is told of a whole group."""
        self._as_they_are = all(param.order is None and param.outer is None for param in params)

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

    def plain_gradients(
        self, params: Sequence[FlatParam], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return ``gradients`` in the order of the flat parameter.

        *Collective* over the tensor-parallel mesh for gradients that are partial sums there.

        Raises:
            RuntimeError: backward was run to be differentiated itself.
        """
        # Such a backward has gradients on, and any other has not.
        if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients):
            raise RuntimeError(
                "FSDP does not support gradients of gradients: call backward() without "
                "create_graph=True"
            )
        if self._as_they_are:
            return list(gradients)
        return [
            gradient
            if param.order is None and param.outer is None
            else param.in_order(param.own_gradient(gradient))
            for param, gradient in zip(params, gradients, strict=True)
        ]

    def full(self, param: FlatParam) -> torch.Tensor:
        """Return what is registered as ``param`` while whole parameters are; this rank's part."""
        return param.inside(cast("nn.Parameter", param.registered()).data)

    def _add_gradient(self, param: nn.Parameter, gradient: torch.Tensor) -> None:
        """Make ``gradient`` that of ``param``, or add it to the one there; run the users' hooks."""
        earlier, low = param.grad, self._low_dtype
        if low is not None:
            total = gradient if earlier is None else earlier.to(gradient.dtype) + gradient
            set_gradient(param, total.to(low))
        elif earlier is None:
            param.grad = gradient
        else:
            earlier += gradient
        for hook in post_accumulate_hooks(param):
            hook(param)


def is_over(
    found: nn.Parameter | None,
    wanted: nn.Parameter | None,
    memory: torch.Tensor,
    form: tuple[Sequence[int], Sequence[int]],
) -> bool:
    """Whether ``found`` is the object ``wanted`` over ``memory``, of shape and strides ``form``."""
    return (
        found is not None
        and found is wanted
        and found.data_ptr() == memory.data_ptr()
        and (found.shape, found.stride()) == form
        and found.dtype == memory.dtype
        and found.device == memory.device
        and found.device.type != "meta"  # where all addresses are equal
    )


def set_gradient(param: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set ``param.grad`` to a gradient that may differ from it in shape, dtype and device."""
    alike = gradient.dtype == param.dtype and gradient.device == param.device
    if alike and gradient.shape == param.shape:
        param.grad = gradient
        return
    # Assigning checks all three; changing the data of what is assigned does not.
    param.grad = torch.empty_like(param)
    param.grad.data = gradient


def put_on_leaf(param: FlatParam, gradient: torch.Tensor) -> None:
    """Give a gradient that waited for a reduction back to the leaf of ``param``."""
    whole, shown = param.unsharded, param.shown(gradient)
    if whole is None or whole.dtype != gradient.dtype or whole.device != gradient.device:
        # The leaf was made anew since, in another dtype.
        kept = param.accumulated_grad
        param.accumulated_grad = shown if kept is None else kept + shown
    elif whole.grad is None:
        whole.grad = shown
    else:
        whole.grad += shown
