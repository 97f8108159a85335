"""Models and settings of the tests of states, and what a state must hold."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, StateDictType
from fsdp.state_dict.form import gathered_state, is_sharded
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import batch, loss_of, optimizer_of

CPU = torch.device("cpu")
FULL = StateDictType.FULL_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
KINDS = {"full": FULL, "local": LOCAL, "sharded": SHARDED}
LOW = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Block(nn.Module):
    """Sizes that no world divides, and if asked for buffers of which one is not saved."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.up = nn.Linear(10, 7)
        self.down = nn.Linear(7, 10, bias=False)
        if buffers:
            self.register_buffer("shift", torch.full((10,), 1 / 3))
            self.register_buffer("calls", torch.tensor(3))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.shift if hasattr(self, "shift") else x


class Net(nn.Module):
    """A root with parameters and perhaps a buffer of its own around blocks."""

    def __init__(self, *, buffers: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(Block(buffers=buffers) for _ in range(2))
        self.out = nn.Linear(10, 3)
        if buffers:
            self.register_buffer("scale", torch.full((1,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        x = self.out(x)
        return x * self.scale if hasattr(self, "scale") else x


def plain(*, seed: int = 7, buffers: bool = False) -> Net:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return Net(buffers=buffers)


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def wrap(model: nn.Module, *, nested: bool = True, **options: Any) -> FSDP:
    """Wrap ``model``, and if nested its blocks, without the warnings about strategies."""
    if nested:
        options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching")
        return FSDP(model, **options)


def checkpointed(model: Net) -> Net:
    """Put a checkpoint wrapper around the second block."""
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    """One training step on this rank's data."""
    optimizer = optimizer_of(model.parameters())
    loss_of(model, batch(number, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: FSDP) -> dict[str, torch.Tensor]:
    """The whole parameters, by another way than states."""
    with FSDP.summon_full_params(model, writeback=False):
        return {
            name.replace("_checkpoint_wrapped_module.", ""): param.detach().clone()
            for name, param in model.named_parameters()
        }


@torch.no_grad()
def spoil(model: FSDP) -> None:
    """Give every parameter and buffer another value, by another way than states."""
    with FSDP.summon_full_params(model):
        for param in model.parameters():
            param.fill_(-1)
    for buffer in model.buffers():
        buffer.zero_()


def put_together(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every value of a full or sharded state, whole."""
    found: dict[str, torch.Tensor] = gathered_state(dict(state), CPU)
    return found


def saved(model: nn.Module, kind: StateDictType, config: Any = None) -> dict[str, Any]:
    with FSDP.state_dict_type(model, kind, config):
        return model.state_dict()


def load(model: nn.Module, kind: StateDictType, state: Mapping[str, Any], **options: Any) -> Any:
    with FSDP.state_dict_type(model, kind):
        return model.load_state_dict(state, **options)


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Same names in the same order, and the same bits, dtypes and shapes under each."""
    assert list(found) == list(wanted)
    for name, want in wanted.items():
        torch.testing.assert_close(
            found[name], want, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def through_a_file(state: Mapping[str, Any]) -> dict[str, Any]:
    """Write the state and read it, as memory that nothing shares."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def held(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that this rank holds of a value in either form, themselves."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


def locals_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank itself holds of each value, flat; nothing where it holds no shard."""
    found = {}
    for name, value in state.items():
        if not is_sharded(value):
            found[name] = value
            continue
        parts = [part.flatten() for part in held(value)]
        found[name] = torch.cat(parts) if parts else torch.empty(0, dtype=value.dtype)
    return found


def grid(**axes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """One test per cell; cells beyond those in which every two values meet run on demand.

    Each axis names its values: they are in the test's id.
    """
    found = []
    for words, marks in _covering([list(axis) for axis in axes.values()]):
        values = [axis[word] for axis, word in zip(axes.values(), words, strict=True)]
        found.append(pytest.param(*values, id="-".join(filter(None, words)), marks=marks))
    return pytest.mark.parametrize(list(axes), found)


def cells_of(axes: Mapping[str, Mapping[str, Any]]) -> pytest.MarkDecorator:
    """The same, with one argument ``cell`` that has all values."""
    found = []
    for words, marks in _covering([list(axis) for axis in axes.values()]):
        pairs = zip(axes.items(), words, strict=True)
        cell = {name: axis[word] for (name, axis), word in pairs}
        found.append(pytest.param(cell, id="-".join(filter(None, words)), marks=marks))
    return pytest.mark.parametrize("cell", found)


def _covering(axes: Sequence[Sequence[str]]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all cells; the mark of those that a small set with all pairs does without is long."""
    everything = list(itertools.product(*axes))
    unmet = {pair for cell in everything for pair in _pairs(cell)}
    needed: set[tuple[str, ...]] = set()
    while unmet:
        best = max(everything, key=lambda cell: len(unmet & _pairs(cell)))
        needed.add(best)
        unmet -= _pairs(best)
    for cell in everything:
        yield cell, () if cell in needed else (pytest.mark.long,)


def _pairs(cell: Sequence[str]) -> set[Any]:
    return set(itertools.combinations(enumerate(cell), 2))


ORIGINAL = {"flat": False, "original": True}
MESH = {"group": False, "mesh": True}
WHOLE = {name: KINDS[name] for name in ("full", "sharded")}
STRATEGIES = {name: name for name in ("FULL_SHARD", "SHARD_GRAD_OP")}


def switch(word: str) -> dict[str, bool]:
    """An axis of an option that is off or on; only the latter is in an id."""
    return {"": False, word: True}
