"""What counts as a piece, and states that only some ranks or parameters have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as Rows

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, MixedPrecision, checkpoint
from fsdp.plain_names import named_plainly
from fsdp.reshard import reshard
from fsdp.reshard.pieces import pieces_of
from tests.fsdp.plain import build
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.reshard.faces import Marks, everything, fresh, made, marked, plain, same


class Picture(nn.Module):
    """A convolution whose weight lies in memory channels last."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2)
        self.out = nn.Linear(4, 3)
        if last:
            self.conv.to(memory_format=torch.channels_last)


def picture(face: str, *, last: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Picture(last=last)
    if face == "plain":
        return model
    return FullyShardedDataParallel(model, use_orig_params=face == "original")


def _channels_last(context: RankContext, *, source: Any, target: Any, way: str, path: str) -> None:
    here = picture(source[0], last=source[1], seed=7)
    there = picture(target[0], last=target[1], seed=8)
    wanted = picture(target[0], last=target[1], seed=7)
    before, after, expected = marked(here), fresh(there), marked(wanted)
    if way == "live":
        reshard(here, there, before, after, limit=50)
    else:
        checkpoint.save(path, here, before, format=way)
        checkpoint.load(path, there, after)
    same(everything(there, after), everything(wanted, expected))


@pytest.mark.parametrize("way", ["live", "sharded", "safetensors"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("flat", True), ("original", False)),
        (("plain", False), ("flat", True)),
        (("original", True), ("plain", True)),
    ],
    ids=["last-first", "first-last", "last-last"],
)
def test_the_order_in_memory_may_differ(source: Any, target: Any, way: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_channels_last, 2, source=source, target=target, way=way, path=path)


def _some_have_state(context: RankContext) -> None:
    here, there = made("original", [0, 1]), made("flat", [0, 1], seed=8)
    wanted = made("flat", [0, 1])
    assert here is not None
    assert wanted is not None
    before, after, expected = marked(here), fresh(there), marked(wanted)
    assert before is not None
    assert expected is not None
    (gain,) = [p for n, p in here.named_parameters() if n.endswith("gain")]
    before.state.pop(gain, None)
    reshard(here, there, before, after)
    # In a flat parameter, what had no state counts as zeros.
    root = wanted._handle
    assert root is not None
    flat = dict(wanted.named_parameters())["_fsdp_wrapped_module._flat_param"]
    piece = next(p for p in pieces_of(wanted, [0, 1]) if p.name == "gain")
    for key in ("twice", "exact"):
        piece.view(expected.state[flat][key]).zero_()
    same(everything(there, after), everything(wanted, expected))


def test_what_had_no_state_counts_as_zeros_in_a_flat_parameter() -> None:
    on_ranks(_some_have_state, 2)


def _other_steps(context: RankContext) -> list[str]:
    here, there = made("original", [0, 1]), made("flat", [0, 1], seed=8)
    before, after = marked(here), marked(there)
    assert here is not None
    assert there is not None
    assert before is not None
    untouched = everything(there, after)
    for name, param in here.named_parameters():
        if name.endswith("emb.weight") and param in before.state:
            before.state[param]["step"] = torch.tensor(4.0)
    error = error_of(lambda: reshard(here, there, before, after))
    same(everything(there, after), untouched)
    return error


def test_parts_of_a_flat_parameter_have_one_step_count() -> None:
    errors = on_ranks(_other_steps, 2)
    named_on_every_rank(errors, ValueError, "both lie in one flat parameter")


def _one_side_without(context: RankContext, *, kind: str) -> list[str]:
    here, there = made("flat", [0, 1]), made("fully", [0, 1])
    if kind == "target":
        return error_of(lambda: reshard(here, None))
    if kind == "optimizers":
        return error_of(lambda: reshard(here, there, marked(here), None))
    if kind == "dtype":
        return error_of(lambda: reshard(here, made("plain", [0, 1], model=plain().double())))
    if kind == "one rank":
        mine = Marks([nn.Parameter(torch.ones(2))]) if context.rank else marked(here)
        return error_of(lambda: reshard(here, there, mine, fresh(there)))
    if kind == "stranger":
        return error_of(lambda: reshard(here, there, Marks([nn.Parameter(torch.ones(2))]), None))
    other = made("plain", [0, 1], model=plain() if context.rank else build())
    return error_of(lambda: reshard(here, other))


@pytest.mark.parametrize(
    ("kind", "fragment"),
    [
        ("target", "no rank of the group has a target"),
        ("optimizers", "the source has optimizers and the target has none"),
        ("dtype", "has dtype torch.float32 in the source and torch.float64 in the target"),
        ("stranger", "is not of the model"),
        ("one rank", "is not of the model"),
        ("ranks", "Build the same model on all ranks"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(kind: str, fragment: str) -> None:
    errors = on_ranks(_one_side_without, 2, kind=kind)
    named_on_every_rank(errors, ValueError, fragment)


class Factored(torch.optim.Optimizer):
    """Its state has rows of the parameter, not elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.ones(len(param) + 1)


def test_states_that_nobody_knows_how_to_cut_are_refused(tmp_path: Path) -> None:
    model = plain()
    optimizer = Factored(model.parameters())
    optimizer.step()
    with pytest.raises(NotImplementedError, match="one element for each of the parameter"):
        checkpoint.save(tmp_path / "saved", model, optimizer)


def _partial(context: RankContext, *, kind: str) -> list[str]:
    model = nn.Module()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    placement = Partial() if kind == "partial" else Rows(0)
    model.register_buffer("sum", DTensor.from_local(torch.ones(4, 2), mesh, [placement]))
    return error_of(lambda: pieces_of(model, [0, 1]))


def test_a_partial_sum_is_no_piece() -> None:
    errors = on_ranks(_partial, 2, kind="partial")
    named_on_every_rank(errors, NotImplementedError, "'sum' is a Tensor with placements (Partial")
    assert on_ranks(_partial, 2, kind="rows") == (["", ""],) * 2


def test_names_are_those_of_the_plain_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    assert [name for name, _ in named_plainly(model)] == ["", "0", "1", "1"]


def _cast_buffers(context: RankContext, *, path: str) -> None:
    """Mixed precision casts buffers; a checkpoint has their original dtype."""
    model = FullyShardedDataParallel(
        build(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)
    )
    model(torch.ones(2, 10))
    checkpoint.save(path, model)
    loaded = build()
    loaded.scale.zero_()
    checkpoint.load(path, loaded)
    assert loaded.scale.dtype == torch.float32
    assert loaded.scale.item() == 1


def test_buffers_have_their_original_dtype(tmp_path: Path) -> None:
    on_ranks(_cast_buffers, 2, path=str(tmp_path / "saved"))


def _replicas(context: RankContext, *, path: str) -> None:
    model = made("hybrid", [0, 1, 2, 3])
    assert model is not None
    checkpoint.save(path, model, marked(model))


def test_replicas_are_written_once(tmp_path: Path) -> None:
    on_ranks(_replicas, 4, path=str(tmp_path / "saved"))
    size = sum(f.stat().st_size for f in (tmp_path / "saved").glob("*.distcp"))
    on_ranks(_pair, 2, path=str(tmp_path / "pair"))
    assert size < 1.2 * sum(f.stat().st_size for f in (tmp_path / "pair").glob("*.distcp"))


def _pair(context: RankContext, *, path: str) -> None:
    model = made("original", [0, 1])
    assert model is not None
    checkpoint.save(path, model, marked(model))
