"""A load changes what it must and nothing else, and is refused as a whole or not at all."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from conformance.ranks import RankContext
from fsdp import CPUOffload, ShardingStrategy, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.state_dict.form import chunked
from tests.fsdp.plain import batch, loss_of, optimizer_of
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.state_dict import cells

WHOLE = pytest.mark.parametrize("kind", [cells.FULL, cells.SHARDED], ids=["full", "sharded"])
PREFIX = "_fsdp_wrapped_module."


def _state_of(kind: StateDictType, *, seed: int, **options: Any) -> dict[str, Any]:
    """A state of another model, in memory of its own."""
    return cells.saved(cells.wrap(cells.plain(seed=seed), **options), kind)


# Keys


def _keys(context: RankContext, kind: StateDictType) -> None:
    model = cells.wrap(cells.checkpointed(cells.plain()))
    before = cells.whole(model)
    state = _state_of(kind, seed=8)
    del state["blocks.1.up.bias"], state["out.bias"]
    state["nobody"] = torch.ones(1)
    state["blocks.1.nobody.weight"] = torch.ones(1)
    found = cells.load(model, kind, state, strict=False)
    assert found.missing_keys == ["blocks.1.up.bias", "out.bias"]
    assert sorted(found.unexpected_keys) == ["blocks.1.nobody.weight", "nobody"]
    wanted = dict(cells.plain(seed=8).named_parameters())
    for name, value in cells.whole(model).items():
        kept = name in ("blocks.1.up.bias", "out.bias")
        assert torch.equal(value, before[name] if kept else wanted[name]), name


@WHOLE
def test_keys_that_are_missing_or_unexpected_are_told_by_their_plain_names(
    kind: StateDictType,
) -> None:
    on_ranks(_keys, 2, kind=kind)


def _strict(context: RankContext, kind: StateDictType) -> list[str]:
    model = cells.wrap(cells.plain())
    state = _state_of(kind, seed=8)
    del state["out.bias"]
    state["nobody"] = torch.ones(1)
    found = error_of(lambda: cells.load(model, kind, state))
    cells.load(model, kind, _state_of(kind, seed=9))
    cells.same(cells.whole(model), dict(cells.plain(seed=9).named_parameters()))
    assert FSDP.get_state_dict_type(model) == FSDP.get_state_dict_type(cells.wrap(cells.plain()))
    return found


@WHOLE
@pytest.mark.parametrize(
    "text",
    ['Missing key(s) in state_dict: "out.bias"', 'Unexpected key(s) in state_dict: "nobody"'],
)
def test_a_strict_load_names_them_and_leaves_a_usable_model(kind: StateDictType, text: str) -> None:
    named_on_every_rank(on_ranks(_strict, 2, kind=kind), RuntimeError, text)


def _logged(context: RankContext) -> list[str]:
    model = cells.wrap(cells.plain())
    state = _state_of(cells.SHARDED, seed=8)
    del state["out.bias"]
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("fsdp").addHandler(handler)
    try:
        cells.load(model, cells.SHARDED, state, strict=False)
    finally:
        logging.getLogger("fsdp").removeHandler(handler)
    return [f"{record.levelname}: {record.getMessage()}" for record in records]


def test_a_sharded_load_tells_what_it_skips() -> None:
    text = f"WARNING: Did not find param with FQN {PREFIX}out.bias, skipping it. The weight will "
    text += "not be filled if you expect it to be."
    assert on_ranks(_logged, 2) == ([text], [text])


# Refusals


def _refused(context: RankContext, kind: StateDictType, spoil: str) -> list[str]:
    model = cells.wrap(cells.plain())
    before = cells.whole(model)
    state = SPOILS[spoil](_state_of(kind, seed=8), context.rank)
    found = error_of(lambda: cells.load(model, kind, state))
    cells.same(cells.whole(model), before)
    cells.load(model, kind, _state_of(kind, seed=9))  # nothing is left open
    return found


def _on_one(change: Any) -> Any:
    """Spoil the state of rank 1 alone."""
    return lambda state, rank: change(state) if rank else state


def _without(key: str) -> Any:
    return lambda state: {name: value for name, value in state.items() if name != key}


def _with(key: str, value: Any) -> Any:
    return lambda state: {**state, key: value() if callable(value) else value}


def _two_shards(state: dict[str, Any]) -> dict[str, Any]:
    value = state["out.weight"]
    value._local_shards = value._local_shards * 2
    return state


def _short(state: dict[str, Any]) -> dict[str, Any]:
    value = state["_flat_param"]
    shard = value._local_shards[0]
    shard.tensor = shard.tensor[:-1]
    return state


SPOILS: dict[str, Any] = {
    "rank0_only": lambda state, rank: {} if rank else state,
    "missing_on_one": _on_one(_without("out.bias")),
    "shape_on_one": _on_one(_with("out.bias", lambda: torch.ones(4))),
    "shape": lambda state, rank: _with("out.bias", lambda: torch.ones(4))(state),
    "two_shards": _on_one(_two_shards),
    "flat_missing": lambda state, rank: _without("blocks.0._flat_param")(state),
    "flat_plain": _on_one(_with("_flat_param", lambda: torch.ones(4))),
    "flat_short": _on_one(_short),
}


@pytest.mark.parametrize(
    ("spoil", "kind", "error", "text"),
    [
        ("rank0_only", cells.FULL, ValueError, "the state dict of rank 0 differs from that of"),
        ("missing_on_one", cells.FULL, ValueError, "rank 1 has 'out.bias' absent"),
        ("missing_on_one", cells.SHARDED, ValueError, "rank 1 has 'out.bias' absent"),
        ("shape_on_one", cells.FULL, ValueError, "'out.bias' (4,)"),
        ("shape_on_one", cells.SHARDED, RuntimeError, "size mismatch for out.bias"),
        ("shape", cells.SHARDED, RuntimeError, "size mismatch for out.bias: copying a param with"),
        ("two_shards", cells.SHARDED, AssertionError, "Expects 0 or 1 shard per rank but got 2"),
        ("flat_missing", cells.LOCAL, AssertionError, "No `FlatParameter` in `state_dict` for"),
        ("flat_plain", cells.LOCAL, AssertionError, "Tensors in local_state_dict should be Sha"),
        ("flat_short", cells.LOCAL, AssertionError, "Local shard size = "),
    ],
)
def test_a_state_that_cannot_be_loaded_is_refused_on_all_ranks_before_anything_happens(
    spoil: str, kind: StateDictType, error: type[Exception], text: str
) -> None:
    named_on_every_rank(on_ranks(_refused, 2, kind=kind, spoil=spoil), error, text)


def _shape_of_full(context: RankContext) -> list[str]:
    model = cells.wrap(cells.plain())
    state = _state_of(cells.FULL, seed=8)
    state["out.bias"] = torch.ones(4)
    return error_of(lambda: cells.load(model, cells.FULL, state))


def test_another_shape_in_a_full_state_is_told_as_by_any_module() -> None:
    text = f"size mismatch for {PREFIX}out.bias"
    named_on_every_rank(on_ranks(_shape_of_full, 2), RuntimeError, text)


class Fragile(nn.Module):
    """Raises while it is saved or loaded, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.breaks = False

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._save_to_state_dict(*args, **kwargs)
        assert not self.breaks, "told to"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        assert not self.breaks, "told to"
        super()._load_from_state_dict(*args, **kwargs)


