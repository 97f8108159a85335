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

from conformance.models.fixtures.modes import DEVICEInitMode, FSDPInitMode
from conformance.testing.decorators import skip_if_lt_x_gpu, with_comms
from conformance.testing.dispatch import RanksFailed
from conformance.testing.fsdp_test import FSDPTest, run_tests
from conformance.testing.groups import DummyProcessGroup
from conformance.testing.helpers import (
    _assert_module_states,
    _broadcast_state_dict,
    _zero_model,
    get_full_params,
    subtest_name,
)
from conformance.testing.parametrization import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from conformance.testing.parity import Parity, assert_parity

__all__ = [
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
    "get_full_params",
    "instantiate_parametrized_tests",
    "parametrize",
    "run_tests",
    "skip_if_lt_x_gpu",
    "subtest",
    "subtest_name",
    "with_comms",
]
