"""What one rank alone does otherwise is told on all ranks, before a save or a load exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.engine.state import TrainingState
from fsdp.reshard import transport
from fsdp.state_dict.form import chunked
from tests.fsdp.ranks import count, error_of, named_on_every_rank, on_ranks
from tests.state_dict import cells

LOADS = pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
MAKES = ("all_gather", "all_to_all", "all_gather_object")


@contextmanager
def _hook(model: FSDP, *, loads: bool) -> Iterator[None]:
    inner: Any = model.get_submodule("blocks.0").module.up
    add = inner.register_load_state_dict_pre_hook if loads else inner.register_state_dict_post_hook
    handle = add(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def _kind(model: FSDP, *, loads: bool) -> Iterator[None]:
    with FSDP.state_dict_type(model, cells.FULL):
        yield


@contextmanager
def _local(model: FSDP, *, loads: bool) -> Iterator[None]:
    with FSDP.state_dict_type(model, cells.LOCAL):
        yield


@contextmanager
def _in_use(model: FSDP, *, loads: bool) -> Iterator[None]:
    state = FSDP.fsdp_modules(model)[1]._state
    state.enter(TrainingState.SUMMON_FULL_PARAMS)
    yield
    state.enter(TrainingState.IDLE)


ALONE: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "hook": (_hook, ValueError, "with hooks or methods that change states"),
    "form": (_kind, ValueError, "in the form FULL_STATE_DICT"),
    "local_on_a_mesh": (_local, RuntimeError, "DeviceMesh is not compatible with LOCAL_STATE_DICT"),
    "in_use": (_in_use, AssertionError, "Cannot manually unshard parameters when already"),
}


def _alone(context: RankContext, name: str, *, loads: bool) -> list[str]:
    given = {"device_mesh": cells.mesh_of(2)} if name == "local_on_a_mesh" else {}
    model = cells.wrap(cells.plain(), **given)
    state = cells.saved(model, cells.SHARDED)
    with FSDP.state_dict_type(model, cells.SHARDED):
        call: Any = (lambda: model.load_state_dict(state)) if loads else model.state_dict
        if context.rank:
            with ALONE[name][0](model, loads=loads):
                found = error_of(call)
        else:
            found = error_of(call)
    # Nothing is left open, and nothing is waited for.
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))
    cells.load(model, cells.SHARDED, state)
    return found


@LOADS
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_does_alone_is_refused_on_all(name: str, *, loads: bool) -> None:
    _, error, text = ALONE[name]
    named_on_every_rank(on_ranks(_alone, 2, name=name, loads=loads), error, text)


def _value_on_one(context: RankContext, form: str) -> list[str]:
    given = {"device_mesh": cells.mesh_of(2)} if form == "dtensor" else {}
    model = cells.wrap(cells.plain(), **given)
    state = cells.saved(cells.wrap(cells.plain(seed=8), **given), cells.SHARDED)
    info = model._state.mesh_info
    whole = torch.ones(3, 10)
    value = chunked(whole, info, use_dtensor=form == "dtensor")
    if form == "columns":
        value._metadata.shards_metadata[0].shard_sizes = [1, 10]  # type: ignore[attr-defined]
    state["out.weight"] = value if context.rank == 0 else whole
    if form == "columns" and context.rank:
        state["out.weight"] = chunked(whole, info, use_dtensor=False)
    return error_of(lambda: cells.load(model, cells.SHARDED, state))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("dtensor", "rank 0 has 'out.weight' (3, 10) DTensor [Shard(dim=0)] on a mesh of (2,)"),
        ("sharded", "rank 0 has 'out.weight' (3, 10) ShardedTensor of 2 shards as it is saved"),
        ("columns", "rank 0 has 'out.weight' (3, 10) ShardedTensor of 2 shards, "),
    ],
)
def test_a_value_that_is_cut_otherwise_on_one_rank_is_named(form: str, text: str) -> None:
    named_on_every_rank(on_ranks(_value_on_one, 2, form=form), ValueError, text)


def _asked(context: RankContext, kind: str, *, summon: bool) -> list[int]:
    """Collectives of one save, after the first one."""
    model = cells.wrap(cells.plain())
    cells.saved(model, cells.KINDS[kind])
    if summon:
        with FSDP.summon_full_params(model, writeback=False):
            before = [count(context, op) for op in MAKES]
            # One rank alone may save what is whole.
            state = model.state_dict() if context.rank == 0 else {}
            assert bool(state) is (context.rank == 0)
            return [count(context, op) - was for op, was in zip(MAKES, before, strict=True)]
    before = [count(context, op) for op in MAKES]
    cells.saved(model, cells.KINDS[kind])
    return [count(context, op) - was for op, was in zip(MAKES, before, strict=True)]


@pytest.mark.parametrize(
    ("kind", "summon", "wanted"),
    [
        ("full", False, [1 + 3, 0, 0]),
        ("sharded", False, [1, 3, 0]),
        ("local", False, [1, 0, 0]),
        ("full", True, [0, 0, 0]),
    ],
)
def test_a_save_asks_once_and_not_for_what_is_whole(
    kind: str, wanted: list[int], *, summon: bool
) -> None:
    assert on_ranks(_asked, 2, kind=kind, summon=summon) == (wanted, wanted)


def _each_its_own(context: RankContext, kinds: list[str], *, loads: bool) -> list[str]:
    """Every rank asks for another form; what it loads has that form."""
    model = cells.wrap(cells.plain())
    states = {kind: cells.saved(model, cells.KINDS[kind]) for kind in kinds}
    kind = kinds[context.rank]
    call: Any = lambda: cells.saved(model, cells.KINDS[kind])  # noqa: E731
    if loads:
        call = lambda: cells.load(model, cells.KINDS[kind], states[kind])  # noqa: E731
    found = error_of(call)
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))
    cells.same(cells.saved(model, cells.FULL), cells.plain().state_dict())
    return found


@LOADS
@pytest.mark.parametrize("kinds", list(itertools.permutations(cells.KINDS, 2)), ids="-".join)
def test_ranks_that_ask_for_different_forms_hear_who_asked_for_what(
    kinds: tuple[str, str], *, loads: bool
) -> None:
    found = on_ranks(_each_its_own, 2, kinds=list(kinds), loads=loads)
    for rank, kind in enumerate(kinds):
        text = f"rank {rank} has the unit '' in the form {cells.KINDS[kind].name}"
        named_on_every_rank(found, ValueError, text)


def _alone_in_a_summon(context: RankContext, kind: str, *, recurse: bool) -> list[str]:
    """Inside a summon the last rank asks for what is not there."""
    model = cells.wrap(cells.plain())
    with FSDP.summon_full_params(model, recurse=recurse, writeback=False):
        asked = cells.KINDS[kind] if context.rank else cells.FULL
        return error_of(lambda: cells.saved(model, asked))


@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_inside_a_summon_nobody_waits_for_who_asks_for_what_is_not_there(kind: str) -> None:
    first, second = on_ranks(_alone_in_a_summon, 2, kind=kind, recurse=True)
    assert first == ["", ""]
    assert second[0] == "AssertionError"


@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_a_summon_of_the_root_alone_is_not_saved_by_half(kind: str) -> None:
    found = on_ranks(_alone_in_a_summon, 2, kind=kind, recurse=False)
    named_on_every_rank(found, AssertionError, "Cannot manually unshard parameters when already")


class _Breaks(nn.Module):
    """Raises when it is loaded, if it is told to."""

    breaks = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        assert not self.breaks, "told to"


def _abandoned(context: RankContext) -> None:
    torch.manual_seed(3)
    _Breaks.breaks = True
    model = cells.wrap(nn.Sequential(nn.Linear(4, 3), _Breaks()), nested=False)
    before = cells.whole(model)
    top = nn.Sequential(model)
    state = {f"0.{name}": torch.ones_like(value) for name, value in before.items()}
    with pytest.raises(AssertionError, match="told to"):
        cells.load(top, cells.FULL, state)
    _Breaks.breaks = False
    cells.load(top, cells.FULL, {}, strict=False)  # notices what the first one has left open
    assert model.training_state is TrainingState.IDLE
    cells.same(cells.whole(model), before)


def test_half_of_a_load_that_was_given_up_is_not_kept() -> None:
    on_ranks(_abandoned, 2)


class _Copies(TorchFunctionMode):
    """Notes which copies between devices do not block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.blocking.append(not (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def _sent(context: RankContext) -> list[bool]:
    peer = 1 - context.rank
    sent = [torch.full((n,), n, dtype=torch.uint8) for n in (2, 1)]
    wanted = [torch.zeros(n, dtype=torch.uint8) for n in (2, 1)]
    with _Copies() as copies:
        arrive = transport._launch({peer: sent}, {peer: wanted}, None, cells.CPU)
    arrive()
    assert [part.tolist() for part in wanted] == [[2, 2], [1]]
    return copies.blocking


def test_runs_are_there_when_they_are_sent() -> None:
    assert on_ranks(_sent, 2) == ([True, True], [True, True])
