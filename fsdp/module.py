"""What a module becomes when it is sharded: its class, swapped, and the verbs that it gains."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch import nn

from fsdp.comm_settings import CommSettings
from fsdp.dtensor import DTensorParam
from fsdp.engine.hooks import wrap_method
from fsdp.engine.sharing import WithoutSharing
from fsdp.engine.unshard_handle import UnshardHandle, start_unshard
from fsdp.pass_settings import PassSettings, states_of

_cls_to_fsdp_cls: dict[type, type] = {}
_new_init_enabled = True


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return the cache of swapped classes: original class to FSDP class."""
    return _cls_to_fsdp_cls


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Let a swapped class be instantiated without running the original ``__init__``."""
    global _new_init_enabled
    before, _new_init_enabled = _new_init_enabled, False
    try:
        yield
    finally:
        _new_init_enabled = before


class FSDPModule(PassSettings, CommSettings):
    """The methods that a sharded module gains."""

    _orig_cls_mro_index: int  # of the original class, in the MRO of the swapped one

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class, as slicing a sharded ``Sequential`` does."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        if _new_init_enabled:
            made.__init__(*args, **kwargs)
        return made

    def reshard(self) -> None:
        """Free this module's whole parameters and register the sharded ones. Not recursive."""
        for group in self._groups():
            group.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gather this module's parameters. Not recursive.

        *Collective* over the shard group. *Blocks* the current stream, unless ``async_op``.

        Returns:
            None, or with ``async_op`` a handle; the next forward waits for it by itself.
        """
        return start_unshard(self._groups(), async_op=async_op)

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception ended; its gradients are lost. Root only.

        Raises:
            RuntimeError: this module is not the root.
        """
        self._state().reset_iter_state()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drop the gradients of all parameters, and those that wait for a reduction.

        The latter are not yet those of any parameter that an optimizer has: its ``zero_grad()``
        leaves them.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for group in self._groups(recurse=True):
            group.reducer.drop_waiting()
            for param in group.fsdp_params:
                # While parameters are whole, those are registered and were zeroed above.
                sharded = cast("DTensorParam", param).sharded
                if set_to_none:
                    sharded.grad = None
                elif sharded.grad is not None and param.registered() is not sharded:
                    sharded.grad.zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the sharded parameters, then bring them back into the shards."""
        for group in self._groups():
            group.to_sharded()
        with WithoutSharing(f"module {type(self).__name__}"):
            result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._groups():
            group.relink()
        return result


FSDPModule._orig_cls_mro_index = len(FSDPModule.__mro__)  # its own bases stand between


def fsdp_class(cls: type) -> type:
    """Return the class that ``cls`` is swapped for; the same one every time."""
    swapped = _cls_to_fsdp_cls.get(cls)
    if swapped is None:
        refused = {"__deepcopy__": _no_deepcopy, "__reduce_ex__": _no_pickling}
        swapped = type(f"FSDP{cls.__name__}", (FSDPModule, cls), refused)
        _cls_to_fsdp_cls[cls] = swapped
    return swapped


def _no_deepcopy(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def _no_pickling(module: nn.Module, *_args: Any) -> NoReturn:
    """Pickling, ``torch.save`` and ``copy.copy`` of a module come here."""
    raise pickle.PicklingError(
        f"FSDP does not support pickling or copying a sharded module, here {type(module).__name__}."
        " Save its state_dict(), and shard a new module to load it into."
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Run ``module``'s hooks around another method than ``forward``; no-op if not sharded.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    wrap_method(module._state(), module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots use the same streams, buffers and order, as pipeline stages should.

    Raises:
        ValueError: one of ``modules`` is not sharded.
    """
    states = states_of(modules)
    for state in states[1:]:
        for inner in state.context.all_states or [state]:
            inner.share_comm(states[0].comm())
