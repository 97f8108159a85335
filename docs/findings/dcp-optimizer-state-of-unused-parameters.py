"""torch.distributed.checkpoint: an optimizer state with unused parameters is not taken back.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. No wrapper and a single process are enough.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


def pair():
    torch.manual_seed(0)
    module = Half()
    return module, torch.optim.AdamW(module.parameters())


def keys(module, optimizer):
    return [name for name, p in module.named_parameters() if p in optimizer.state]


def main():
    module, optimizer = pair()
    module(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    expected = keys(module, optimizer)
    wrong = False
    for strict in (True, False):
        for full in (False, True):
            saving = StateDictOptions(full_state_dict=full)
            loading = StateDictOptions(full_state_dict=full, strict=strict)
            state = get_optimizer_state_dict(module, optimizer, options=saving)
            fresh, fresh_optimizer = pair()
            try:
                set_optimizer_state_dict(fresh, fresh_optimizer, state, options=loading)
                actual = keys(fresh, fresh_optimizer)
            except RuntimeError as error:
                actual = f"RuntimeError: {error}"
            print(f"strict={strict}, full_state_dict={full}: state of {expected} saved")
            print(f"    expected back {expected}\n    actual        {actual}")
            wrong |= actual != expected
    fresh, fresh_optimizer = pair()
    fresh_optimizer.load_state_dict(optimizer.state_dict())
    print(f"plain optimizer.load_state_dict: {keys(fresh, fresh_optimizer)}")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=0, world_size=1
        )
        deviates = main()
        dist.destroy_process_group()
    sys.exit("deviation: see the lines that differ" if deviates else 0)
