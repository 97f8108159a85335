"""Every setting of a state: it holds the model, in its form, and loads into another model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from conformance.ranks import RankContext
from fsdp import FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig
from tests.fsdp.plain import batch
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells

AXES = {
    "kind": {word: word for word in ("full", "rank0", "local", "sharded")},
    **{
        word: cells.switch(word)
        for word in ("original", "nested", "low", "buffers", "checkpointed", "offload")
    },
}


def _build(cell: dict[str, Any], *, seed: int, flip: bool) -> Any:
    """The model of a cell, or one that is wrapped as differently as its form allows."""
    model = cells.plain(seed=seed, buffers=cell["buffers"])
    if cell["checkpointed"] != flip:
        model = cells.checkpointed(model)
    free = flip and cell["kind"] != "local"
    return cells.wrap(
        model,
        nested=cell["nested"] != free,
        use_orig_params=cell["original"] != free,
        mixed_precision=cells.LOW if cell["low"] else None,
    )


def _config(cell: dict[str, Any]) -> Any:
    kinds = {"local": LocalStateDictConfig, "sharded": ShardedStateDictConfig}
    if cell["kind"] in kinds:
        return kinds[cell["kind"]](offload_to_cpu=cell["offload"])
    return FullStateDictConfig(offload_to_cpu=cell["offload"], rank0_only=cell["kind"] == "rank0")


def _holds(context: RankContext, cell: dict[str, Any]) -> None:
    kind = cells.KINDS[cell["kind"].replace("rank0", "full")]
    model = _build(cell, seed=7, flip=False)
    cells.step(model, context.rank)
    original = cells.plain(buffers=cell["buffers"]).state_dict()
    params = cells.whole(model)
    wanted = {name: params.get(name, value) for name, value in original.items()}
    for name in [name for name in wanted if cell["low"] and name not in params]:
        if wanted[name].is_floating_point():  # computed with in 16 bits, saved in 32
            wanted[name] = wanted[name].bfloat16().float()
    model(batch(1, context.rank))  # whole parameters may be in memory now, rounded
    state = cells.saved(model, kind, _config(cell))
    if cell["kind"] == "rank0":
        assert bool(state) == (context.rank == 0)
        box = [state]
        dist.broadcast_object_list(box, src=0)
        (state,) = box
    if cell["kind"] == "local":
        flats = [name for name in state if name.endswith("_flat_param")]
        assert len(flats) == (3 if cell["nested"] else 1)
        assert all(isinstance(state[name], ShardedTensor) for name in flats)
        assert set(state) - set(flats) == set(original) - set(params)
    else:
        cells.same(cells.put_together(state), wanted)
        cut = {name for name, value in state.items() if isinstance(value, ShardedTensor)}
        assert cut == (set(params) if cell["kind"] == "sharded" else set())
    state = {name: _kept(value) for name, value in state.items()}
    other = _build(cell, seed=8, flip=True)
    cells.spoil(other)
    assert str(cells.load(other, kind, state)) == "<All keys matched successfully>"
    cells.same(cells.put_together(cells.saved(other, cells.FULL)), wanted)
    x = batch(2, 0)
    assert torch.equal(model(x), other(x))


def _kept(value: Any) -> Any:
    """The value, independent of the model where it is a view of it."""
    return value if isinstance(value, ShardedTensor) else value.clone()


@cells.cells_of(AXES)
def test_a_state_holds_the_model_and_loads_into_another(cell: dict[str, Any]) -> None:
    on_ranks(_holds, 2, cell=cell)
