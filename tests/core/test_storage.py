"""What loses its storage before a model is wrapped, and what has it afterwards."""

from __future__ import annotations

import pytest
import torch

from conformance.adapters import make_adapter
from conformance.adapters.composable import ComposableAdapter
from conformance.models import case
from conformance.scenarios.run import give_up_storage, unsaved_buffers

MODELS = ("transformer", "batchnorm", "frozen", "tiny")


@pytest.mark.parametrize("name", MODELS)
def test_what_a_state_holds_goes_to_meta_and_ties_stay(name: str) -> None:
    model, whole = case(name).build(), case(name).build()
    give_up_storage(model)
    assert all(value.is_meta for value in model.state_dict().values())
    assert list(model.state_dict()) == list(whole.state_dict())
    ours, theirs = dict(model.named_parameters()), dict(whole.named_parameters())
    assert list(ours) == list(theirs)  # a tied parameter once
    for fqn, parameter in ours.items():
        assert parameter.requires_grad == theirs[fqn].requires_grad
        assert parameter.shape == theirs[fqn].shape
    kept = dict(model.named_buffers())
    for fqn in unsaved_buffers(whole):
        assert torch.equal(kept[fqn], whole.get_buffer(fqn))


def test_only_buffers_that_are_in_no_state_are_unsaved() -> None:
    assert unsaved_buffers(case("batchnorm").build()) == {"input_scale"}
    assert unsaved_buffers(case("transformer").build()) == set()


@pytest.mark.parametrize("name", MODELS)
def test_storage_is_poisoned_and_leaves_ties_and_unsaved_buffers(name: str) -> None:
    model, whole = case(name).build(), case(name).build()
    adapter, _ = make_adapter("fsdp.fully_shard")
    assert isinstance(adapter, ComposableAdapter)
    give_up_storage(model)
    adapter.give_storage(model, torch.device("cpu"))
    assert list(dict(model.named_parameters())) == list(dict(whole.named_parameters()))
    for value in model.state_dict().values():
        assert not value.is_meta
        assert bool(value.isnan().all()) or not value.is_floating_point()
    for fqn in unsaved_buffers(whole):
        assert torch.equal(model.get_buffer(fqn), whole.get_buffer(fqn))
