"""``state_dict`` and ``load_state_dict`` of the wrapper face, in the full form.

A unit gathers its parameters when the recursion enters it and gives them up when it leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp.full_params import check_idle, whole_params
from fsdp.wrapper_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.wrapper_unit import PREFIX, WrappedUnit, units_of


class States(WrappedUnit):
    """The verbs about state dicts."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole parameters and the buffers under the names of the plain model.

        *Collective* over the shard groups. *Memory*: the result, and the whole parameters of the
        units from this one down to the one being saved.
        """
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        destination = given.get("destination")
        config = self._state_dict_settings.state_dict_config
        assert isinstance(config, FullStateDictConfig)
        check_idle([self._state] if not self._is_open() else [])
        with ExitStack() as stack:
            full = None
            if not self._is_open():
                full = stack.enter_context(whole_params(self._state, writeback=False))
            found: dict[str, Any] = new_destination() if destination is None else destination
            before = set(found)
            self._fsdp_wrapped_module.state_dict(
                destination=found,
                prefix=given.get("prefix", ""),
                keep_vars=given.get("keep_vars", False),
            )
            keys = [key for key in found if key not in before]
            if config.rank0_only and not self._is_first_rank():
                for key in keys:
                    del found[key]
            else:
                detach_unit(found, keys, full, self._buffer_dtypes, config)
            return found

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of ``state_dict`` on all units below ``module``; return what it was.

        Raises:
            NotImplementedError: another form than the full one.
            RuntimeError: a config of another form.
        """
        settings = full_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = States.get_state_dict_type(module)
        for unit in units_of(module):
            unit._state_dict_settings = settings
        return before if before is not None else StateDictSettings()

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of the units below ``module``; None if there are none.

        Raises:
            AssertionError: they differ.
        """
        found = [unit._state_dict_settings for unit in units_of(module)]
        if any(settings != found[0] for settings in found):
            raise AssertionError(f"All FSDP modules must have the same settings, got {found}")
        return found[0] if found else None

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """Set the form of ``state_dict`` for the body; it is restored after an exception too."""
        before = States.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for unit in units_of(module):
                unit._state_dict_settings = before

    def _install_load_hooks(self) -> None:
        self.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    @staticmethod
    def optim_state_dict(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Refuse: optimizer states are not supported yet."""
        not_yet("optim_state_dict")

    @staticmethod
    def optim_state_dict_to_load(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Refuse: optimizer states are not supported yet."""
        not_yet("optim_state_dict_to_load")


def full_settings(
    kind: StateDictType, model: StateDictConfig | None, optim: OptimStateDictConfig | None
) -> StateDictSettings:
    """Return the settings, checked.

    Raises:
        NotImplementedError: another form than the full one.
        RuntimeError: a config of another form.
    """
    if kind is not StateDictType.FULL_STATE_DICT:
        raise NotImplementedError(
            f"state_dict_type={kind} is not supported by this FullyShardedDataParallel yet; use "
            "StateDictType.FULL_STATE_DICT"
        )
    settings = StateDictSettings()
    for name, given, wanted in (
        ("state_dict_config", model, FullStateDictConfig),
        ("optim_state_dict_config", optim, FullOptimStateDictConfig),
    ):
        if given is None:
            continue
        if not isinstance(given, wanted):
            raise RuntimeError(
                f"Expected {name} of type {wanted.__name__} for {kind} but got "
                f"{type(given).__name__}"
            )
        setattr(settings, name, given)
    return settings


def detach_unit(
    found: dict[str, Any],
    keys: Iterable[str],
    full: torch.Tensor | None,
    dtypes: Mapping[torch.Tensor, torch.dtype],
    config: FullStateDictConfig,
) -> None:
    """Make the values that a unit has saved independent of it, in place.

    Args:
        found: the state dict.
        keys: those of the unit and of the units below it.
        full: the memory of the whole parameters, which does not outlive the call.
        dtypes: the original dtype of the buffers that were cast.
        config: what the user has set.
    """
    originals = {buffer.data_ptr(): (buffer, dtype) for buffer, dtype in dtypes.items()}
    gathered = full.untyped_storage().data_ptr() if full is not None else None
    for key in keys:
        value = found[key]
        if not isinstance(value, torch.Tensor):
            continue
        if gathered is not None and value.untyped_storage().data_ptr() == gathered:
            value = value.detach().clone()
        elif value.data_ptr() in originals:
            buffer, dtype = originals[value.data_ptr()]
            value = value.to(dtype) if value.shape == buffer.shape else value
        found[key] = value.cpu() if config.offload_to_cpu else value


def new_destination() -> dict[str, Any]:
    """Return an empty state dict with the metadata that modules write into it."""
    destination: OrderedDict[str, Any] = OrderedDict()
    destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    return destination


def insert_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename the keys below ``prefix`` to what the wrapper's own tree calls them."""
    below = [key for key in state_dict if key.startswith(prefix)]
    renamed = {f"{prefix}{PREFIX}{key[len(prefix) :]}": state_dict.pop(key) for key in below}
    state_dict.update(renamed)


def clean(names: list[str]) -> None:
    """Remove the wrapper's part from ``names``, in place."""
    names[:] = [name.replace(PREFIX, "") for name in names]


def not_yet(what: str) -> NoReturn:
    """Refuse what is not there.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{what} is not supported by this FullyShardedDataParallel yet; for optimizer states use "
        "torch.distributed.checkpoint with fully_shard"
    )


def _before_load(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    check_idle([module._state])
    module._loading = ExitStack()
    module._loading.enter_context(whole_params(module._state, writeback=True))
    insert_prefix(state_dict, prefix)


def _after_load(module: Any, incompatible: Any) -> None:
    stack, module._loading = module._loading, None
    if stack is not None:
        stack.close()
    clean(incompatible.missing_keys)
    clean(incompatible.unexpected_keys)
