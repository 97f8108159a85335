"""FullyShardedDataParallel on CPU: a full state dict with offload_to_cpu reads freed memory.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

WORLD = 2


def main(rank, store, use_orig_params):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    bare = nn.Linear(4, 6)
    expected = {key: value.clone() for key, value in bare.state_dict().items()}
    wrapped = FullyShardedDataParallel(
        bare, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    options = FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, options):
        try:
            state = wrapped.state_dict()
        except RuntimeError as error:
            print(f"rank {rank}: expected sum {expected['weight'].sum():.6f}, actual: {error}")
            sys.exit(1)
    print(
        f"rank {rank}: expected sum {expected['weight'].sum():.6f},"
        f" actual {state['weight'].sum():.6f}"
    )
    sys.exit(int(any(not torch.equal(state[key], expected[key]) for key in expected)))


if __name__ == "__main__":
    wrong = False
    for original in (False, True):
        print(f"use_orig_params={original}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            try:
                mp.start_processes(
                    main, (f"{directory}/store", original), nprocs=WORLD, start_method="fork"
                )
            except mp.ProcessExitedException as error:
                print(error, flush=True)
                wrong = True
    sys.exit("deviation: an error, a killed process or other values" if wrong else 0)
