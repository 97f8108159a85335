"""State dicts of sharded models say what the unsharded one's says, and can be loaded again."""

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from wrapping import DIM, WORLD, full_parameters, here, optimizer, shard, step_sharded

from conformance.models.fixtures import MLP
from conformance.testing import (
    FSDPTest,
    _assert_module_states,
    _broadcast_state_dict,
    _zero_model,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    skip_if_lt_x_gpu,
)


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MLP(DIM), nn.Linear(DIM, DIM, bias=False), MLP(DIM)).to(here())


class TestStateDict(FSDPTest):
    @property
    def world_size(self):
        return WORLD

    def trained(self, kind, **options):
        sharded = shard(kind, stack(), MLP, **options)
        step_sharded(sharded, optimizer("sgd", sharded), self.rank, 0)
        return sharded

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("use_orig_params", [True, False])
    @parametrize("reshard", [True, False])
    @parametrize("rank0_only", [True, False])
    def test_full_of_the_wrapper(self, use_orig_params, reshard, rank0_only):
        sharded = self.trained("wrapper", use_orig_params=use_orig_params, reshard=reshard)
        before = full_parameters(sharded)
        config = FullStateDictConfig(rank0_only=rank0_only)
        with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, config):
            state = sharded.state_dict()
        if rank0_only and self.rank != 0:
            self.assertEqual(len(state), 0)
        else:
            self.assertEqual(sorted(state), sorted(stack().state_dict()))
            devices = {tensor.device.type for tensor in state.values()}
            self.assertEqual(devices, {here().type})
        if rank0_only:
            state = _broadcast_state_dict(self.rank, state)
        _zero_model(sharded)
        self.assertEqual(sum(p.abs().sum() for p in full_parameters(sharded).values()), 0.0)
        with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
            sharded.load_state_dict(state)
        self.assertEqual(full_parameters(sharded), before)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("use_orig_params", [True, False])
    @parametrize("offload", [True, False])
    def test_sharded_of_the_wrapper(self, use_orig_params, offload):
        sharded = self.trained("wrapper", use_orig_params=use_orig_params)
        before = full_parameters(sharded)
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        with FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT, config):
            state = copy.deepcopy(sharded.state_dict())
            self.assertEqual(sorted(state), sorted(stack().state_dict()))
            _zero_model(sharded)
            sharded.load_state_dict(state)
        self.assertEqual(full_parameters(sharded), before)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("reshard", [True, False])
    def test_of_the_composable(self, reshard):
        sharded = self.trained("composable", reshard=reshard)
        before = full_parameters(sharded)
        state = copy.deepcopy(sharded.state_dict())
        self.assertEqual(sorted(state), sorted(stack().state_dict()))
        for name, tensor in state.items():
            self.assertEqual(tensor.full_tensor(), before[name])
        _zero_model(sharded, summon_full=False)
        sharded.load_state_dict(state)
        self.assertEqual(full_parameters(sharded), before)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("kind", ["wrapper", "composable"])
    @parametrize("reshard", [True, False])
    @parametrize("broadcast", [True, False])
    def test_full_through_the_checkpoint_package(self, kind, reshard, broadcast):
        sharded = self.trained(kind, reshard=reshard)
        before = full_parameters(sharded)
        options = StateDictOptions(full_state_dict=True)
        state = copy.deepcopy(get_model_state_dict(sharded, options=options))
        self.assertEqual(dict(state), before)
        if broadcast and self.rank != 0:
            state = {}
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.zero_()
        loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(sharded, state, options=loading)
        self.assertEqual(full_parameters(sharded), before)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("use_orig_params", [True, False])
    def test_ranks_that_begin_differently_are_made_equal(self, use_orig_params):
        torch.manual_seed(self.rank)
        model = nn.Sequential(MLP(DIM), nn.Linear(DIM, DIM)).to(here())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        with self.assertRaises(AssertionError):
            _assert_module_states(model, self.process_group, self.assertEqual)
        model.load_state_dict(_broadcast_state_dict(self.rank, model.state_dict()))
        sharded = shard("wrapper", model, MLP, use_orig_params=use_orig_params)
        with FSDP.summon_full_params(sharded):
            _assert_module_states(sharded, self.process_group, self.assertEqual)


instantiate_parametrized_tests(TestStateDict)

if __name__ == "__main__":
    run_tests()