def _fragile(context: RankContext, kind: StateDictType, *, below: bool) -> None:
    inner = Fragile()
    inner.lin.requires_grad_(False).weight.fill_(2.0)
    model: Any = cells.wrap(inner, nested=False)
    top: Any = nn.Sequential(model) if below else model
    state = cells.saved(top, kind)
    inner.breaks = True
    with pytest.raises(AssertionError, match="told to"):
        cells.saved(top, kind)
    assert model.training_state.name == "IDLE"
    with pytest.raises(AssertionError, match="told to"):
        cells.load(top, kind, state)
    # A parent that is no unit tells nobody: the next load of the unit notices.
    assert below or model.training_state.name == "IDLE"
    inner.breaks = False
    cells.load(top, kind, state)
    assert model.training_state.name == "IDLE"
    assert cells.whole(model)["lin.weight"].eq(2).all()


@cells.grid(kind=cells.KINDS, below={"unit": False, "parent": True})
def test_an_exception_of_a_module_leaves_a_usable_unit(kind: StateDictType, *, below: bool) -> None:
    on_ranks(_fragile, 2, kind=kind, below=below)


# Nothing old remains


def _in_training(
    context: RankContext, kind: StateDictType, strategy: str, *, original: bool
) -> None:
    """A load after a forward whose backward never came, and after gradients were made."""
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": original,
    }
    model = cells.wrap(cells.plain(), **options)
    params = list(model.parameters())  # those that the optimizer has
    loss_of(model, batch(0, context.rank)).backward()
    gradients = [p.grad.clone() if p.grad is not None else None for p in params]
    model(batch(1, context.rank))  # leaves whole parameters under SHARD_GRAD_OP
    state = _state_of(kind, seed=8, **options)
    cells.load(model, kind, state)
    x = batch(3, context.rank)
    torch.testing.assert_close(model(x), cells.plain(seed=8)(x))
    for param, want in zip(params, gradients, strict=True):
        assert (param.grad is None) == (want is None)
        assert want is None or torch.equal(param.grad, want)


