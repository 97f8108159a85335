"""The scripts of `test_wrapper_scripts`: the first part of each, and what follows it.

They see `keep(what, value)`, by which they leave what is compared. Offloading and
`sync_module_states` have scripts of their own: PyTorch refuses both on the CPU.
"""

from __future__ import annotations

IMPORTS = """
import contextlib
import functools
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from {package} import (
    BackwardPrefetch, CPUOffload, FullStateDictConfig, FullyShardedDataParallel as FSDP,
    MixedPrecision, ShardingStrategy, StateDictType,
)
from {package}.wrap import (
    CustomPolicy, ModuleWrapPolicy, always_wrap_policy, enable_wrap, lambda_auto_wrap_policy,
    size_based_auto_wrap_policy, transformer_auto_wrap_policy, wrap,
)

CPU = torch.device("cpu")
RANK, WORLD = dist.get_rank(), dist.get_world_size()

class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.up = nn.Linear(dim, 11)
        self.down = nn.Linear(11, dim, bias=False)
        self.register_buffer("shift", torch.full((dim,), 0.25))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) + self.shift

    def reset_parameters(self):
        self.shift.fill_(0.5)

def make(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), Block(), Block(), nn.Linear(8, 3))

def data(step):
    generator = torch.Generator().manual_seed(10 * step + RANK)
    return torch.randn(4, 5, generator=generator)

def train(model, steps=3, optimizer=None, max_norm=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(steps):
        loss = model(data(step)).float().pow(2).mean()
        loss.backward()
        keep("loss", loss.item())
        if max_norm is not None:
            keep("norm", model.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()

def look(model):
    keep("names", [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()])
    keep("buffers", [(name, str(b.dtype)) for name, b in model.named_buffers()])
    keep("state", {{k: (str(v.dtype), v.tolist()) for k, v in model.state_dict().items()}})

def fails(call, fragment):
    try:
        call()
    except Exception as error:
        keep("error", [type(error).__name__, fragment in str(error), fragment])
        return
    keep("error", ["nothing", False, fragment])
"""

BLOCKS = "policy = ModuleWrapPolicy({Block})"

