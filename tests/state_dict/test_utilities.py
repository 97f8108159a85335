"""Names are cleaned and renamed, and values found in containers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from conformance.ranks import RankContext
from fsdp.engine.mesh import FSDPMeshInfo
from fsdp.engine.tree import map_tensors
from fsdp.flat_parameter import FLAT_PARAM
from fsdp.plain_names import CHECKPOINTED, PREFIX, clean, plain
from fsdp.state_dict.form import chunked, gathered_state
from fsdp.state_dict.names import replace_by_prefix
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    tensor: torch.Tensor
    name: str


def test_the_constants_are_what_checkpoints_have() -> None:
    assert (PREFIX, FLAT_PARAM) == ("_fsdp_wrapped_module.", "_flat_param")
    assert f"{CHECKPOINTED}." == wrappers._CHECKPOINT_PREFIX == "_checkpoint_wrapped_module."


@pytest.mark.parametrize(
    "name",
    [
        "a.weight",
        "_fsdp_wrapped_module.a.weight",
        "a._fsdp_wrapped_module.weight",
        "_fsdp_wrapped_module._checkpoint_wrapped_module.a._fsdp_wrapped_module.weight",
        "a._checkpoint_wrapped_module.weight",
    ],
)
def test_a_name_is_cleaned_wherever_wrappers_stand_in_it(name: str) -> None:
    assert clean(name) == "a.weight"
    assert clean(f"{name.removesuffix('weight')}") == "a."


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_the_path_of_a_wrapper_is_that_of_what_is_inside(name: str) -> None:
    assert (clean(name), clean(f"{name}."), clean(f"a.{name}"), clean("")) == ("", "", "a", "")


@pytest.mark.parametrize(
    "name",
    [
        "my_fsdp_wrapped_module.weight",
        "a_checkpoint_wrapped_module.b_fsdp_wrapped_module",
        "_checkpoint_wrapped_module_x.weight",
        "x_orig_mod.weight",
        "module.weight",
    ],
)
def test_a_part_that_only_looks_like_a_wrapper_stays(name: str) -> None:
    assert clean(name) == plain(name) == name
    assert plain(f"_orig_mod._fsdp_wrapped_module.{name}") == name
    assert clean(f"_orig_mod._fsdp_wrapped_module.{name}") == f"_orig_mod.{name}"


def test_a_prefix_is_replaced_in_the_keys_that_have_it() -> None:
    state = OrderedDict([("layer.w", 1), ("other.layer.w", 2), ("layer.v", 3), ("layers.w", 4)])
    replace_by_prefix(state, "layer.", "module.layer.")
    assert list(state.items()) == [
        ("other.layer.w", 2),
        ("layers.w", 4),
        ("module.layer.w", 1),
        ("module.layer.v", 3),
    ]
    replace_by_prefix(state, "module.layer.", "layer.")
    assert state["layer.w"] == 1
    replace_by_prefix(state, "", "x.")
    assert list(state) == ["x.other.layer.w", "x.layers.w", "x.layer.w", "x.layer.v"]
    with pytest.raises(ValueError, match="are the same"):
        replace_by_prefix(state, "x.", "x.")


def _doubled(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor * 2, tree)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_function_is_applied_to_every_tensor_in_sequences(kind: type) -> None:
    found = _doubled(kind([torch.ones(1), 3, kind([torch.ones(2)])]))
    assert type(found) is kind
    assert (found[0].item(), found[1], type(found[2])) == (2, 3, kind)
    assert found[2][0].tolist() == [2, 2]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_function_is_applied_to_every_tensor_in_mappings(kind: type) -> None:
    found = _doubled(kind([("b", torch.ones(1)), ("a", {"c": torch.ones(1), "d": None})]))
    assert type(found) is kind
    assert list(found) == ["b", "a"]
    assert (found["b"].item(), found["a"]["c"].item(), found["a"]["d"]) == (2, 2, None)


def test_a_function_is_applied_to_the_tensors_of_records() -> None:
    pair = _doubled(Pair(torch.ones(1), "x"))
    assert (type(pair), pair.first.item(), pair.second) == (Pair, 2, "x")
    record = _doubled(Record(torch.ones(1), "x"))
    assert (type(record), record.tensor.item(), record.name) == (Record, 2, "x")
    packed = pack_padded_sequence(torch.ones(2, 2, 1), torch.tensor([2, 1]))
    found = _doubled(packed)
    assert type(found) is PackedSequence
    assert torch.equal(found.data, packed.data * 2)
    assert torch.equal(found.batch_sizes, packed.batch_sizes)


def _gathers(context: RankContext) -> None:
    info = FSDPMeshInfo(cells.mesh_of(2), shard_mesh_dim=0)
    whole = torch.arange(10.0).view(5, 2)
    first, second = (chunked(whole, info, use_dtensor=form) for form in (False, True))
    state = OrderedDict(a=[first, (second, 3)], b={"c": first}, d=whole, e="text")
    found = gathered_state(state, cells.CPU)
    assert (type(found), type(found["a"]), type(found["a"][1])) == (OrderedDict, list, tuple)
    for value in (found["a"][0], found["a"][1][0], found["b"]["c"]):
        assert type(value) is torch.Tensor
        assert torch.equal(value, whole)
    assert found["d"] is whole
    assert (found["a"][1][1], found["e"]) == (3, "text")
    assert state["a"][0] is first  # not in place


def test_a_state_is_gathered_in_containers_of_the_same_types() -> None:
    on_ranks(_gathers, 2)
