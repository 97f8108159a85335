"""One flat parameter on the wrapped module; the original names are plain attributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from fsdp.engine.exposure import CutShard
from fsdp.engine.param import WHOLE
from fsdp.engine.shard import check_memory
from fsdp.engine.torch_private import post_accumulate_hooks
from fsdp.flat_parameter import (
    FLAT_PARAM,
    BaseExposure,
    FlatParam,
    FlatParameter,
    is_over,
    leave_values,
    put_on_leaf,
    set_gradient,
)


class FlatExposure(BaseExposure):
    """Registers one flat parameter on the wrapped module; the original names are attributes.

    Args:
        owner: the wrapped module.
        requires_grad: of the flat parameter.
        low_dtype: the dtype in which reduced gradients are left to users; None: the parameter's.
        watches: whether another flat parameter is looked for before each gather.
    """

    def __init__(
        self,
        owner: nn.Module,
        *,
        requires_grad: bool,
        low_dtype: torch.dtype | None,
        watches: bool,
    ) -> None:
        super().__init__(low_dtype=low_dtype, watches=watches)
        self._owner = owner
        self._requires_grad = requires_grad
        self._flat: nn.Parameter | None = None
        self._places: list[tuple[int, int]] = []  # (offset, elements) in the shard
        self._address = 0  # of the shard
        self._absent: dict[FlatParam, torch.Tensor] = {}
        # Every place of a tensor and what it gets there, for the four changes of each step.
        self._absent_places: list[Place] = []
        self._whole_places: list[Place] | None = None  # None: leaves were made since
        self._holds = False  # whether the flat parameter shows a whole gradient
        self._held: torch.Tensor | None = None  # that gradient, also while the leaves have it
        self._earlier: torch.Tensor | None = None  # the reduced gradient that it hides

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
        self._address = shard.data_ptr()
        self._look_at(params)
        for param, piece in zip(params, pieces, strict=True):
            param.local = piece
            # Outside of forward there is no such tensor; code that prints modules asks for it.
            absent = torch.empty(param.shape, dtype=param.dtype, device="meta")
            self._absent[param] = param.shown(absent)
        self._absent_places = _places(params, map(self._absent.__getitem__, params))
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
            RuntimeError: there is no memory behind it.
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
            leave_values(self.flat)
        self._flat = found
        found._is_flat_param = True  # type: ignore[attr-defined]  # also lost where it was swapped
        data = found.data
        check_memory(data, f"the flat parameter that begins with '{params[0].name}'")
        for param, (offset, numel) in zip(params, self._places, strict=True):
            param.local = data.narrow(0, offset, numel)

    def optimized(self, params: Sequence[FlatParam]) -> Iterable[torch.Tensor]:
        """Return the flat parameter."""
        return (self.flat,)

    def requires_grad(self, params: Sequence[FlatParam]) -> list[bool]:
        """Return whether the flat parameter is to be trained, for each of its parts."""
        return [self.flat.requires_grad] * len(params)

    def leaf(self, param: FlatParam, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf, a plain tensor: no parameter but the flat one is registered."""
        # Not a view for autograd, which speaks of views instead of parameters in its errors.
        made = param.shown(param.restored(whole.view(-1)).data)
        made.requires_grad = self.flat.requires_grad  # the method is refused inside ``torch.func``
        self._whole_places = None
        return cast("nn.Parameter", made)

    def show_sharded(self, params: Sequence[FlatParam]) -> None:
        """Put tensors without memory where the whole ones were."""
        for attributes, name, absent in self._absent_places:
            attributes[name] = absent

    def show_whole(self, params: Sequence[FlatParam]) -> None:
        """Put the leaves there."""
        if self._whole_places is None:
            self._whole_places = _places(params, map(WHOLE, params))
        for attributes, name, whole in self._whole_places:
            attributes[name] = whole

    def changed(self, params: Sequence[FlatParam]) -> bool:
        """Whether another flat parameter, or other memory, is there now."""
        found = self._owner._parameters.get(FLAT_PARAM)
        if found is None or not self._watches:
            return False
        return found is not self._flat or found.data_ptr() != self._address

    def is_bound(self, params: Sequence[FlatParam], shard: torch.Tensor) -> bool:
        """Whether what is registered is the flat parameter, over ``shard`` as it was bound."""
        found = self._owner._parameters.get(FLAT_PARAM)
        return is_over(found, self._flat, shard, (shard.shape, shard.stride()))

    def check_whole(self, params: Sequence[FlatParam]) -> None:
        """Do nothing: the whole tensors are attributes that belong to nobody else."""

    # Gradients

    def gradients(self, params: Sequence[FlatParam]) -> list[torch.Tensor | None]:
        """Return this rank's part of the gradient of each, as a view of the flat one."""
        flat = self.flat.grad
        if flat is None:
            return [None] * len(params)
        if not self._holds:
            return [flat.narrow(0, *place) for place in self._places]
        return list(flat.split([param.shape.numel() for param in params]))

    def accumulates(self, params: Sequence[FlatParam]) -> bool:
        """Whether a gradient is there already, or user code waits for one."""
        return self.flat.grad is not None or bool(post_accumulate_hooks(self.flat))

    def hand_over(self, params: Sequence[FlatParam], shard: torch.Tensor, cut: CutShard) -> None:
        """Set the flat gradient (S,), or add to the one that is there."""
        self._held = None
        self._add_gradient(self.flat, shard)

    def show_held(self, params: Sequence[FlatParam]) -> bool:
        """Show the whole gradients end to end as the gradient of the flat parameter.

        *Memory*: one copy of them, until the leaves' own are dropped; none if they are cut from
        what was shown before.
        """
        found = [param.leaf_gradient() for param in params]
        like = next((gradient for gradient in found if gradient is not None), None)
        if like is None:
            return False
        flat, held = self.flat, self._held
        if held is None or not _is_cut(held, found):
            held = _end_to_end(params, found, like)
        for param in params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self._earlier, self._holds, self._held = flat.grad, True, held
        flat.grad = None
        set_gradient(flat, held)
        return True

    def recall_held(self, params: Sequence[FlatParam]) -> None:
        """Cut what is shown into the leaves' gradients; nothing, if the user has dropped it."""
        if not self._holds:
            return
        flat = self.flat
        held, earlier = flat.grad, self._earlier
        self._holds, self._earlier, self._held, flat.grad = False, None, None, None
        if held is None:
            return
        self._held = held = held.detach()
        if earlier is not None:
            set_gradient(flat, earlier)
        start = 0
        for param in params:
            numel = param.shape.numel()
            put_on_leaf(param, param.restored(held.narrow(0, start, numel)))
            start += numel

    # Whole parameters under their own names

    def show_full(self, params: Sequence[FlatParam], wholes: Sequence[torch.Tensor]) -> None:
        """Register ``wholes`` under the original names instead of the flat parameter."""
        self._owner._parameters.pop(FLAT_PARAM)
        trains = self.flat.requires_grad
        for param, whole in zip(params, wholes, strict=True):
            parameter = nn.Parameter(param.shown(whole), requires_grad=trains)
            for module, name, plain in param.slots:
                module.__dict__.pop(name, None)
                if plain:
                    module._parameters[name] = parameter
                else:
                    module.register_parameter(name, parameter)

    def hide_full(self, params: Sequence[FlatParam]) -> None:
        """Undo ``show_full``."""
        for param in params:
            for module, name, _ in param.slots:
                module._parameters.pop(name, None)
        self.show_sharded(params)
        self._owner._parameters[FLAT_PARAM] = self.flat


