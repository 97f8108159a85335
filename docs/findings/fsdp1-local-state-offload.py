"""FullyShardedDataParallel: no local state with offload_to_cpu=True from an accelerator.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on two accelerators if there are as many, else on CPU over gloo, where it passes.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalStateDictConfig,
    StateDictType,
)

WORLD = 2


def device_of(rank):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= WORLD:
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")


def saved(module, *, offload):
    """What the local state holds, and whether there is one."""
    config = LocalStateDictConfig(offload_to_cpu=offload)
    try:
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.LOCAL_STATE_DICT, config
        ):
            state = module.state_dict()
    except ValueError as error:
        return f"ValueError: {error}", False
    places = [shard.tensor.device.type for v in state.values() for shard in v.local_shards()]
    return f"shards on {places}", True


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = device_of(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    module = FullyShardedDataParallel(nn.Linear(4, 4), device_id=device)
    right = True
    for offload, expected in ((False, device.type), (True, "cpu")):
        actual, there = saved(module, offload=offload)
        right &= there
        print(
            f"torch {torch.__version__}, {backend}, rank {rank}, offload_to_cpu={offload}:"
            f" expected shards on {[expected]}, actual {actual}"
        )
    dist.destroy_process_group()
    sys.exit(int(not right))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the local state cannot be taken to CPU")
