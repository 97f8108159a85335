"""What can be copied and pickled: options and states, and the module before it is wrapped."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from conformance.ranks import RankContext
from fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
)
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import Residual, batch, build, loss_of
from tests.fsdp.ranks import error_of, on_ranks

OPTIONS = [
    MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float16),
    CPUOffload(offload_params=True),
    StateDictSettings(state_dict_config=FullStateDictConfig(rank0_only=True)),
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    BackwardPrefetch.BACKWARD_POST,
]
ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


@pytest.mark.parametrize("option", OPTIONS, ids=lambda value: type(value).__name__)
def test_options_are_copied_by_value(option: Any) -> None:
    assert copy.deepcopy(option) == option
    assert pickle.loads(pickle.dumps(option)) == option


def wrapped(*, original: bool) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({Residual})
    return FullyShardedDataParallel(build(), auto_wrap_policy=policy, use_orig_params=original)


def _states(context: RankContext, *, original: bool) -> None:
    """A saved state is whole, and nothing that happens later reaches it."""
    model = wrapped(original=original)
    saved, file = model.state_dict(), io.BytesIO()
    copied = copy.deepcopy(saved)
    torch.save(saved, file)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.step()
    file.seek(0)
    for state in (saved, copied, torch.load(file)):
        assert list(state) == list(build().state_dict())
        assert all(torch.equal(value, build().state_dict()[key]) for key, value in state.items())
    changed = model.state_dict()["inp.weight"]
    assert not torch.equal(changed, saved["inp.weight"])
    assert changed.untyped_storage().nbytes() == changed.nbytes


@ORIGINAL
def test_a_state_can_be_copied_and_saved(*, original: bool) -> None:
    on_ranks(_states, 2, original=original)


def _refuses(context: RankContext, *, original: bool) -> None:
    """A process group cannot be copied, and a copy without it would not be one."""
    model = wrapped(original=original)
    for step in range(2):
        for call in (copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            kind, text = error_of(lambda call=call: call(model))
            assert kind == "TypeError"
            assert "cannot be copied or pickled: it belongs to process groups" in text
        # The refused copies have changed nothing.
        loss_of(model, batch(step, context.rank)).backward()


class Copied(torch.nn.Linear):
    """Copies itself in its own way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        return Copied(3, 3)


def _not_the_inner(context: RankContext) -> list[str]:
    return error_of(lambda: copy.deepcopy(FullyShardedDataParallel(Copied(3, 3))))


def test_the_way_in_which_the_wrapped_module_copies_itself_is_not_taken() -> None:
    assert on_ranks(_not_the_inner, 1)[0][0] == "TypeError"


@ORIGINAL
def test_a_wrapped_module_is_not_copied(*, original: bool) -> None:
    on_ranks(_refuses, 2, original=original)