@cells.grid(kind=cells.KINDS, strategy=cells.STRATEGIES, original=cells.ORIGINAL)
def test_nothing_old_is_computed_with_after_a_load(
    kind: StateDictType, strategy: str, *, original: bool
) -> None:
    on_ranks(_in_training, 2, kind=kind, strategy=strategy, original=original)


def _before_backward(
    context: RankContext, kind: StateDictType, strategy: str, *, original: bool
) -> list[str]:
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    model = cells.wrap(cells.plain(), **options)
    loss = loss_of(model, batch(0, context.rank))
    cells.load(model, kind, _state_of(kind, seed=8, **options))
    found = error_of(loss.backward)
    x = batch(3, context.rank)
    torch.testing.assert_close(model(x), cells.plain(seed=8)(x))
    return found


@cells.grid(kind=cells.KINDS, strategy=cells.STRATEGIES, original=cells.ORIGINAL)
def test_backward_refuses_what_was_loaded_since_its_forward_as_in_any_module(
    kind: StateDictType, strategy: str, *, original: bool
) -> None:
    found = on_ranks(_before_backward, 2, kind=kind, strategy=strategy, original=original)
    text = "modified by an inplace operation"
    named_on_every_rank(found, RuntimeError, text)
    bare = cells.plain()
    loss = loss_of(bare, batch(0, 0))
    bare.load_state_dict(cells.plain(seed=8).state_dict())
    with pytest.raises(RuntimeError, match=text):
        loss.backward()


def _saves_between(
    context: RankContext, kind: StateDictType, strategy: str, *, original: bool
) -> None:
    """Saving at every point of an iteration changes nothing of what is trained."""
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    models = [cells.wrap(cells.plain(), **options) for _ in range(2)]
    for number, model in enumerate(models):
        with FSDP.state_dict_type(model, kind):
            optimizer = optimizer_of(model.parameters())
            for at in range(3):
                with model.no_sync():
                    loss_of(model, batch(at, context.rank, 1)).backward()
                if number:
                    model.state_dict()  # beside whole gradients that wait
                loss = loss_of(model, batch(at, context.rank))
                if number:
                    model.state_dict()
                loss.backward()
                if number:
                    gradients = [p.grad for p in model.parameters()]
                    model.state_dict()
                    for param, gradient in zip(model.parameters(), gradients, strict=True):
                        assert param.grad is gradient
                optimizer.step()
                optimizer.zero_grad()
                if number:
                    model.state_dict()
    cells.same(cells.whole(models[1]), cells.whole(models[0]))


