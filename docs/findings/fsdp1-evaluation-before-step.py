"""FullyShardedDataParallel: a forward between backward and step keeps old weights.

Stand-alone: needs torch only. Prints expected and actual losses; exit status 1 if the deviation
shows.
"""

import copy
import sys
import tempfile
import warnings
from itertools import product

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

WORLD = 2
STEPS = 3
BETWEEN = ("nothing", "an evaluation", "a forward with gradients")


def losses(model, *, between):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    inputs, found = torch.ones(2, 4), []
    for _ in range(STEPS):
        loss = model(inputs).square().sum()
        loss.backward()
        if between != "nothing":
            with torch.set_grad_enabled(between == "a forward with gradients"):
                model(inputs)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(rank, store, use_orig_params):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    bare = nn.Linear(4, 4)
    expected = losses(copy.deepcopy(bare), between=BETWEEN[1])
    wrong = False
    for strategy, between in product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), BETWEEN):
        wrapped = FullyShardedDataParallel(
            copy.deepcopy(bare),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        actual = losses(wrapped, between=between)
        wrong = wrong or not torch.allclose(torch.tensor(actual), torch.tensor(expected))
        if rank == 0:
            settings = f"{strategy}, use_orig_params={use_orig_params}"
            print(f"{settings}, {between} before the step")
            print("  expected", ", ".join(f"{loss:.6f}" for loss in expected))
            print("  actual  ", ", ".join(f"{loss:.6f}" for loss in actual), flush=True)
    dist.destroy_process_group()
    sys.exit(int(wrong))


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
    sys.exit("deviation: the forward after the step uses the old weights" if wrong else 0)
