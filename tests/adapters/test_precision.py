"""Low dtypes reach the wrappers as they are named, are declared as they are kept, and are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conformance.adapter import BuildConfig
from conformance.adapters import adapter_class, make_adapter, precision
from conformance.case import Case
from conformance.checks import CHECKS
from conformance.models import case
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Verdict

MIXED = "param_dtype=bfloat16,reduce_dtype=float32"
BOTH = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
OURS = ("fsdp_composable", "fsdp_wrapper")


@pytest.mark.parametrize("module", ["fsdp_composable", "torch_fsdp2"])
def test_fully_shard_casts_the_results_of_the_root_alone(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"conformance.adapters.{module}:PrecisionAdapter"
    adapter, options = make_adapter(name, f"{MIXED},output_dtype=float32")
    own: Any = adapter_class(name)
    policies: list[Any] = []
    take = staticmethod(lambda module, **arguments: policies.append(arguments["mp_policy"]))
    monkeypatch.setattr(own, "shard", take)
    monkeypatch.setattr("conformance.adapters.composable._mesh", lambda *config: Line())
    mlp = case("mlp")
    config = BuildConfig(device=torch.device("cpu"), world_size=2, options=options, units=mlp.units)
    adapter.build(mlp.build(), lambda params: torch.optim.SGD(params, lr=0.1), config)
    inner = own.precision(**BOTH)
    assert policies == [inner, inner, own.precision(**BOTH, output_dtype=torch.float32)]


class Line:
    """A mesh of two ranks in a row."""

    ndim = 1

    def size(self, dim: int) -> int:
        return 2


@pytest.mark.parametrize(
    ("module", "variant", "waits"),
    [
        ("fsdp_composable", MIXED, "float32"),
        ("torch_fsdp2", MIXED, "float32"),
        ("fsdp_wrapper", MIXED, "bfloat16"),
        ("torch_fsdp1", MIXED, "bfloat16"),
        ("fsdp_wrapper", "param_dtype=bfloat16", "bfloat16"),
    ],
)
def test_what_is_declared_is_what_the_faces_do(module: str, variant: str, waits: str) -> None:
    adapter, _ = make_adapter(f"conformance.adapters.{module}:PrecisionAdapter", variant)
    declared = adapter.conventions
    assert (declared.computes_as, declared.accumulates_as) == ("bfloat16", waits)
    assert declared.reduced_as == ("float32" if variant == MIXED else "bfloat16")


def test_buffers_are_cast_beforehand_unless_the_wrapper_does_so() -> None:
    for dtypes, expected in (
        ({"param_dtype": "bfloat16"}, torch.bfloat16),
        ({"param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}, torch.float32),
        ({"reduce_dtype": "bfloat16"}, torch.float32),
    ):
        model = nn.BatchNorm1d(2)
        precision.lower_buffers(model, dtypes)
        assert model.running_mean is not None
        assert model.num_batches_tracked is not None
        assert model.running_mean.dtype == expected
        assert model.num_batches_tracked.dtype == torch.long


@pytest.mark.parametrize("module", OURS)
def test_a_right_wrapper_in_low_precision_raises_no_alarm(
    module: str, tmp_path: Path, forkserver: None
) -> None:
    subject = Subject(adapter=f"conformance.adapters.{module}:PrecisionAdapter", variant=MIXED)
    with Session(Setting(directory=tmp_path, timeout=300.0)) as session:
        what = Case.parse("mlp/train/accumulation=3,optimizer=adamw")
        found = session.judge_case(subject, what, list(CHECKS.values()))
    assert {f.check: f.sentence for f in found if f.verdict is not Verdict.PASS} == {}
    assert len(found) > 15
