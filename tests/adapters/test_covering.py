"""The covering array holds every pair of options, and its rows reach the wrapper as they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import nn

from conformance.adapter import BuildConfig, Refusal
from conformance.adapters import adapter_class, composable, composable_pairs, covering, make_adapter
from conformance.adapters.covering import DTYPES, FOUR_RANKS, ROWS, CoveringAdapter
from conformance.adapters.wrapping import HYBRID, STRATEGIES, variants
from conformance.models import case
from conformance.ranks import Job, RankContext, RankPool, RankVerdict
from conformance.testing import assert_parity
from conformance.testing.place import standing
from conformance.work import variants_of

VALUES: tuple[tuple[Any, ...], ...] = (
    (False, True),
    STRATEGIES,
    ("BACKWARD_PRE", "BACKWARD_POST", None),
    (False, True),
    (None, *DTYPES),
)
TORCH = "conformance.adapters.torch_fsdp1:PairsAdapter"


def test_every_two_values_meet_in_a_row() -> None:
    for one, other in combinations(range(len(VALUES)), 2):
        met = {(row[one], row[other]) for row in ROWS}
        assert met == set(product(VALUES[one], VALUES[other]))


def test_every_two_values_of_the_composable_face_meet_in_a_row() -> None:
    # as text: True is equal to 1
    rows = [tuple(map(str, row)) for row in composable_pairs.ROWS]
    values = [("True", "False", "1"), ("True", "False"), ("True", "False")]
    values.append(("None", *DTYPES))
    for one, other in combinations(range(len(values)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(values[one], values[other]))
    assert len(composable_pairs.pairs()) == len(rows) == 9


@pytest.mark.parametrize("module", ["fsdp_composable", "torch_fsdp2"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_row_reaches_fully_shard_in_its_own_types(
    module: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"conformance.adapters.{module}:PairsAdapter"
    variant = "reshard_after_forward=1,cpu_offload,param_dtype=float64"
    adapter, options = make_adapter(name, variant)
    own: Any = adapter_class(name)
    given: dict[str, Any] = {}
    take = staticmethod(lambda module, **arguments: given.update(arguments))
    monkeypatch.setattr(own, "shard", take)
    monkeypatch.setattr(composable, "_mesh", lambda config, replicas: Line())
    config = BuildConfig(device=torch.device(device), world_size=2, options=options)
    adapter.build(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, lr=0.1), config)
    assert isinstance(given["mesh"], Line)
    del given["mesh"]
    assert given == {
        "reshard_after_forward": 1,
        "offload_policy": own.offload(pin_memory=device != "cpu"),
        "mp_policy": own.precision(param_dtype=torch.float64, output_dtype=torch.float32),
    }
    assert adapter.conventions.gathered_as == adapter.conventions.reduced_as == "float64"


class Line:
    """A mesh of two ranks in a row."""

    ndim = 1

    def size(self, dim: int) -> int:
        return 2


def test_there_are_few_rows_and_each_is_another() -> None:
    assert len(ROWS) <= 16
    assert len(covering.covering()) == len(set(ROWS)) == len(ROWS)
    # The common variants have every kind with every strategy and otherwise defaults.
    assert all(row[2:] != ("BACKWARD_PRE", False, None) for row in ROWS)


def test_the_rows_for_four_ranks_hold_every_value() -> None:
    rows = [ROWS[index] for index in FOUR_RANKS]
    assert len(rows) * 3 == len(ROWS)
    for column, values in enumerate(VALUES):
        assert {row[column] for row in rows} == set(values)
    named = covering.at_four_ranks()
    assert len(named) == len(rows)
    assert set(named) <= set(covering.pairs())
    for name in named:
        options = covering.pairs()[name]
        assert options.get("replicas") == (2 if options["sharding_strategy"] in HYBRID else None)


def test_a_pattern_names_all_rows_and_no_other_variant() -> None:
    assert all("prefetch=" in name for name in covering.pairs())
    assert not any("prefetch=" in name for name in variants())


class Recording(CoveringAdapter):
    """Wraps nothing, and keeps what the wrapper was given."""

    strategies: Mapping[str, str] = {name: f"strategy {name}" for name in STRATEGIES}
    prefetches: Mapping[str, str] = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}
    variants = covering.pairs()
    given: Mapping[str, Any]

    @staticmethod
    def policy(classes: set[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
        return tuple(classes)

    @staticmethod
    def offload(**options: bool) -> Any:
        return ("offload", options)

    @staticmethod
    def precision(**options: torch.dtype) -> Any:
        return ("precision", options)

    @staticmethod
    def wrapper(model: nn.Module, **options: Any) -> nn.Module:
        Recording.given = options
        return model


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "use_orig_params,prefetch=BACKWARD_PRE,cpu_offload,param_dtype=float64",
            {
                "use_orig_params": True,
                "sharding_strategy": "strategy FULL_SHARD",
                "backward_prefetch": "pre",
                "cpu_offload": ("offload", {"offload_params": True}),
                "mixed_precision": (
                    "precision",
                    {"param_dtype": torch.float64, "_module_classes_to_ignore": ()},
                ),
            },
        ),
        (
            "use_orig_params,prefetch=None",
            {
                "use_orig_params": True,
                "sharding_strategy": "strategy FULL_SHARD",
                "backward_prefetch": None,
            },
        ),
    ],
)
def test_a_row_reaches_the_wrapper_in_its_own_types(name: str, wanted: dict[str, Any]) -> None:
    adapter = Recording()
    adapter.configure(Recording.variants[name])
    config = BuildConfig(
        device=torch.device("cpu"),
        world_size=2,
        units=(nn.Linear,),
        options=Recording.variants[name],
    )
    adapter.build(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, lr=0.1), config)
    common = {"auto_wrap_policy": (nn.Linear,), "device_id": torch.device("cpu")}
    assert Recording.given == wanted | common


def test_a_norm_whose_statistics_are_short_is_refused_where_it_would_compute_in_float64() -> None:
    plain = {name: kind for name, kind in Recording.variants.items() if "replicas" not in kind}
    refused = set()
    for name, options in plain.items():
        adapter = Recording()
        adapter.configure(options)
        config = BuildConfig(device=torch.device("cpu"), world_size=2, options=options)
        short = options.get("mixed_precision") == "param_dtype"
        with pytest.raises(Refusal, match="statistics in float64") if short else nullcontext():
            adapter.build(nn.BatchNorm1d(2), lambda p: torch.optim.SGD(p, lr=0.1), config)
        refused |= {name} if short else set()
    assert refused


def _parity(context: RankContext, adapter: str, variant: str) -> None:
    with standing(context):
        assert_parity(adapter, case("uneven"), variant=variant)


# PyTorch's wrapper offloads only from an accelerator.
RUNS_ON_CPU = [name for name, options in covering.covering().items() if not options["cpu_offload"]]


FIRST = [
    *RUNS_ON_CPU[:3],
    *(pytest.param(name, marks=pytest.mark.long) for name in RUNS_ON_CPU[3:]),
]


@pytest.mark.parametrize("variant", FIRST)
def test_a_row_trains_like_the_unsharded_oracle(pool: RankPool, variant: str) -> None:
    assert adapter_class(TORCH).variants == covering.pairs()
    job = Job.of(_parity, adapter=TORCH, variant=variant)
    outcome = pool.run(job)
    assert outcome.verdict is RankVerdict.OK, outcome.sentence


@pytest.mark.parametrize(
    "module", ["fsdp_wrapper", "torch_fsdp1", "fsdp_composable", "torch_fsdp2"]
)
def test_every_mesh_of_four_ranks_is_a_variant(module: str) -> None:
    name = f"conformance.adapters.{module}:MeshesAdapter"
    subjects = variants_of(name, ())
    replicas = [make_adapter(name, s.variant)[0].replicas for s in subjects]
    assert replicas == [1, 2, 4] * (len(subjects) // 3)
    assert {s.variant.rpartition("mesh=")[2] for s in subjects} == {"(1,4)", "(2,2)", "(4,1)"}
