"""What a state has entries for, under which names, and what memory the values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from conformance.ranks import RankContext
from fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import build
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.fsdp.test_wrapper_edits import Strided
from tests.state_dict import cells

KIND = pytest.mark.parametrize("kind", cells.KINDS.values(), ids=cells.KINDS)
WHOLE = pytest.mark.parametrize("kind", [cells.FULL, cells.SHARDED], ids=["full", "sharded"])


class Tied(nn.Module):
    """A layer under two names, and a weight that another layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 7)
        self.net2 = nn.Linear(7, 10)
        self.net3 = self.net1
        self.out = nn.Linear(10, 7)
        self.out.weight = self.net1.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.net2(torch.relu(self.net3(self.net2(self.net1(x))))))


class Family(nn.Module):
    """A unit that its parent has under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = self.first
        self.out = nn.Linear(10, 3)


class Careful(nn.Module):
    """A module that cannot be loaded, between two that can."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 3)
        self.skipped = Skipped()
        self.after = nn.Linear(3, 5)


class Skipped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class Extra(nn.Linear):
    """A module that saves something that is no tensor."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.told = "nothing"

    def get_extra_state(self) -> str:
        return f"told {self.told}"

    def set_extra_state(self, state: str) -> None:
        self.told = state


def _tree(kind: Callable[[], nn.Module], *, inner: type[nn.Module] | None, **options: Any) -> FSDP:
    policy = None if inner is None else ModuleWrapPolicy({inner})
    return cells.wrap(build(kind), nested=False, auto_wrap_policy=policy, **options)


TREES: dict[str, tuple[Callable[[], nn.Module], type[nn.Module] | None]] = {
    "tied": (Tied, None),
    "family": (Family, nn.Linear),
    "strided": (Strided, None),
    "extra": (Extra, None),
    "norm": (lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)), nn.BatchNorm1d),
}


def _round_trip(
    context: RankContext, tree: str, kind: StateDictType, *, original: bool, mesh: bool
) -> None:
    make, inner = TREES[tree]
    options = {"device_mesh": cells.mesh_of(context.world_size)} if mesh else {}
    model = _tree(make, inner=inner, use_orig_params=original, **options)
    wanted = build(make).state_dict()
    state = cells.saved(model, kind)
    values = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if kind is not cells.LOCAL:
        assert list(state) == list(wanted)
        cells.same(cells.put_together(values), {n: wanted[n] for n in values})
        assert {n: v for n, v in state.items() if n not in values} == {
            n: v for n, v in wanted.items() if n not in values
        }
    state = {n: v.clone() if type(v) is torch.Tensor else v for n, v in state.items()}
    if kind is cells.LOCAL:
        state = cells.through_a_file(state)  # or it would be spoilt with the model
    cells.spoil(model)
    assert str(cells.load(model, kind, state)) == "<All keys matched successfully>"
    full = cells.saved(model, cells.FULL)
    assert list(full) == list(wanted)
    cells.same(
        {n: full[n] for n in full if n in values}, {n: wanted[n] for n in full if n in values}
    )
    cells.same(cells.whole(model), dict(build(make).named_parameters()))


@cells.grid(tree={name: name for name in TREES}, kind=cells.KINDS, original=cells.ORIGINAL)
def test_any_tree_is_saved_under_the_names_of_the_plain_model(
    tree: str, kind: StateDictType, *, original: bool
) -> None:
    on_ranks(_round_trip, 2, tree=tree, kind=kind, original=original, mesh=False)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "original",
    [pytest.param(False, id="flat", marks=pytest.mark.long), pytest.param(True, id="original")],
)
def test_any_tree_is_saved_as_dtensors(tree: str, *, original: bool) -> None:
    on_ranks(_round_trip, 3, tree=tree, kind=cells.SHARDED, original=original, mesh=True)


def _prefixes(context: RankContext) -> None:
    model = nn.Module()
    model.non_fsdp_lin = nn.Linear(4, 3)
    model.inner = nn.Sequential(cells.wrap(cells.plain(buffers=True)))
    state = cells.saved(model, cells.SHARDED)
    wanted = [f"inner.0.{name}" for name in cells.plain(buffers=True).state_dict()]
    assert list(state) == ["non_fsdp_lin.weight", "non_fsdp_lin.bias", *wanted]
    assert state["non_fsdp_lin.weight"].data_ptr() == model.non_fsdp_lin.weight.data_ptr()
    managed = {n for n, _ in cells.plain().named_parameters(prefix="inner.0")}
    assert {n for n, v in state.items() if isinstance(v, ShardedTensor)} == managed
    state["non_fsdp_lin.weight"] = torch.ones(3, 4)
    cells.load(model, cells.SHARDED, state)
    assert model.non_fsdp_lin.weight.sum().item() == 12
    rank0 = FullStateDictConfig(rank0_only=True)
    found = list(cells.saved(model, cells.FULL, rank0))
    assert found == (list(state) if context.rank == 0 else list(state)[:2])
    into: dict[str, Any] = {"there": 1}
    model.inner[0].state_dict(destination=into, prefix="x.")
    assert list(into) == ["there", *(f"x.{n}" for n in cells.plain(buffers=True).state_dict())]


def test_a_parent_that_is_no_unit_adds_its_own_entries() -> None:
    on_ranks(_prefixes, 2)


def _ignored(context: RankContext, kind: StateDictType, *, as_params: bool) -> None:
    inner = cells.plain(buffers=True)
    block = inner.blocks[0]
    given: Any = {"ignored_modules": [block]}
    if as_params:
        given = {"ignored_states": list(block.parameters())}
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = cells.wrap(inner, nested=False, mixed_precision=low, **given)
    state = cells.saved(model, kind)
    live = dict(block.named_parameters()) | ({} if as_params else dict(block.named_buffers()))
    for name in ("up.weight", "up.bias", "down.weight", *(() if as_params else ("shift", "calls"))):
        value = state[f"blocks.0.{name}"]
        assert type(value) is torch.Tensor
        assert (value.dtype, value.data_ptr()) == (live[name].dtype, live[name].data_ptr())
    assert state["blocks.1.shift"].dtype is torch.float32
    if kind is not cells.LOCAL:
        assert list(state) == list(cells.plain(buffers=True).state_dict())
    first = FullStateDictConfig(rank0_only=True)
    if context.rank:
        kept = cells.saved(model, cells.FULL, first)
        assert [n for n in kept if n.endswith("weight")] == [
            "blocks.0.up.weight",
            "blocks.0.down.weight",
        ]
    else:
        assert list(cells.saved(model, cells.FULL, first)) == list(
            cells.plain(buffers=True).state_dict()
        )


@KIND
@pytest.mark.parametrize("as_params", [False, True], ids=["modules", "params"])
def test_what_is_ignored_is_saved_as_it_is(kind: StateDictType, *, as_params: bool) -> None:
    on_ranks(_ignored, 2, kind=kind, as_params=as_params)


def _independent(context: RankContext, kind: StateDictType, *, original: bool) -> None:
    model = cells.wrap(cells.plain(buffers=True), use_orig_params=original)
    before = cells.whole(model)
    for name, value in cells.saved(model, kind).items():
        if name not in before:
            continue
        for tensor in cells.held(value):
            storage = tensor.untyped_storage().nbytes()
            assert storage == tensor.numel() * tensor.element_size(), name  # a file has no more
            tensor.fill_(9)
    cells.same(cells.whole(model), before)
    state = cells.saved(model, kind)
    assert state["scale"].data_ptr() == model.module.scale.data_ptr()  # as in any module


@WHOLE
@ORIGINAL
def test_values_have_memory_of_their_own(kind: StateDictType, *, original: bool) -> None:
    on_ranks(_independent, 2, kind=kind, original=original)


def _from_a_file(context: RankContext, kind: StateDictType, *, mesh: bool) -> None:
    options = {"device_mesh": cells.mesh_of(2)} if mesh else {}
    model = cells.wrap(cells.plain(), **options)
    group = torch.distributed.new_group([0, 1])
    with load_with_process_group(group):
        state = cells.through_a_file(cells.saved(model, kind))
    cells.spoil(model)
    cells.load(model, kind, state)
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))


@KIND
def test_a_state_keeps_its_values_in_a_file(kind: StateDictType) -> None:
    on_ranks(_from_a_file, 2, kind=kind, mesh=False)


def test_a_state_of_dtensors_keeps_its_values_in_a_file() -> None:
    on_ranks(_from_a_file, 2, kind=cells.SHARDED, mesh=True)


def _starts(context: RankContext, kind: StateDictType, *, loads: bool) -> None:
    """The outermost units become roots, as in a first forward, and train on."""
    model = nn.Sequential(cells.wrap(cells.plain()), nn.ReLU(), cells.wrap(nn.Linear(3, 10)))
    if loads:
        cells.load(model, kind, _state_of(kind))
    else:
        cells.saved(model, kind)
    roots = [unit for unit in FSDP.fsdp_modules(model) if unit._is_root]
    assert roots == [model[0], model[2]]
    assert FSDP.fsdp_modules(model, root_only=True) == roots
    assert {unit.training_state.name for unit in FSDP.fsdp_modules(model)} == {"IDLE"}
    cells.step(model, context.rank)


def _state_of(kind: StateDictType) -> dict[str, Any]:
    other = nn.Sequential(cells.wrap(cells.plain()), nn.ReLU(), cells.wrap(nn.Linear(3, 10)))
    return cells.saved(other, kind)


@KIND
@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_a_save_or_load_starts_the_outermost_units(kind: StateDictType, *, loads: bool) -> None:
    on_ranks(_starts, 2, kind=kind, loads=loads)


def _skips(context: RankContext, kind: StateDictType, *, nested: bool) -> None:
    model = _tree(Careful, inner=Skipped if nested else None)
    state = cells.saved(model, kind)
    assert list(state) == list(build(Careful).state_dict())
    cells.spoil(model)
    for name in ("skipped.weight", "skipped.bias"):
        del state[name]
    cells.load(model, kind, state)  # the module itself does not miss them
    found = cells.whole(model)
    for name, want in build(Careful).named_parameters():
        assert torch.equal(found[name], torch.full_like(want, -1) if "skip" in name else want)


@WHOLE
@pytest.mark.parametrize("nested", [False, True])
def test_a_module_that_loads_nothing_breaks_no_sibling(
    kind: StateDictType, *, nested: bool
) -> None:
    on_ranks(_skips, 2, kind=kind, nested=nested)


def _extra(context: RankContext) -> None:
    model = _tree(Extra, inner=None)
    state = cells.saved(model, cells.SHARDED)
    assert state["_extra_state"] == "told nothing"
    state["_extra_state"] = "something"
    cells.load(model, cells.SHARDED, state)
    assert model.module.told == "something"


def test_what_is_no_tensor_is_saved_too() -> None:
    on_ranks(_extra, 2)


def _versions(context: RankContext) -> None:
    norm = nn.Sequential(nn.BatchNorm1d(3))
    state = cells.wrap(norm, nested=False).state_dict()
    assert state._metadata["0"]["version"] == 2  # type: ignore[attr-defined]
    other = nn.Sequential(nn.BatchNorm1d(3))
    del state["0.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="Missing key"):  # an old version would make it up
        other.load_state_dict(state)


def test_plain_modules_find_the_versions_of_theirs() -> None:
    on_ranks(_versions, 2)


class Halves(nn.Module):
    """Saves a parameter in two halves, and loads them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(20.0).view(5, 4))
        self.register_state_dict_post_hook(_halve)
        self.register_load_state_dict_pre_hook(_join)


