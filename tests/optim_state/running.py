"""Models, optimizers and oracles for the tests of optimizer states."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
)
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import StateDictType
from tests.fsdp.plain import Residual, batch, build, loss_of

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT

# Each decays, so that a parameter with a zero gradient changes and one without does not.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}),
    "adamw_foreach": ("AdamW", {"foreach": True, "amsgrad": True}),
    "adamw_fused": ("AdamW", {"fused": True}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "rmsprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "nadam": ("NAdam", {}),
    "capturable": ("AdamW", {"lr": torch.tensor(0.02)}),
}

Groups = Callable[[nn.Module], Any]


def one_group(model: nn.Module) -> Any:
    return model.parameters()


def two_groups(model: nn.Module) -> Any:
    """The blocks learn slower; the order is not the model's."""
    blocks = list(model.blocks.parameters())
    held = set(blocks)
    rest = [param for param in model.parameters() if param not in held]
    return [{"params": blocks, "lr": 0.005}, {"params": rest}]


def optimizer_for(
    model: nn.Module, name: str, groups: Groups = one_group, **options: Any
) -> torch.optim.Optimizer:
    kind, given = OPTIMIZERS[name]
    given = {"lr": 0.02, "weight_decay": 0.1} | copy.deepcopy(given) | options
    found: torch.optim.Optimizer = getattr(torch.optim, kind)(groups(model), **given)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings about old names, and about what shards nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching")
        yield


def wrapped(module: nn.Module | None = None, *, wrap: bool = True, **options: Any) -> FSDP:
    """A model whose blocks are units of their own, or one unit."""
    with quiet():
        policy = ModuleWrapPolicy({Residual}) if wrap else None
        return FSDP(build() if module is None else module, auto_wrap_policy=policy, **options)


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def form(model: FSDP, kind: StateDictType, **options: Any) -> AbstractContextManager[None]:
    """Set the form of states for the body; ``options`` are those of optimizer states."""
    of_model, of_optim = CONFIGS[kind]
    return FSDP.state_dict_type(model, kind, of_model(), of_optim(**options))


def in_pairs(axes: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A few cells in which every two values of different axes meet."""
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    pairs = [set(itertools.combinations(cell.items(), 2)) for cell in every]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(range(len(every)), key=lambda number: len(pairs[number] & left))
        chosen.append(every[best])
        left -= pairs[best]
    return chosen


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    """One step of a wrapped model."""
    loss_of(model, batch(number, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, world: int) -> None:
    """The same on one process, with the data of all ranks."""
    for rank in range(world):
        (loss_of(model, batch(number, rank)) / world).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a plain model's optimizer, under names; nothing of the package is used."""
    names = {param: name for name, param in model.named_parameters()}
    state = {names[param]: dict(entry) for param, entry in optimizer.state.items()}
    groups = [
        {**group, "params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load what ``by_name`` gives into a plain model's optimizer, without the package."""
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbered = {
        number: copy.deepcopy(state["state"][names[param]])
        for number, param in enumerate(params)
        if names[param] in state["state"]
    }
    optimizer.load_state_dict(
        {"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def assert_equal(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float = 0.0) -> None:
    """Same names, kinds, shapes, dtypes and values of two "state" dicts; order is free."""
    assert sorted(got) == sorted(want)
    for name, entry in want.items():
        assert sorted(got[name]) == sorted(entry), name
        for state, value in entry.items():
            found = got[name][state]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    found,
                    value,
                    rtol=tolerance,
                    atol=tolerance,
                    check_device=False,
                    msg=lambda m, at=f"{state} of {name}": f"{at}: {m}",
                )
            else:
                assert found == value, f"{state} of {name}"


class Named(torch.optim.Adam):
    """Keyed by the names of a model's parameters, with state for all of them from the start."""

    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_parameters())
        super().__init__(self.named.values(), lr=0.01)

    def start(self) -> None:
        """Make every state, also where nothing lies here."""
        for param in self.named.values():
            param.grad = torch.zeros_like(param)
        self.step()
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The usual one, under names."""
        numbered, names = super().state_dict(), list(self.named)
        groups = [
            {**g, "params": [names[i] for i in g["params"]]} for g in numbered["param_groups"]
        ]
        state = {names[i]: entry for i, entry in numbered["state"].items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """What ``state_dict`` gives; an entry for every parameter is wanted."""
        numbers = {name: i for i, name in enumerate(self.named)}
        groups = [
            {**g, "params": sorted(numbers[n] for n in g["params"])}
            for g in state_dict["param_groups"]
        ]
        missing = set(numbers) - set(state_dict["state"])
        assert not missing, f"no entries for {missing}"
        state = {numbers[name]: entry for name, entry in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": groups})


def params_of(model: FSDP) -> dict[str, torch.Tensor]:
    """The whole parameters."""
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}
