"""FullyShardedDataParallel with NO_SHARD: a full state dict ignores offload_to_cpu.

Stand-alone: needs torch and one accelerator. Prints expected and actual devices; exit status 1 if
the deviation shows.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)


def devices(strategy, *, use_orig_params):
    device = torch.accelerator.current_accelerator()
    wrapped = FullyShardedDataParallel(
        nn.Linear(4, 6).to(device), sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    options = FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, options):
        return {key: value.device.type for key, value in wrapped.state_dict().items()}


def main():
    warnings.simplefilter("ignore")
    if not torch.accelerator.is_available():
        sys.exit("this script needs an accelerator")
    wrong = False
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            init_method=f"file://{os.path.join(directory, 'store')}", rank=0, world_size=1
        )
        for use_orig_params in (False, True):
            found = devices(ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params)
            wrong = wrong or set(found.values()) != {"cpu"}
            print(f"NO_SHARD, use_orig_params={use_orig_params}: expected cpu, actual {found}")
        dist.destroy_process_group()
    sys.exit("deviation: the full state is not on the CPU" if wrong else 0)


if __name__ == "__main__":
    main()
