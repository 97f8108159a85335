"""torch.distributed.checkpoint: no states of a `fully_shard` model that was just evaluated.

Stand-alone: needs torch only. Prints expected and actual; exit status 1 if the deviation shows.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2
FULL = StateDictOptions(full_state_dict=True)


def trained():
    torch.manual_seed(0)
    module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def outcome(work, *, evaluated):
    """What became of `work` on a pair that was evaluated before or not."""
    module, optimizer = trained()
    if evaluated:
        with torch.no_grad():
            module(torch.ones(2, 4))
    try:
        work(module, optimizer)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).split('occurred : ')[-1].split('(')[0][:60]}"
    return "done"


def main(rank, directory):
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    wrong = False
    other, its = trained()
    full = get_model_state_dict(other, options=FULL)
    state = get_optimizer_state_dict(other, its)
    for name, work in {
        "set_model_state_dict, full": lambda m, o: set_model_state_dict(
            m, dict(full), options=FULL
        ),
        "get_optimizer_state_dict": get_optimizer_state_dict,
        "set_optimizer_state_dict": lambda m, o: set_optimizer_state_dict(m, o, state),
    }.items():
        for evaluated in (False, True):
            actual = outcome(work, evaluated=evaluated)
            told = f"rank {rank}, {name}, evaluated before: {evaluated}"
            print(f"{told}: expected done, actual {actual}", flush=True)
            wrong |= actual != "done"
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(main, (folder,), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: states of what an evaluation left gathered")
