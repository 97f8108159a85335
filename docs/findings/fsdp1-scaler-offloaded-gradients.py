"""ShardedGradScaler: gradients on the host are unscaled by a factor that has not arrived.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Needs one accelerator; says so and passes without one.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

SCALE = 2.0**10


def busy(device):
    """Enough work that nothing which is asked of the device now is done soon."""
    much = torch.zeros(4096, 4096, device=device)
    for _ in range(20):
        much = much @ much


def stepped(device, gradient):
    """The parameter, on the host as offloading leaves it, after one step of SGD with rate 1."""
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = ShardedGradScaler(device=device.type, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.full((4,), gradient * SCALE)
    busy(device)
    scaler.step(optimizer)
    return param.detach().tolist()


def main():
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        print("no accelerator here: nothing is copied, nothing can be late")
        return 0
    device = torch.device(kind.type, 0)
    backend = dist.get_default_backend_for_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            f"cpu:gloo,{kind.type}:{backend}",
            init_method=f"file://{folder}/s",
            rank=0,
            world_size=1,
        )
        wrong = 0
        for name, gradient, wanted in (
            ("finite", 0.5, [0.5] * 4),
            ("infinite", float("inf"), [1.0] * 4),
        ):
            found = stepped(device, gradient)
            wrong += found != wanted
            print(f"{name} gradient: expected {wanted}, actual {found}")
        dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
