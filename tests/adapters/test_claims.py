"""What the adapters claim, variant by variant. No ranks."""

from __future__ import annotations

import difflib

import pytest

from conformance.adapter import Adapter
from conformance.adapters import BUILT_IN, adapter_class, make_adapter
from conformance.names import CAPABILITIES

TORCH = sorted(name for name in BUILT_IN if name.startswith("torch."))
VARIANTS = [(name, variant) for name in TORCH for variant in adapter_class(name).variants]
CLIPS = {"clip.p1", "clip.p2", "clip.pinf", "clip.gradients"}
ALWAYS = CLIPS | {"gradients", "model_state.full", "optim_state.full"}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_claims_are_known_capabilities(name: str, variant: str) -> None:
    adapter, _ = make_adapter(name, variant)
    unknown = adapter.capabilities - set(CAPABILITIES)
    assert not unknown, [difflib.get_close_matches(u, CAPABILITIES) for u in unknown]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_what_every_wrapper_documents_is_claimed_in_every_variant(name: str, variant: str) -> None:
    assert make_adapter(name, variant)[0].capabilities >= ALWAYS | {"unused_parameters"}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_one_kind_of_state_is_claimed_for_model_and_optimizer_alike(
    name: str, variant: str
) -> None:
    claims = make_adapter(name, variant)[0].capabilities
    kinds = {c.partition(".")[2] for c in claims if c.startswith("model_state.")}
    assert kinds == {c.partition(".")[2] for c in claims if c.startswith("optim_state.")}


def test_what_is_sharded_is_what_the_strategy_says() -> None:
    def sharded(name: str, variant: str) -> set[str]:
        claims = make_adapter(name, variant)[0].capabilities
        return {c for c in claims if c.startswith(("shard.", "memory."))}

    everything = {"shard.parameters", "shard.optimizer", "memory.reshard"}
    assert sharded("torch.DistributedDataParallel", "default") == set()
    assert sharded("torch.ZeroRedundancyOptimizer", "default") == {"shard.optimizer"}
    assert sharded("torch.fully_shard", "default") == everything
    assert sharded("torch.fully_shard", "reshard_after_forward=False") < everything
    assert sharded("torch.FullyShardedDataParallel", "default") == everything
    assert sharded("torch.FullyShardedDataParallel", "use_orig_params,NO_SHARD") == set()


def test_a_variant_leaves_the_claims_of_the_class_alone() -> None:
    before = {name: adapter_class(name).capabilities for name in TORCH}
    for name, variant in VARIANTS:
        make_adapter(name, variant)
    assert before == {name: adapter_class(name).capabilities for name in TORCH}


def test_the_default_variant_comes_first_and_names_are_unique() -> None:
    for name in TORCH:
        variants = list(adapter_class(name).variants)
        assert variants[0] == "default"
        assert issubclass(adapter_class(name), Adapter)


def test_buffers_follow_the_broadcasts() -> None:
    name = "torch.DistributedDataParallel"
    assert make_adapter(name)[0].conventions.buffers == "rank0"
    assert make_adapter(name, "broadcast_buffers=False")[0].conventions.buffers == "local"
