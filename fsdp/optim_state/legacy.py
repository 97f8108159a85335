"""The older verbs about optimizer states, each with a warning that names the newer one."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp.joint_state import expect_separate
from fsdp.optim_state.load import Target, load
from fsdp.optim_state.names import Names, OptimInput, ParamKey, params_of_input
from fsdp.optim_state.rekey import rekey_optim_state_dict
from fsdp.optim_state.request import Given, Request
from fsdp.optim_state.save import save
from fsdp.optim_state.vocabulary import OptimStateKeyType


class LegacyOptimizerStates:
    """The static methods that ``optim_state_dict`` and ``optim_state_dict_to_load`` replace."""

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,  # noqa: FBT001, FBT002
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the full state in host memory; {} on other ranks than the first by default.

        *Collective*, *Raises*: as ``optim_state_dict``; and TypeError, ValueError or
        AssertionError for ``optim_input``.
        """
        _warn_legacy("full_optim_state_dict", "optim_state_dict")
        _warn_input(optim_input)
        names = Names(model)
        look = functools.partial(_given, names, optim, optim_input)
        ask = functools.partial(Request, rank0_only=rank0_only, group=group)
        return save(names, look, ask)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the state with one chunk per rank, in host memory.

        *Collective*, *Raises*: as ``optim_state_dict``.
        """
        _warn_legacy("sharded_optim_state_dict", "optim_state_dict")
        names = Names(model)
        look = functools.partial(_given, names, optim, None)
        return save(names, look, functools.partial(Request, sharded=True, group=group))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return what this rank's optimizer can load of a full state that every rank has.

        *Collective*, *Raises*: as ``optim_state_dict_to_load``.
        """
        _warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_input(optim_input)
        names = Names(model)
        look = functools.partial(_target, names, optim, optim_input)
        return load(names, full_optim_state_dict, look, Request)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return what this rank's optimizer can load of a sharded state.

        *Collective*, *Raises*: as ``optim_state_dict_to_load``.
        """
        _warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        names = Names(model)
        look = functools.partial(_target, names, optim, None)
        return load(names, sharded_optim_state_dict, look, Request)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what this rank's optimizer can load of a full state that the first rank has.

        *Collective*, *Raises*: as ``optim_state_dict_to_load``.
        """
        _warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_input(optim_input)
        names = Names(model)
        look = functools.partial(_target, names, optim, optim_input)
        ask = functools.partial(Request, rank0_only=True, group=group)
        return load(names, full_optim_state_dict or {}, look, ask)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return a state keyed by names or by numbers; itself, if it is that already.

        Args:
            optim_state_dict: of an optimizer of a plain model, or a full one.
            optim_state_key_type: what is wanted.
            model: without any wrapper.
            optim_input: deprecated; what the optimizer was made with.
            optim: over ``model``; without both, over ``model.parameters()``.

        Raises:
            AssertionError: another key type.
            ValueError: keys of both types.
            RuntimeError: a parameter with several names.
        """
        _warn_input(optim_input)
        groups = _groups(model, optim, optim_input)
        params = [param for each in groups for param in each]
        return rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, params)


def _groups(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput
) -> list[list[nn.Parameter]]:
    """Return the parameters of an optimizer: ``optim_input`` counts more than ``optim``."""
    if optim_input is None and optim is not None:
        return [list(group["params"]) for group in optim.param_groups]
    return params_of_input(model, optim_input)


def _given(names: Names, optim: torch.optim.Optimizer, optim_input: OptimInput) -> Given:
    expect_separate((optim,))
    groups = _groups(names.model, optim, optim_input)
    params: dict[ParamKey, nn.Parameter] = dict(enumerate(p for group in groups for p in group))
    return Given(state=optim.state_dict(), params=params)


def _target(names: Names, optim: torch.optim.Optimizer | None, optim_input: OptimInput) -> Target:
    return Target.of_groups(_groups(names.model, optim, optim_input))


def _warn_legacy(old: str, new: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{old}`` is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{new}``.",
        FutureWarning,
        stacklevel=3,
    )


def _warn_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: the parameters are known from `optim`. You "
            "may remove it from your code without changing its functionality.",
            FutureWarning,
            stacklevel=3,
        )