@cells.grid(kind=cells.KINDS, strategy=cells.STRATEGIES, original=cells.ORIGINAL)
def test_saving_at_any_point_changes_nothing(
    kind: StateDictType, strategy: str, *, original: bool
) -> None:
    on_ranks(_saves_between, 2, kind=kind, strategy=strategy, original=original)


# From and into other models


def _bare(context: RankContext, dtype: torch.dtype, *, offload: bool) -> None:
    options: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=offload)}
    inner = cells.plain(buffers=True).to(dtype)
    model = cells.wrap(inner, **options)
    bare = cells.plain(seed=8, buffers=True).to(dtype)
    assert str(model.load_state_dict(bare.state_dict())) == "<All keys matched successfully>"
    cells.same(cells.whole(model), dict(bare.named_parameters()))
    optimizer = optimizer_of(model.parameters())
    loss_of(model, batch(0, context.rank).to(dtype)).backward()
    optimizer.step()
    other = cells.plain(seed=9, buffers=True).to(dtype)
    other.load_state_dict(model.state_dict())
    cells.same(dict(other.named_parameters()), cells.whole(model))
    assert not torch.equal(other.inp.weight, bare.inp.weight)


@cells.grid(
    dtype={str(d): d for d in (torch.float32, torch.float16, torch.bfloat16)},
    offload=cells.switch("offload"),
)
def test_plain_models_load_full_states_and_the_reverse(
    dtype: torch.dtype, *, offload: bool
) -> None:
    on_ranks(_bare, 2, dtype=dtype, offload=offload)


def _assigned(context: RankContext, kind: StateDictType, *, original: bool) -> None:
    model = cells.wrap(cells.plain(), use_orig_params=original)
    optimizer = optimizer_of(model.parameters())
    held = [id(p) for p in model.parameters()]
    state = _state_of(kind, seed=8, use_orig_params=original)
    cells.load(model, kind, state, assign=True)
    assert [id(p) for p in model.parameters()] == held  # the optimizer's
    cells.same(cells.whole(model), dict(cells.plain(seed=8).named_parameters()))
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.step()
    assert not torch.equal(cells.whole(model)["out.bias"], cells.plain(seed=8).out.bias)


@cells.grid(kind=cells.KINDS, original=cells.ORIGINAL)
def test_an_assigning_load_keeps_the_objects_that_optimizers_hold(
    kind: StateDictType, *, original: bool
) -> None:
    on_ranks(_assigned, 2, kind=kind, original=original)


def _any_form(context: RankContext) -> None:
    """A sharded load takes whole tensors and values of another kind of form as well."""
    mesh = cells.mesh_of(2)
    group, meshed = cells.wrap(cells.plain()), cells.wrap(cells.plain(), device_mesh=mesh)
    wanted = dict(cells.plain(seed=8).named_parameters())
    info = group._state.mesh_info
    sharded = {name: chunked(value, info, use_dtensor=False) for name, value in wanted.items()}
    dtensors = {name: chunked(value, info, use_dtensor=True) for name, value in wanted.items()}
    for model in (group, meshed):
        for state in (sharded, dtensors, {n: v.detach() for n, v in wanted.items()}):
            cells.spoil(model)
            cells.load(model, cells.SHARDED, state)
            cells.same(cells.whole(model), wanted)


def test_a_sharded_load_takes_any_form() -> None:
    on_ranks(_any_form, 2)


def _part(context: RankContext) -> None:
    """A unit that others were made around is saved and loaded by itself, and the root trains on."""
    model = cells.wrap(cells.plain())
    state = cells.saved(model.blocks[0], cells.SHARDED)
    assert list(state) == ["up.weight", "up.bias", "down.weight"]
    assert all(isinstance(value, ShardedTensor) for value in state.values())
    cells.spoil(model)
    cells.load(model.blocks[0], cells.SHARDED, state)
    found = cells.whole(model)
    assert torch.equal(found["blocks.0.up.weight"], cells.plain().blocks[0].up.weight)
    assert found["blocks.1.up.weight"].eq(-1).all()
    cells.step(model, context.rank)


def test_one_unit_is_saved_and_loaded_by_itself() -> None:
    on_ranks(_part, 2)