def _is_cut(held: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether ``gradients`` are all of ``held``, in order, cut by ``recall_held``."""
    start = held.data_ptr()
    for gradient in gradients:
        if gradient is None or gradient.data_ptr() != start:
            return False
        start += gradient.numel() * held.element_size()
    return start == held.data_ptr() + held.numel() * held.element_size()


def _end_to_end(
    params: Sequence[FlatParam], gradients: Sequence[torch.Tensor | None], like: torch.Tensor
) -> torch.Tensor:
    """Return ``gradients`` in one piece (sum of numels,), zeros where there is none."""
    held = like.new_zeros(sum(param.shape.numel() for param in params))
    start = 0
    for param, gradient in zip(params, gradients, strict=True):
        numel = param.shape.numel()
        if gradient is not None:
            held.narrow(0, start, numel).copy_(param.in_order(gradient).reshape(-1))
        start += numel
    return held


class _Attributes:
    """Sets the attributes of a module whose class keeps a list of its weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        setattr(self._module, name, tensor)


Place = tuple["dict[str, Any] | _Attributes", str, "torch.Tensor | None"]


def _places(params: Sequence[FlatParam], tensors: Iterable[torch.Tensor | None]) -> list[Place]:
    """Return every place of each of ``params``, and its tensor.

    Any other module's attributes are its ``__dict__``, which is the same object all its life.
    """
    return [
        (module.__dict__ if plain else _Attributes(module), name, tensor)
        for param, tensor in zip(params, tensors, strict=True)
        for module, name, plain in param.slots
    ]
