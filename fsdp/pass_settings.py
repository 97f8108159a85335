"""What a user may say about the passes of a sharded module: when to reduce, reshard, prefetch.

Every method checks its arguments and writes into the settings of the module's groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from fsdp.engine.mesh import reshard_mesh_info
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.unit import FSDPState, state_of


class Unit:
    """A module that is a unit: the way from it to its state and its groups."""

    def _state(self) -> FSDPState:
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    _get_fsdp_state = _state

    def _states(self, *, recurse: bool) -> list[FSDPState]:
        if not recurse:
            return [self._state()]
        inner = cast("nn.Module", self).modules()
        states = [state_of(m) for m in inner if isinstance(m, Unit)]
        return list(dict.fromkeys(state for state in states if state is not None))

    def _groups(self, *, recurse: bool = False) -> list[FSDPParamGroup]:
        return [group for state in self._states(recurse=recurse) for group in state.groups]


def states_of(modules: Iterable[Any]) -> list[FSDPState]:
    """Return the states of ``modules``.

    Raises:
        ValueError: one of them is not sharded.
    """
    states = []
    for module in modules:
        if not isinstance(module, Unit):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        states.append(module._state())
    return states


class PassSettings(Unit):
    """Setters about forward and backward."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:  # noqa: FBT001
        """Say whether the next backward is the last of the iteration."""
        self._state().context.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Say whether backward reduces gradients; if not, they accumulate whole.

        The module's own ``zero_grad()`` drops what has accumulated; an optimizer's does not see it.
        """
        for group in self._groups(recurse=recurse):
            group.settings.reduce_grads = requires_gradient_sync
            group.settings.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(
        self,
        requires_all_reduce: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Say whether backward reduces over replicas; if not, partial shards accumulate."""
        for group in self._groups(recurse=recurse):
            group.settings.all_reduce_grads = requires_all_reduce

    def set_reshard_after_forward(
        self,
        reshard_after_forward: bool,  # noqa: FBT001
        recurse: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """Change ``reshard_after_forward``, for the root as well.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in self._states(recurse=recurse):
            state.auto_reshard_after_forward = False
            for group in state.groups:
                group.post_forward_mesh_info = reshard_mesh_info(
                    reshard_after_forward, group.mesh_info
                )

    def set_reshard_after_backward(
        self,
        reshard_after_backward: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Say whether backward frees the whole parameters; if not, the next forward has them."""
        for group in self._groups(recurse=recurse):
            group.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather ``modules`` right after this one in forward.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._state().forward_prefetch = states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather ``modules`` right after this one in backward, instead of the previous one.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._state().backward_prefetch = states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:  # noqa: FBT001
        """Say whether backward needs this module's parameters; an embedding's does not."""
        for group in self._groups():
            group.settings.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next iteration's gathers wait for ``event`` only, not for all work so far."""
        self._state().context.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:  # noqa: FBT001
        for group in self._groups(recurse=True):
            group.settings.unshard_async_op = async_op