def _halve(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    whole = state.pop(f"{prefix}weight")
    state[f"{prefix}weight"] = whole * 2


def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


def _hooks(context: RankContext, kind: StateDictType, *, mesh: bool, original: bool) -> None:
    options = {"device_mesh": cells.mesh_of(2)} if mesh else {}
    model = _tree(Halves, inner=None, use_orig_params=original, **options)
    state = cells.saved(model, kind)
    wanted = {cells.FULL: torch.Tensor}.get(kind, DTensor if mesh else ShardedTensor)
    assert type(state["weight"]) is wanted
    whole = torch.arange(20.0).view(5, 4)
    cells.same(cells.put_together(state), {"weight": 2 * whole})
    cells.spoil(model)
    cells.load(model, kind, state)
    cells.same(cells.whole(model), {"weight": whole})


@cells.grid(kind=cells.WHOLE, mesh=cells.MESH, original=cells.ORIGINAL)
def test_hooks_of_modules_see_whole_parameters(
    kind: StateDictType, *, mesh: bool, original: bool
) -> None:
    on_ranks(_hooks, 2, kind=kind, mesh=mesh, original=original)


def _hooks_of_users(context: RankContext) -> list[list[str]]:
    model = cells.wrap(cells.plain())
    seen = []

    def look(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        seen.append([next(iter(state)), type(state[f"{prefix}inp.weight"]).__name__])

    model.register_state_dict_post_hook(look)
    cells.saved(model, cells.SHARDED)
    cells.saved(model, cells.FULL)
    return seen


def test_hooks_on_a_unit_see_finished_entries() -> None:
    wanted = [["inp.weight", "ShardedTensor"], ["inp.weight", "Tensor"]]
    assert on_ranks(_hooks_of_users, 2) == (wanted, wanted)
