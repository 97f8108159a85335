"""FullyShardedDataParallel: after no_sync, zero_grad() leaves reduced gradients that come back.

Stand-alone: needs torch only. Prints expected and actual gradient norms; exit status 1 if the
deviation shows.
"""

import copy
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

WORLD = 2


def backward(model, scale):
    model(scale * torch.ones(2, 4)).square().sum().backward()


def main(rank, store, use_orig_params):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    bare = nn.Linear(4, 4)
    wrapped = FullyShardedDataParallel(
        copy.deepcopy(bare), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    backward(wrapped, 3.0)
    with wrapped.no_sync():
        backward(wrapped, 2.0)
    wrapped.zero_grad()
    backward(wrapped, 1.0)
    backward(bare, 1.0)
    expected = nn.utils.get_total_norm([p.grad for p in bare.parameters()]).item()
    actual = wrapped.clip_grad_norm_(1e9).item()
    if rank == 0:
        print(
            f"use_orig_params={use_orig_params}: gradient norm after zero_grad() and one backward:"
            f" expected {expected:.6f}, actual {actual:.6f}",
            flush=True,
        )
    dist.destroy_process_group()
    sys.exit(int(abs(actual - expected) > 1e-4 * expected))


if __name__ == "__main__":
    wrong = False
    for original in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            try:
                mp.start_processes(
                    main, (f"{directory}/store", original), nprocs=WORLD, start_method="fork"
                )
            except mp.ProcessExitedException:
                wrong = True
    sys.exit("deviation: zeroed gradients are part of the next ones" if wrong else 0)
