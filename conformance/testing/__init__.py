"""A test framework for code that runs on several ranks, on ranks that cannot be fooled.

    from conformance.testing import FSDPTest, run_tests

    class TestMine(FSDPTest):
        world_size = 2

        def test_the_sum_over_ranks(self):
            value = torch.ones(3, device=self.device)
            dist.all_reduce(value)
            self.assertEqual(value, torch.full_like(value, 2.0))

It works with unittest and pytest. Must not run a tensor operator when imported: the server from
which ranks are forked imports it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from conformance.machine import accelerator
from conformance.models.fixtures.modes import DEVICEInitMode, FSDPInitMode
from conformance.testing.compiled import compiled_fsdp_test
from conformance.testing.decorators import skip_if_lt_x_gpu, with_comms
from conformance.testing.dispatch import RanksFailed
from conformance.testing.fsdp_test import FSDPTest, run_tests
from conformance.testing.groups import DummyProcessGroup
from conformance.testing.helpers import (
    _assert_module_states,
    _broadcast_state_dict,
    _zero_model,
    check_sharded_parity,
    get_full_params,
    subtest_name,
)
from conformance.testing.parametrization import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from conformance.testing.parity import Parity, assert_parity
from conformance.testing.patches import (
    patch_all_gather,
    patch_all_reduce,
    patch_reduce_scatter,
    patched,
    reduce_scatter_with_assert,
)

__all__ = [
    "DEVICE_COUNT",
    "DEVICE_TYPE",
    "DISTRIBUTED_BACKEND",
    "DEVICEInitMode",
    "DummyProcessGroup",
    "FSDPInitMode",
    "FSDPTest",
    "Parity",
    "RanksFailed",
    "_assert_module_states",
    "_broadcast_state_dict",
    "_zero_model",
    "assert_parity",
    "check_sharded_parity",
    "compiled_fsdp_test",
    "get_full_params",
    "instantiate_parametrized_tests",
    "parametrize",
    "patch_all_gather",
    "patch_all_reduce",
    "patch_reduce_scatter",
    "patched",
    "reduce_scatter_with_assert",
    "run_tests",
    "skip_if_lt_x_gpu",
    "subtest",
    "subtest_name",
    "with_comms",
]


def __getattr__(name: str) -> Any:
    """The three constants, when they are asked for: the server of the ranks must not ask torch."""
    if name not in ("DEVICE_COUNT", "DEVICE_TYPE", "DISTRIBUTED_BACKEND"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind, count = accelerator()
    if name == "DISTRIBUTED_BACKEND":
        return dist.get_default_backend_for_device(kind)
    return kind if name == "DEVICE_TYPE" else max(1, count)
