"""What happens once, before the first forward of a tree: units are found, named and agreed upon."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fsdp.engine.agreement import Topic, agree, without_names
from fsdp.engine.optimizer_guard import tell_of_steps
from fsdp.engine.param import FSDPParam
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import FSDPStateContext, Wording
from fsdp.engine.torch_private import without_transforms
from fsdp.engine.unit import FSDPState, state_of


def lazy_init(root: FSDPState, check: Callable[[], None] | None = None) -> None:
    """Make ``root`` the root of the units below it; the first forward does so. Idempotent.

    *Collective*: one exchange over the groups of the mesh, on which all ranks raise the same
    error if their models differ or one of them cannot start: what ``check`` raises on one rank
    is raised on all.

    Raises:
        RuntimeError: several modules as root, or a unit below that ran before.
        ValueError: a parameter in two groups, or ranks with different models.
    """
    if root.is_root is None:
        with without_transforms():
            _become_root(root, check)


def _become_root(root: FSDPState, check: Callable[[], None] | None) -> None:
    if len(root.modules) > 1:
        raise RuntimeError(f"FSDP requires a single root module but got {root.modules}")
    states = _find_states(root)
    problem: Exception | None = None
    try:
        if check is not None:
            check()
        _adopt(root, states)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        problem = error
    try:
        topic = Topic(compared=str if root.wording.names_agree else without_names)
        beside = (group for state in states for group in state.model_groups)
        groups = list(dict.fromkeys((*root.mesh_info.groups, *beside)))
        agree(_description(states), problem, groups, root.device, topic)
    except BaseException:
        _disown(states)
        raise
    for state in states:
        state.is_root = state is root
    tell_of_steps(root.context)


def _find_states(root: FSDPState) -> list[FSDPState]:
    states: dict[FSDPState, None] = {}  # a set that is in order
    for name, module in root.modules[0].named_modules():
        state = state_of(module)
        if state is None or state in states:
            continue
        if state.is_root is not None:
            raise RuntimeError(
                "FSDP state has already been lazily initialized for "
                f"{root.wording.clean(name)}\n"
                "FSDP requires running forward through the root module first"
            )
        states[state] = None
    return list(states)


def _adopt(root: FSDPState, states: list[FSDPState]) -> None:
    if root.auto_reshard_after_forward:
        # Backward starts with the root: what it would gather again is there already.
        for group in root.groups:
            group.post_forward_mesh_info = None
    root.context.all_states = states
    comm = root.comm()
    for state in states:
        state.context = root.context
        state.share_comm(comm)
        for index, group in enumerate(state.groups):
            group.index_in_state = index
            group.groups_in_state = len(state.groups)
            comm.max_input_buffers = max(comm.max_input_buffers, group.settings.max_input_buffers)
    _name(root, states)
    _check_not_shared(states, root.wording)
    for group in _groups(states):
        group.lazy_init()


def _disown(states: list[FSDPState]) -> None:
    """Undo ``_adopt``, so that the caller can repair the model and run again."""
    for state in states:
        state.context = FSDPStateContext()
        for group in state.groups:
            group.module_fqn = ""


def _groups(states: list[FSDPState]) -> Iterator[FSDPParamGroup]:
    for state in states:
        yield from state.groups


def _name(root: FSDPState, states: list[FSDPState]) -> None:
    owned: dict[nn.Module, list[FSDPParam]] = {}
    by_module: dict[nn.Module, list[FSDPParamGroup]] = {}
    for group in _groups(states):
        group.module_fqn = ""
        for param in group.fsdp_params:
            owned.setdefault(param.info.module, []).append(param)
        for module in group.modules:
            by_module.setdefault(module, []).append(group)
    clean = root.wording.clean
    for path, module in root.modules[0].named_modules():
        prefix = clean(path)
        for group in by_module.get(module, ()):
            group.module_fqn = ", ".join(filter(None, (group.module_fqn, prefix)))
        for param in owned.get(module, ()):
            name = param.info.param_name
            param.fqn = clean(f"{path}.{name}" if path else name)


def _check_not_shared(states: list[FSDPState], wording: Wording) -> None:
    seen: set[int] = set()
    for group in _groups(states):
        for param in group.fsdp_params:
            if param.uid in seen:
                raise ValueError(
                    f"Parameter '{param.fqn}' is shared with a parameter already managed by "
                    f"another FSDP group. {wording.sharing}"
                )
            seen.add(param.uid)


def _description(states: list[FSDPState]) -> Iterator[str]:
    """Yield one line per parameter: what ranks must agree on before their first collective."""
    for number, group in enumerate(_groups(states)):
        found = group.options.exposure.requires_grad(group.fsdp_params)
        for param, trains in zip(group.fsdp_params, found, strict=True):
            dtype = str(param.dtype).removeprefix("torch.")
            grad = "trainable" if trains else "frozen"
            yield (
                f"'{param.fqn}' {tuple(param.shape)} {dtype} {grad} "
                f"in group {number} '{group.module_fqn}'{_choices(param, group)}"
            )


def _choices(param: FSDPParam, group: FSDPParamGroup) -> str:
    """Return what else decides on collectives and their sizes, as far as it was chosen."""
    chosen = [f"cut on dim {param.dim}"] if param.dim else []
    if param.compute_dtype is not param.dtype:
        chosen.append(f"computed in {param.compute_dtype}")
    if param.reduce_dtype is not None:
        chosen.append(f"reduced in {param.reduce_dtype}")
    after = group.post_forward_mesh_info
    if after is not group.mesh_info:
        chosen.append("kept after forward" + (f" by {after.shard_size} ranks" if after else ""))
    return "".join(f", {each}".replace("torch.", "") for each in chosen)
