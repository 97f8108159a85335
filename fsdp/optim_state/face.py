"""The verbs of ``FullyShardedDataParallel`` about optimizer states."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp.optim_state.legacy import LegacyOptimizerStates
from fsdp.optim_state.load import Target, load
from fsdp.optim_state.names import Names
from fsdp.optim_state.request import Given, Request
from fsdp.optim_state.save import save
from fsdp.state_dict.settings import form_of
from fsdp.wrapper_options import StateDictSettings, StateDictType


class OptimizerStates(LegacyOptimizerStates):
    """The static methods about optimizer states."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state of ``optim`` under the names of the plain model.

        ``state_dict_type`` says in which form: whole tensors, or one chunk per rank; on which
        device; and whether the first rank alone gets it (the others get {}).

        Args:
            model: the wrapped model, or a module around it.
            optim: over its parameters.
            optim_state_dict: what ``optim.state_dict()`` gives, or has given; default, that now.
                With names for keys, as a ``NamedOptimizer`` has it, they are what the wrapped
                model calls its parameters.
            group: whose first rank is meant; default, the ranks of the outermost unit.

        *Collective*: over the ranks of the model; one exchange of small objects, and one all-gather
        per unit and state. *Memory*: one state of one unit, whole, beside the result. *Blocks* the
        host.

        Raises:
            ValueError: nothing in ``model`` is wrapped, or entries have names where the groups have
                numbers, or the other way round.
            NotImplementedError: a state of a sharded parameter that cannot be cut with it.
            RuntimeError: ranks or parameters lack states that others have.
            AssertionError: units, or ranks, differ in what they must have in common.
            KeyError: a parameter of ``optim`` is not in the model.

        Every error of one rank is raised on all.
        """
        names = Names(model)

        def look() -> Given:
            state = optim.state_dict() if optim_state_dict is None else optim_state_dict
            return Given(state=state, params=names.of_optimizer(optim, named=_has_names(state)))

        return save(names, look, functools.partial(_request, names, group))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,  # noqa: FBT001, FBT002
        load_directly: bool = False,  # noqa: FBT001, FBT002
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what ``optim`` can load on this rank; the inverse of ``optim_state_dict``.

        The state may come from another world, another wrapping, or a plain model. With
        ``rank0_only`` the first rank alone has to pass it.

        Args:
            model: the wrapped model, or a module around it.
            optim: over its parameters.
            optim_state_dict: under the names of the plain model; it is not changed.
            is_named_optimizer: whether ``optim`` has names for keys.
            load_directly: whether ``optim`` loads it at once.
            group: whose first rank is meant; default, the ranks of the outermost unit.

        *Collective*: over the ranks of the model. *Memory*: one state of one parameter, whole,
        beside the result. *Blocks* the host.

        Raises:
            ValueError: no "state", or one that does not fit the model.
            RuntimeError: the entries of a flat parameter are empty.
            KeyError: a parameter group names what ``optim`` does not hold.

        Every error of one rank is raised on all, before ``optim`` changes.
        """
        names = Names(model)
        look = functools.partial(Target.of, names, optim, named=is_named_optimizer)
        ask = functools.partial(_request, names, group)
        found = load(names, optim_state_dict, look, ask)
        if load_directly:
            groups = found.get("param_groups", optim.state_dict()["param_groups"])
            optim.load_state_dict({**found, "param_groups": groups})
        return found


def _has_names(state: dict[str, Any]) -> bool:
    """Whether names stand for parameters: the groups tell, since a state may have other keys too.

    Without groups any number tells that the names beside it belong to no parameter.
    """
    held = [key for group in state.get("param_groups", ()) for key in group["params"]]
    keys = held or list(state.get("state", ()))
    return bool(keys) and all(isinstance(key, str) for key in keys)


def _request(names: Names, group: dist.ProcessGroup | None) -> Request:
    """Return the form that is set on the units.

    Raises:
        AssertionError: units differ.
        RuntimeError: local states, and a mesh.
    """
    settings: StateDictSettings = names.units[0].get_state_dict_type(names.model)
    for unit in names.units:
        form_of(unit)
    config = settings.optim_state_dict_config
    return Request(
        sharded=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        offload=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
        group=group,
    )
