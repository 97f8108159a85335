"""FullyShardedDataParallel(use_orig_params=True) on CPU: exp_avg is saved as a copy of exp_avg_sq.

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
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

WORLD = 2


def trained(module, parameters):
    """AdamW after one step on the same data on every rank."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    torch.manual_seed(1)
    module(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return optimizer


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 6)


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    bare = model()
    expected = trained(bare, bare.parameters()).state[bare.bias]
    wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = trained(wrapped, wrapped.parameters())
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT)
    actual = FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)["state"]["bias"]
    wrong = False
    for key in ("exp_avg", "exp_avg_sq"):
        wrong |= not torch.allclose(actual[key], expected[key], rtol=1e-4, atol=1e-7)
        if rank == 0:
            print(f"{key} of bias: expected {expected[key].tolist()}")
            print(f"{key} of bias: actual   {actual[key].tolist()}")
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the saved optimizer state is not the optimizer's")