SCRIPTS: dict[str, str] = {
    "defaults": """
model = FSDP(make(), device_id=CPU)
train(model)
look(model)
""",
    "positions": f"""
{BLOCKS}
model = FSDP(
    make(), None, ShardingStrategy.SHARD_GRAD_OP, CPUOffload(offload_params=False), policy,
    BackwardPrefetch.BACKWARD_POST, None, None, None, CPU, False, True, False, True,
)
train(model, max_norm=0.3)
look(model)
""",
    "names": f"""
{BLOCKS}
model = FSDP(
    module=make(), process_group=dist.new_group([0, 1]),
    sharding_strategy=ShardingStrategy.FULL_SHARD, cpu_offload=CPUOffload(),
    auto_wrap_policy=policy, backward_prefetch=None, mixed_precision=MixedPrecision(),
    ignored_modules=None, param_init_fn=None, device_id=CPU, sync_module_states=False,
    forward_prefetch=True, limit_all_gathers=True, use_orig_params=False,
    ignored_states=None, device_mesh=None,
)
train(model)
look(model)
keep("strategy", model.sharding_strategy.name)
""",
    "mesh": f"""
{BLOCKS}
for original in (False, True):
    mesh = init_device_mesh("cpu", (WORLD,))
    model = FSDP(
        make(), device_mesh=mesh, device_id=CPU, auto_wrap_policy=policy, use_orig_params=original
    )
    train(model)
    look(model)
""",
    "hybrid": f"""
{BLOCKS}
mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
model = FSDP(
    make(), device_mesh=mesh, device_id=CPU, auto_wrap_policy=policy,
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
)
train(model, max_norm=0.5)
look(model)
groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
model = FSDP(
    make(), process_group=groups, device_id=CPU, auto_wrap_policy=policy,
    sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, use_orig_params=True,
)
train(model)
look(model)
""",
    "replicas": f"""
{BLOCKS}
model = FSDP(
    make(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=CPU, auto_wrap_policy=policy
)
train(model, max_norm=0.2)
look(model)
alone = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
model = FSDP(make(), process_group=alone, device_id=CPU)
keep("strategy", model.sharding_strategy.name)
model = FSDP(nn.ModuleList([nn.Linear(2, 2)]), device_id=CPU)
keep("names", [name for name, _ in model.named_parameters()])
""",
    "precision": f"""
{BLOCKS}
for precision in (
    MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    ),
    MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16, cast_forward_inputs=True),
    MixedPrecision(reduce_dtype=torch.bfloat16, cast_root_forward_inputs=False),
):
    for original in (False, True):
        model = FSDP(
            make(), mixed_precision=precision, device_id=CPU, auto_wrap_policy=policy,
            use_orig_params=original,
        )
        train(model, 2)
        look(model)
""",
    "batch_norm": """
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
model[0].weight.data.fill_(0.1)
model[2].weight.data.fill_(0.2)
model[0].bias.data.zero_()
model[2].bias.data.zero_()
model = FSDP(
    model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), device_id=CPU,
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
)
train(model)
look(model)
""",
    "ignored": f"""
{BLOCKS}
model = make()
model = FSDP(model, ignored_modules=[model[0], model[1].up], device_id=CPU, auto_wrap_policy=policy)
train(model)
look(model)
model = make()
model = FSDP(model, ignored_states=[model[3].weight, model[2].down.weight], device_id=CPU,
             auto_wrap_policy=policy, use_orig_params=True)
train(model)
look(model)
model = make()
model = FSDP(model, ignored_states=[model[3]], device_id=CPU)
train(model)
look(model)
""",
    "meta": f"""
{BLOCKS}
calls = []
def init(module):
    calls.append(type(module).__name__)
    if any(p.is_meta for p in module.parameters(recurse=False)) or any(
        b.is_meta for b in module.buffers(recurse=False)
    ):
        module.to_empty(device=CPU, recurse=False)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            with torch.no_grad():
                tensor.fill_(0.1)
for options in ({{"param_init_fn": init}}, {{}}):
    for original in (False, True):
        with torch.device("meta"):
            model = make()
        torch.manual_seed(5)
        model = FSDP(
            model, device_id=CPU, auto_wrap_policy=policy, use_orig_params=original, **options
        )
        train(model)
        look(model)
keep("calls", calls)
""",
    "groups": f"""
{BLOCKS}
model = FSDP(make(), device_id=CPU, auto_wrap_policy=policy, use_orig_params=True)
decay = [p for name, p in model.named_parameters() if name.endswith("weight")]
rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
optimizer = torch.optim.SGD(
    [{{"params": decay, "weight_decay": 0.3}}, {{"params": rest, "lr": 0.01}}], lr=0.1, momentum=0.9
)
for step in range(3):
    model(data(step)).pow(2).mean().backward()
    keep("gradients", [None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
look(model)
""",
    "accumulation": f"""
{BLOCKS}
for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
    model = FSDP(make(), sharding_strategy=strategy, device_id=CPU, auto_wrap_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        with contextlib.ExitStack() as stack:
            if step % 3 < 2:
                stack.enter_context(model.no_sync())
            loss = model(data(step)).pow(2).mean()
            loss.backward()
        keep("loss", loss.item())
        if step % 3 == 2:
            keep("norm", model.clip_grad_norm_(0.1, norm_type=1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        keep("eval", model(data(9)).tolist())
    look(model)
""",
    "whole": f"""
{BLOCKS}
for original in (False, True):
    model = FSDP(make(), device_id=CPU, auto_wrap_policy=policy, use_orig_params=original)
    train(model, 1)
    with FSDP.summon_full_params(model):
        look_inside = [(name, p.tolist()) for name, p in model.named_parameters(prefix="x")]
        keep("whole", look_inside)
        keep("buffers", [name for name, _ in model.named_buffers()])
        with torch.no_grad():
            model[3].weight.mul_(2.0)
    with FSDP.summon_full_params(model, writeback=False, recurse=False):
        model[0].weight.data.zero_()
    with FSDP.summon_full_params(model[1], rank0_only=True, writeback=False):
        keep("first", [p.tolist() for p in model[1].parameters()] if RANK == 0 else [])
    model.apply(lambda m: m.bias.data.fill_(0.5) if getattr(m, "bias", None) is not None else None)
    keep("units", [type(unit.module).__name__ for unit in FSDP.fsdp_modules(model)])
    keep("roots", len(FSDP.fsdp_modules(model, root_only=True)))
    keep("root", [model.check_is_root(), model[1].check_is_root()])
    keep("through", [model[0].in_features, len(model.module), type(model[2]).__name__])
    train(model, 2)
    look(model)
""",
    "states": f"""
{BLOCKS}
model = FSDP(make(), device_id=CPU, auto_wrap_policy=policy)
train(model, 2)
config = FullStateDictConfig(rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    state = model.state_dict()
    keep("keys", list(state) if RANK == 0 else len(state))
state = model.state_dict()
other = FSDP(make(seed=9), device_id=CPU, auto_wrap_policy=policy, use_orig_params=True)
keep("loaded", str(other.load_state_dict(state)))
look(other)
plain = make(seed=11)
keep("loaded", str(plain.load_state_dict(state)))
keep("same", torch.equal(plain[0].weight, state["0.weight"]))
del state["1.up.bias"]
state["extra"] = torch.ones(1)
keep("loaded", str(other.load_state_dict(state, strict=False)))
""",
    "policies": """
for policy in (
    always_wrap_policy,
    functools.partial(size_based_auto_wrap_policy, min_num_params=150),
    functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)),
    CustomPolicy(lambda m: {"backward_prefetch": None} if isinstance(m, Block) else False),
):
    model = FSDP(make(), device_id=CPU, auto_wrap_policy=policy)
    keep("modules", [name for name, _ in model.named_modules()])
    train(model, 1)
with enable_wrap(wrapper_cls=FSDP, device_id=CPU):
    model = make()
    model[1] = wrap(model[1])
    model[2].up = wrap(model[2].up, use_orig_params=False)
    model = wrap(model)
keep("modules", [name for name, _ in model.named_modules()])
train(model)
look(model)
keep("unwrapped", type(wrap(nn.Linear(1, 1))).__name__)
""",
    "frozen": f"""
{BLOCKS}
model = make()
for parameter in model[1].parameters():
    parameter.requires_grad = False
model = FSDP(model, device_id=CPU, auto_wrap_policy=policy)
train(model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
look(model)
model = make()
model[1].up.weight.requires_grad = False
model = FSDP(model, device_id=CPU, auto_wrap_policy=policy, use_orig_params=True)
train(model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
look(model)
""",
    "checkpoints": f"""
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper,
)
for impl in CheckpointImpl:
    for outside in (False, True):
        model = make()
        for index in (1, 2):
            if outside:
                unit = FSDP(model[index], device_id=CPU)
                model[index] = checkpoint_wrapper(unit, checkpoint_impl=impl)
            else:
                unit = checkpoint_wrapper(model[index], checkpoint_impl=impl)
                model[index] = FSDP(unit, device_id=CPU)
        model = FSDP(model, device_id=CPU)
        train(model, 2)
        look(model)
        with FSDP.summon_full_params(model):
            keep("inside", [name for name, _ in model.named_parameters()])
{BLOCKS}
model = FSDP(make(), device_id=CPU, auto_wrap_policy=policy, use_orig_params=True)
apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
train(model)
look(model)
""",
    "errors": f"""
{BLOCKS}
def build(**options):
    return lambda: FSDP(make(), device_id=CPU, **options)

world = dist.group.WORLD
mesh = init_device_mesh("cpu", (WORLD,))
hybrid = ShardingStrategy.HYBRID_SHARD
fails(build(process_group=world, device_mesh=mesh), "Cannot pass both process_group and")
fails(build(sharding_strategy=hybrid), "requires explicit specification of process group or")
fails(
    build(sharding_strategy=hybrid, process_group=world),
    "Expected process_group to be passed in as either None or",
)
fails(build(sharding_strategy=hybrid, device_mesh=mesh), "ndim=2")
fails(
    build(ignored_modules=[nn.Parameter(torch.ones(1))]),
    "ignored_modules expects nn.Module list elements",
)
fails(build(ignored_modules=3), "not iterable")
fails(build(ignored_modules=[nn.Linear(1, 1)], ignored_states=[nn.Linear(1, 1)]), "ignored")
fails(
    build(ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))]),
    "ignored_states expects all nn.Parameter or all nn.Module list elements but got types",
)
fails(build(auto_wrap_policy=CustomPolicy(lambda m: 3)), "should return False/True or a kwarg dict")

class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

fails(lambda: FSDP(Scalar(), device_id=CPU), "FSDP doesn't support scalar parameters")
mixed = make()
mixed[0].weight.requires_grad = False
fails(lambda: FSDP(mixed, device_id=CPU), "requires_grad")
double = make()
double[1].double()
fails(lambda: FSDP(double, device_id=CPU), "Must flatten tensors with uniform dtype")
with torch.device("meta"):
    unmade = make()
fails(lambda: FSDP(unmade, device_id=CPU, param_init_fn=3), "to be callable")
wrapped = FSDP(make(), device_id=CPU, auto_wrap_policy=policy)
fails(
    lambda: FSDP(wrapped, device_id=CPU, auto_wrap_policy=policy),
    "FSDP auto wrapping requires modules to not already have FSDP applied but found",
)
wrapped(data(0)).sum().backward()
def use(context):
    with context:
        pass
fails(lambda: use(wrapped[1].no_sync()), "on inner FSDP instances is not supported")
fails(lambda: wrapped[1].clip_grad_norm_(1.0), "should only be called on the root FSDP instance")
summon = functools.partial(FSDP.summon_full_params, wrapped)
fails(
    lambda: use(summon(rank0_only=True)),
    "writeback=True and rank0_only=True is not supported yet",
)
def nested():
    with summon():
        use(summon())
fails(nested, "when already unsharding parameters")
def inside():
    with FSDP.summon_full_params(wrapped):
        wrapped.apply(lambda m: None)
fails(inside, "expected to be in states")
fails(
    lambda: FSDP.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, 3),
    "Expected state_dict_config of type",
)
def twice():
    with enable_wrap(wrapper_cls=FSDP):
        use(enable_wrap(wrapper_cls=FSDP))
fails(twice, "")
""",
}

