"""FullyShardedDataParallel(CPUOffload): states loaded before the first forward are lost.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Needs an accelerator per rank; says so and passes without.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2
FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
CASES = [
    ("FULL_SHARD, full state", "FULL_SHARD", False, FULL),
    ("FULL_SHARD, local state", "FULL_SHARD", False, LOCAL),
    ("NO_SHARD, full state", "NO_SHARD", False, FULL),
    ("NO_SHARD with original parameters, full state", "NO_SHARD", True, FULL),
]


def wrapped(device, value, strategy, *, original):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[0].weight, value)
    return FullyShardedDataParallel(
        model,
        device_id=device,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        cpu_offload=CPUOffload(offload_params=True),
    )


def loaded(device, kind, *build, original):
    """What a unit of threes, given a state of fives, computes from four ones in two forwards."""
    source = wrapped(device, 5.0, *build, original=original)
    target = wrapped(device, 3.0, *build, original=original)
    with FullyShardedDataParallel.state_dict_type(source, kind):
        state = source.state_dict()
    with FullyShardedDataParallel.state_dict_type(target, kind):
        target.load_state_dict(state)
    ones = torch.ones(1, 4, device=device)
    with torch.no_grad():
        return [target(ones)[0, 0].item() for _ in range(2)]


def main(rank, store):
    warnings.simplefilter("ignore")
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < WORLD:
        print(f"rank {rank}: fewer than {WORLD} accelerators: there is nothing to offload from")
        return
    torch.accelerator.set_device_index(rank)
    device = torch.device(torch.accelerator.current_accelerator().type, rank)
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrong = 0
    for name, strategy, original, state in CASES:
        found = loaded(device, state, strategy, original=original)
        wrong += found != [20.0, 20.0]
        print(
            f"torch {torch.__version__}, rank {rank}, {name}: expected [20.0, 20.0],"
            f" actual {found}",
            flush=True,
        )
    dist.destroy_process_group()
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: what was loaded is gone after the first forward")
