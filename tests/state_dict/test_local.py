"""The local form: this rank's part of a flat parameter, as it is, and what others make of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard

from conformance.ranks import RankContext
from fsdp import LocalStateDictConfig
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.state_dict import cells


def _flat(model: nn.Module) -> torch.Tensor:
    """The parameters of a module end to end."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def _parts(context: RankContext, *, offload: bool) -> int:
    world, rank = context.world_size, context.rank
    model = cells.wrap(cells.plain())
    cells.saved(model, cells.FULL)  # starts the tree
    before = len(context.recorder.records)
    state = cells.saved(model, cells.LOCAL, LocalStateDictConfig(offload_to_cpu=offload))
    collectives = len(context.recorder.records) - before
    assert list(state) == ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]
    whole = _flat(cells.plain().blocks[0])
    numel = -(-len(whole) // world)
    value = state["blocks.0._flat_param"]
    assert isinstance(value, ShardedTensor)
    metadata = value.metadata()
    assert list(metadata.size) == [len(whole)]
    wanted = [
        ([start], [min(numel, len(whole) - start)], f"rank:{number}/cpu")
        for number, start in enumerate(range(0, len(whole), numel))
    ]
    found = [
        (list(each.shard_offsets), list(each.shard_sizes), str(each.placement))
        for each in metadata.shards_metadata
    ]
    assert found == wanted
    (shard,) = value.local_shards()
    assert torch.equal(shard.tensor, whole[rank * numel : (rank + 1) * numel])
    flat = model.module.blocks[0].module._flat_param
    assert shard.tensor.data_ptr() == flat.data_ptr()  # no copy
    return collectives


@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_shows_its_part_of_the_flat_parameter(world: int, *, offload: bool) -> None:
    assert on_ranks(_parts, world, offload=offload) == (1,) * world  # what all ask for


def _empty(context: RankContext, *, original: bool) -> int:
    """Two elements on three ranks."""
    model = cells.wrap(nn.Linear(1, 1), nested=False, use_orig_params=original)
    before = cells.whole(model)
    state = cells.saved(model, cells.LOCAL)
    copy = cells.through_a_file(state)
    cells.spoil(model)
    cells.load(model, cells.LOCAL, copy)
    cells.same(cells.whole(model), before)
    return len(state["_flat_param"].local_shards())


def test_a_rank_with_nothing_but_padding_has_no_shard() -> None:
    assert on_ranks(_empty, 3, original=False) == (1, 1, 0)


def _original(context: RankContext) -> None:
    """With original parameters there is the flat entry alone, and it can be loaded."""
    model = cells.wrap(cells.plain(buffers=True), use_orig_params=True)
    state = cells.saved(model, cells.LOCAL)
    managed = {name for name, _ in cells.plain().named_parameters()}
    assert not managed & set(state)
    assert sum(name.endswith("_flat_param") for name in state) == 3


def test_original_parameters_are_in_the_flat_entry_alone() -> None:
    on_ranks(_original, 2)


def _follows(context: RankContext, *, original: bool) -> None:
    model = cells.wrap(cells.plain(), use_orig_params=original)
    state = cells.saved(model, cells.LOCAL)
    before = {name: value.clone() for name, value in cells.locals_of(state).items()}
    cells.step(model, context.rank)
    after = cells.locals_of(state)
    assert not any(torch.equal(after[name], value) for name, value in before.items())


@ORIGINAL
def test_the_entry_changes_with_the_parameters(*, original: bool) -> None:
    on_ranks(_follows, 2, original=original)


def _parts_of(context: RankContext) -> dict[str, list[float]]:
    torch.manual_seed(3)
    model = cells.wrap(nn.Linear(5, 3), nested=False)
    state = cells.saved(model, cells.LOCAL)
    return {name: value.tolist() for name, value in cells.locals_of(state).items()}


def _from_parts(context: RankContext, parts: list[dict[str, list[float]]]) -> None:
    whole = torch.tensor([x for part in parts for x in part["_flat_param"]])
    numel = -(-len(whole) // context.world_size)
    own = whole[context.rank * numel : (context.rank + 1) * numel].clone()
    shard = Shard.from_tensor_and_offsets(own, [context.rank * numel], context.rank)
    value = init_from_local_shards([shard], [len(whole)])
    model = cells.wrap(nn.Linear(5, 3), nested=False)
    cells.load(model, cells.LOCAL, {"_flat_param": value})
    torch.manual_seed(3)
    cells.same(cells.whole(model), dict(nn.Linear(5, 3).named_parameters()))


def test_parts_of_four_ranks_are_put_together_for_two() -> None:
    on_ranks(_from_parts, 2, parts=list(on_ranks(_parts_of, 4)))
