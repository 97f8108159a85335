"""The user's own parameters stay registered, each a view of this rank's elements of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from fsdp.engine.exposure import CutShard
from fsdp.engine.param import WHOLE, FSDPParam, install_all
from fsdp.engine.torch_private import local_tensor, post_accumulate_hooks
from fsdp.flat_parameter import (
    BaseExposure,
    FlatParam,
    is_over,
    leave_values,
    mark_taken,
    put_on_leaf,
    set_gradient,
)

_ORIGINAL = attrgetter("original")


class OriginalExposure(BaseExposure):
    """Keeps the user's parameters registered, each a view (n,) of this rank's elements of it.

    Args:
        keeps_shape: nothing is sharded, so each has all its elements and keeps its shape.
        low_dtype: the dtype in which reduced gradients are left to users; None: the parameter's.
        watches: whether replaced parameters are looked for before each gather.
    """

    def __init__(self, *, keeps_shape: bool, low_dtype: torch.dtype | None, watches: bool) -> None:
        super().__init__(low_dtype=low_dtype, watches=watches)
        self._keeps_shape = keeps_shape

    def _shown(self, param: FlatParam, piece: torch.Tensor) -> torch.Tensor:
        return param.restored(piece) if self._keeps_shape else piece

    def bind(
        self, params: Sequence[FlatParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Point the user's parameters at their pieces; optimizers keep the objects."""
        self._look_at(params)
        for param, piece in zip(params, pieces, strict=True):
            param.local, param.address = piece, piece.data_ptr()
            original_of(param).data = self._shown(param, piece)

    def changed(self, params: Sequence[FlatParam]) -> bool:
        """Whether a parameter was replaced, or given other memory or another size."""
        if not self._watches:
            return False
        for param in params:
            module, name, _ = param.slots[0]
            found = module._parameters.get(name)
            if found is None:
                continue  # taken away for a while, as code that saves modules does
            if found is not param.original or found.data_ptr() != param.address:
                return True
            if found.numel() != param.local.numel():
                return True
            if len(param.slots) > 1:
                _check_shared(param)
        return False

    def is_bound(self, params: Sequence[FlatParam], shard: torch.Tensor) -> bool:
        """Whether the user's parameters are registered, each over its piece as it was bound."""
        for param in params:
            local = param.local
            own = (
                (param.shape, param.stride) if self._keeps_shape else (local.shape, local.stride())
            )
            for module, name, _ in param.slots:
                if not is_over(module._parameters.get(name), param.original, local, own):
                    return False
        return True

    def reread(self, params: Sequence[FlatParam]) -> None:
        """Adopt what the user has put in the place of a parameter or of its data.

        Raises:
            RuntimeError: it has another shape.
            NotImplementedError: a shared parameter was replaced in one of its places only.
        """
        for param in params:
            found = param.registered()
            if found is None or found is param.unsharded:
                continue
            wanted = self._shown(param, param.local).shape
            if found.shape != wanted:
                raise RuntimeError(
                    "Cannot writeback when the parameter shape changes\n"
                    f"'{param.name}' expects {tuple(wanted)} "
                    f"but got {tuple(found.shape)}"
                )
            if found is not param.original:
                _check_shared(param)
                leave_values(original_of(param))
                param.original = found
            mark_taken(found)  # which is lost where it was swapped, too
            param.local = self._flattened(param, found.data)

    def optimized(self, params: Sequence[FlatParam]) -> Iterable[torch.Tensor | None]:
        """Return the user's parameters."""
        return map(_ORIGINAL, params)

    def requires_grad(self, params: Sequence[FlatParam]) -> list[bool]:
        """Return which of the user's parameters are to be trained."""
        return [original.requires_grad for original in map(_ORIGINAL, params)]

    def leaf(self, param: FlatParam, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf of forward and backward."""
        param.whole = param.restored(whole.view(-1))
        return nn.Parameter(
            param.shown(param.whole), requires_grad=original_of(param).requires_grad
        )

    def show_sharded(self, params: Sequence[FlatParam]) -> None:
        """Register the user's parameters."""
        install_all(params, map(_ORIGINAL, params))

    def show_whole(self, params: Sequence[FlatParam]) -> None:
        """Register the leaves."""
        install_all(params, map(WHOLE, params))

    def check_whole(self, params: Sequence[FlatParam]) -> None:
        """Refuse a change between forward and backward: the gradients would belong to neither.

        Raises:
            AssertionError: a leaf, or its memory, was replaced.
        """
        if not self._watches:
            return
        for param in params:
            leaf, whole = param.unsharded, param.whole
            assert leaf is not None
            assert whole is not None
            found = leaf if param.outer is None else local_tensor(leaf)
            if param.registered() is not leaf or found.data_ptr() != whole.data_ptr():
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward "
                    f"when they stay whole, but '{param.fqn}' was changed"
                )

    # Gradients

    def gradients(self, params: Sequence[FlatParam]) -> list[torch.Tensor | None]:
        """Return this rank's part of the gradient of each."""
        return [original_of(param).grad for param in params]

    def accumulates(self, params: Sequence[FlatParam]) -> bool:
        """Whether a gradient is there already, or user code waits for one."""
        originals = [original_of(param) for param in params]
        return any(
            o.grad is not None or post_accumulate_hooks(o) or _optimizers_of(o) for o in originals
        )

    def hand_over(self, params: Sequence[FlatParam], shard: torch.Tensor, cut: CutShard) -> None:
        """Set each gradient, or add to it; none where nothing is trained or nothing lies here."""
        for param, piece in zip(params, cut(), strict=True):
            original = original_of(param)
            if not original.requires_grad or not piece.numel():
                continue
            self._add_gradient(original, self._shown(param, piece))
            for optimizer in _optimizers_of(original):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def show_held(self, params: Sequence[FlatParam]) -> bool:
        """Show each whole gradient as that of the user's parameter, whatever it holds here."""
        shown = False
        for param in params:
            original, gradient = original_of(param), param.leaf_gradient()
            if param.unsharded is None or gradient is None:
                continue
            param.earlier, original.grad = original.grad, None
            set_gradient(original, gradient)
            param.unsharded.grad = None
            param.held = shown = True
        return shown

    def recall_held(self, params: Sequence[FlatParam]) -> None:
        """Take each of them back; nothing, where the user has dropped it."""
        for param in params:
            if not param.held:
                continue
            original = original_of(param)
            held, earlier = original.grad, param.earlier
            param.held, param.earlier, original.grad = False, None, None
            if held is not None:
                if earlier is not None:
                    set_gradient(original, earlier)
                put_on_leaf(param, held.detach())

    # Whole parameters under their own names

    def show_full(self, params: Sequence[FlatParam], wholes: Sequence[torch.Tensor]) -> None:
        """Point the user's parameters at ``wholes``; their gradients are put aside.

        Those that tensor parallelism has cut are hidden by DTensors around them.
        """
        for param, whole in zip(params, wholes, strict=True):
            original = original_of(param)
            param.gradient, original.grad = original.grad, None
            if param.outer is None:
                original.data = whole
            else:
                shown = param.shown(whole)
                param.install(nn.Parameter(shown, requires_grad=original.requires_grad))

    def gradient_dtype(self, param: FlatParam) -> torch.dtype:
        """Return the dtype of reduced gradients."""
        return self._low_dtype or param.dtype

    def own_gradient(self, param: FlatParam) -> torch.Tensor | None:
        """Return this rank's elements (n,) of the gradient of ``param``.

        Raises:
            RuntimeError: it is a whole one that waits for a reduction.
        """
        if param.held:
            raise RuntimeError(
                "with_grads=True shows reduced gradients, but those of no_sync() wait for their "
                f"reduction: '{param.fqn}'. They are whole; read them outside of the summon."
            )
        gradient = original_of(param).grad
        return None if gradient is None else self._flattened(param, gradient)

    def set_own_gradient(self, param: FlatParam, piece: torch.Tensor | None) -> None:
        """Let ``piece`` (n,) be the gradient once ``hide_full`` has run."""
        param.gradient = None if piece is None else self._shown(param, piece)

    def _flattened(self, param: FlatParam, tensor: torch.Tensor) -> torch.Tensor:
        return (param.in_order(tensor) if self._keeps_shape else tensor).reshape(-1)

    def hide_full(self, params: Sequence[FlatParam]) -> None:
        """Undo ``show_full``."""
        for param in params:
            original = original_of(param)
            original.data = self._shown(param, param.local)
            gradient, param.gradient, original.grad = param.gradient, None, None
            if gradient is not None:
                set_gradient(original, gradient)
            param.install(original)


def original_of(param: FSDPParam) -> nn.Parameter:
    """Return the user's parameter, which stays with original names."""
    assert isinstance(param, FlatParam)
    assert param.original is not None, "the user's parameter stays with original names"
    return param.original


def _optimizers_of(param: nn.Parameter) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are to step on ``param`` as soon as its gradient is there."""
    return getattr(param, "_in_backward_optimizers", [])


def _check_shared(param: FlatParam) -> None:
    found = {id(getattr(module, name, None)) for module, name, _ in param.slots}
    if len(found) > 1:
        raise NotImplementedError(
            f"Changing shared parameters is not supported yet: '{param.fqn}' was replaced in one "
            "of its places only"
        )
