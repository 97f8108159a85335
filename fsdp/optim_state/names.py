"""What parameters are called: by the plain model, by the wrapped one, by an optimizer.

No state, no collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp.engine.layout import Fragment
from fsdp.flat_parameter import FlatParam, flat_params
from fsdp.joint_state import expect_separate
from fsdp.optim_state.vocabulary import FSDPParamInfo, Member, _OptimStateKey
from fsdp.original_exposure import original_of
from fsdp.plain_names import clean, joined
from fsdp.wrapper_options import STRATEGIES
from fsdp.wrapper_unit import WrappedUnit, units_of

OptimInput = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
ParamKey = int | str


class Names:
    """The names of all parameters of a model.

    Attributes:
        model: the model.
        units: all units in it, each before those inside it.
        infos: the units with parameters, each before those inside it.
        keys: parameter -> what ranks call it; managed ones first, in the order of the units.
        members: parameter -> (unit, member), of those that a unit manages.
        is_original: whether the user's own parameters stay registered.

    Raises:
        ValueError: nothing in ``model`` is wrapped.
        AssertionError: some units keep original parameters and others do not.
    """

    def __init__(self, model: nn.Module) -> None:
        units = units_of(model)
        if not units:
            raise ValueError(
                f"{type(model).__name__} has no FullyShardedDataParallel in it: there is nothing "
                "to gather or to cut. Use the state dict of the optimizer itself."
            )
        kept = {unit._arguments.use_orig_params for unit in units}
        if len(kept) > 1:
            raise AssertionError("Not all FSDP modules have the same _use_orig_params value")
        (self.is_original,) = kept
        self.units = units
        self.model = model
        paths = {module: path for path, module in model.named_modules()}
        self.infos = [info for unit in units if (info := _info(unit, paths)) is not None]
        self.members = {
            member.param: (info, member) for info in self.infos for member in info.members
        }
        self.keys = {param: member.key for param, (_, member) in self.members.items()}
        owned = {name for info in self.infos for name in info.names}
        for name, param in model.named_parameters():
            if param in self.keys:
                continue
            plain = clean(name)
            # In forward other objects are registered under the names of managed parameters.
            if plain not in owned:
                self.keys[param] = _OptimStateKey((plain,), is_fsdp_managed=False)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of the units, through which all ranks of the model are reached."""
        groups = (group for unit in self.units for group in unit._state.all_groups)
        return list(dict.fromkeys(groups))

    @property
    def model_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which tensor parallelism has cut parameters."""
        groups = (group for unit in self.units for group in unit._state.model_groups)
        return list(dict.fromkeys(groups))

    @property
    def device(self) -> torch.device:
        """Where messages between ranks lie."""
        return self.units[0]._state.device

    def key_of(self, param: nn.Parameter) -> _OptimStateKey:
        """Return what ranks call ``param``.

        Raises:
            KeyError: it is not in the model.
        """
        if param not in self.keys:
            raise KeyError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in "
                f"{type(self.model).__name__}. Make it over model.parameters(), after wrapping."
            )
        return self.keys[param]

    def current(self) -> dict[nn.Parameter, str]:
        """Return the names under which parameters are registered now, wrappers included."""
        return {param: name for name, param in self.model.named_parameters()}

    def of_all(self) -> set[str]:
        """Return every name that a parameter has, of the plain model and current ones."""
        return {
            *(name for key in self.keys.values() for name in key.unflat_param_names),
            *self.current().values(),
        }

    def of_optimizer(
        self, optim: torch.optim.Optimizer, *, named: bool
    ) -> dict[ParamKey, nn.Parameter]:
        """Return the keys of the states in ``optim``: positions, or current names.

        Raises:
            NotImplementedError: ``optim`` has one state for all of its parameters.
            KeyError: ``named``, and a parameter has no name in the model.
        """
        expect_separate((optim,))
        params = [param for group in optim.param_groups for param in group["params"]]
        if not named:
            return dict(enumerate(params))
        current = self.current()
        missing = [tuple(param.shape) for param in params if param not in current]
        if missing:
            raise KeyError(
                f"Can't find parameters of shapes {missing[:3]} of the optimizer from "
                f"{list(current.values())}."
            )
        return {current[param]: param for param in params}


def params_of_input(model: nn.Module, optim_input: OptimInput) -> list[list[nn.Parameter]]:
    """Return the parameters that ``optim_input`` gives an optimizer, by group.

    Raises:
        TypeError: not iterable, or neither all tensors nor all dicts.
        ValueError: empty.
        AssertionError: a group without parameters.
    """
    if optim_input is None:
        return [list(model.parameters())]
    try:
        found: list[Any] = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not found:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(each, torch.Tensor) for each in found):
        return [found]
    if not all(isinstance(each, dict) for each in found):
        kinds = sorted({type(each).__name__ for each in found})
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {kinds}"
        )
    if any("params" not in group for group in found):
        raise AssertionError(
            'A parameter group should map "params" to a list of the parameters in the group'
        )
    groups: list[Any] = [group["params"] for group in found]
    return [[cast("nn.Parameter", g)] if torch.is_tensor(g) else list(g) for g in groups]


def _info(unit: WrappedUnit, paths: dict[nn.Module, str]) -> FSDPParamInfo | None:
    for group in unit._state.groups:
        params = flat_params(group.shard.plain)
        names = [clean(joined(paths[p.info.module], p.info.param_name)) for p in params]
        exposure, layout = group.options.exposure, group.shard.layout
        rank = group.mesh_info.shard_rank
        pieces = tuple(layout.piece(index, rank) for index in range(len(params)))
        return FSDPParamInfo(
            state=unit._state,
            group=group,
            param_indices={name: index for index, name in enumerate(names)},
            param_requires_grad=tuple(exposure.requires_grad(params)),
            pieces=pieces,
            members=tuple(_members(unit, params, names, pieces)),
            use_dtensor=unit._device_mesh is not None,
        )
    return None


def _members(
    unit: WrappedUnit, params: list[FlatParam], names: list[str], pieces: Sequence[Fragment]
) -> Iterator[Member]:
    (group,) = unit._state.groups
    flat = unit._flat_param
    if flat is not None:
        yield Member(
            param=flat,
            key=_OptimStateKey(tuple(names), is_fsdp_managed=True),
            indices=tuple(range(len(params))),
            shape=flat.shape,
            offset=0,
            numel=group.shard.layout.shard_numel,
            is_whole=False,
        )
        return
    keeps_shape = not STRATEGIES[unit.sharding_strategy].shards
    for index, (param, name, piece) in enumerate(zip(params, names, pieces, strict=True)):
        yield Member(
            param=original_of(param),
            key=_OptimStateKey((name,), is_fsdp_managed=True),
            indices=(index,),
            shape=param.shape if keeps_shape else torch.Size([piece.numel]),
            offset=piece.offset,
            numel=piece.numel,
            is_whole=keeps_shape,
            is_part=not keeps_shape or (param.outer is not None and param.outer.is_cut),
        )