DEVICE = """
policy = ModuleWrapPolicy({Block})
device = torch.accelerator.current_accelerator(check_available=True) or CPU
if device != CPU:
    device = torch.device(device.type, torch.accelerator.current_device_index())
"""

DEVICE_SCRIPTS: dict[str, str] = {
    "offload": f"""
{DEVICE}
for original in (False, True):
    model = FSDP(
        make(), device_id=device, auto_wrap_policy=policy, use_orig_params=original,
        cpu_offload=CPUOffload(offload_params=True),
    )
    train(model, max_norm=0.3)
    loss = model(data(3).to(device)).pow(2).mean()
    assert loss.device == device
    loss.backward()
    for p in model.parameters():
        assert p.device == CPU and (p.grad is None or p.grad.device == CPU)
    look(model)
""",
    "sync": f"""
{DEVICE}
first = make(seed=0).state_dict()
for original in (False, True):
    model = make(seed=RANK)
    model[1].shift.add_(RANK)
    model = FSDP(
        model, device_id=device, auto_wrap_policy=policy, use_orig_params=original,
        sync_module_states=True,
    )
    state = model.state_dict()
    assert all(torch.equal(state[name].cpu(), value) for name, value in first.items())
    train(model)
    look(model)
""",
}
"""Only on accelerators torch takes these; there they show that the argument has an effect."""
