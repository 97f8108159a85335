"""Parity tests of torch's data-parallel wrappers, right and wrong ones; run by `test_parity`."""

from __future__ import annotations

from typing import Any

import torch

from conformance.adapter import Wrapped
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.models import case
from conformance.testing import FSDPTest, Parity, assert_parity


class Summing(DataParallelAdapter):
    """Gradients are the sum over ranks."""

    def optimizer_step(self, w: Wrapped) -> None:
        for parameter in w.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)
        super().optimizer_step(w)


class Parities(FSDPTest):
    __test__ = False

    world_size = 2
    device_type = "cpu"

    def ddp(self) -> None:
        assert_parity("torch.DistributedDataParallel", case("transformer"))

    def ddp_with_accumulation_and_clipping(self) -> None:
        how = Parity(accumulation=2, max_norm=0.1)
        assert_parity("torch.DistributedDataParallel", case("mlp"), parity=how)

    def ddp_in_low_precision(self) -> None:
        adapter = DataParallelAdapter()
        plain = adapter.forward

        def forward(w: Wrapped, batch: Any, loss_fn: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return plain(w, batch, loss_fn)

        adapter.forward = forward  # type: ignore[method-assign]
        assert_parity(adapter, case("mlp"), parity=Parity(compute_dtype=torch.bfloat16))

    def low_precision_is_not_full_precision(self) -> None:
        how = Parity(compute_dtype=torch.bfloat16)
        with self.assertRaisesOnAllRanks(AssertionError, "parameter"):
            assert_parity(Summing(), case("mlp"), parity=how)

    def wrong_parameters(self) -> None:
        assert_parity(Summing(), case("mlp"))
