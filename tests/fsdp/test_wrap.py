"""Wrap policies choose the modules that they say, each once, children before parents."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    choose_targets,
    enable_wrap,
    lambda_auto_wrap_policy,
    replace_targets,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)


class Box(nn.Module):
    """A wrapper that only remembers what it was made with."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner = module
        self.kwargs = kwargs


class Wide(nn.Linear):
    """A subclass: class policies match it too."""


def tree() -> nn.Sequential:
    """30 + 30 + 12 + 30 elements."""
    return nn.Sequential(
        nn.Linear(5, 5),
        nn.ModuleList([nn.Linear(5, 5), nn.Linear(3, 3)]),
        nn.Sequential(Wide(5, 5), nn.ReLU()),
    )


def names(root: nn.Module, policy: Any, ignored: set[nn.Module] | None = None) -> list[str]:
    ignored = ignored or set()
    params = {p for m in ignored for p in m.parameters()}
    chosen = choose_targets(root, policy, {}, ignored_modules=ignored, ignored_params=params)
    known = {module: name for name, module in root.named_modules()}
    return [known[module] for module in chosen]


ALL = ["0", "1.0", "1.1", "1", "2.0", "2.1", "2"]
LINEARS = ["0", "1.0", "1.1", "2.0"]


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (always_wrap_policy, ALL),
        (ModuleWrapPolicy({nn.Linear}), LINEARS),
        (ModuleWrapPolicy([nn.Sequential]), ["2"]),
        (ModuleWrapPolicy({nn.Linear}).__call__, LINEARS),
        (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
            LINEARS,
        ),
        (
            functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Wide)),
            ["2.0"],
        ),
        (CustomPolicy(lambda m: isinstance(m, nn.ReLU)), ["2.1"]),
    ],
    ids=["always", "classes", "root_too", "called", "transformer", "lambda", "custom"],
)
def test_a_policy_chooses(policy: Any, wanted: list[str]) -> None:
    assert names(tree(), policy) == wanted


def size(minimum: int, **kwargs: Any) -> Any:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=minimum, **kwargs)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (size(30), ["0", "1.0", "2.0"]),
        (size(31), []),  # the list holds enough but is nobody's to call
        (size(31, exclude_wrap_modules={nn.ModuleDict}), ["1"]),
        (size(12), LINEARS),
        (size(30, force_leaf_modules={nn.Sequential}), []),
        (size(30, force_leaf_modules={nn.ModuleList}), ["0", "2.0"]),
        (size(1000), []),
    ],
)
def test_size_counts_what_no_inner_unit_has_taken(policy: Any, wanted: list[str]) -> None:
    assert names(tree(), policy) == wanted


def test_a_forced_leaf_stays_with_its_parent() -> None:
    root = nn.Sequential(nn.Sequential(nn.MultiheadAttention(4, 2)))
    assert names(root, size(10)) == ["0"]
    assert names(root, size(10, force_leaf_modules=set())) == ["0.0.out_proj", "0.0"]


def test_what_is_ignored_is_neither_visited_nor_counted() -> None:
    root = tree()
    assert names(root, always_wrap_policy, set(root[1].modules())) == ["0", "2.0", "2.1", "2"]
    assert names(root, ModuleWrapPolicy({nn.Linear}), {root[0]}) == ["1.0", "1.1", "2.0"]
    assert names(root, CustomPolicy(lambda _: True), {root[0]}) == ALL[1:]
    excluded = size(40, exclude_wrap_modules=set())
    assert names(root, excluded) == ["1"]
    assert names(root, excluded, {root[1][1]}) == []


def test_the_root_is_left_to_the_caller() -> None:
    root = nn.Linear(2, 2)
    assert names(root, always_wrap_policy) == []
    assert names(root, ModuleWrapPolicy({nn.Linear})) == []


def test_overrides_are_merged_over_the_arguments_of_the_root() -> None:
    root = tree()
    policy = CustomPolicy(lambda m: {"b": 3} if isinstance(m, Wide) else isinstance(m, nn.ReLU))
    chosen = choose_targets(
        root, policy, {"a": 1, "b": 2}, ignored_modules=set(), ignored_params=set()
    )
    assert chosen == {root[2][0]: {"a": 1, "b": 3}, root[2][1]: {"a": 1, "b": 2}}


def test_a_custom_policy_returns_a_bool_or_a_dict() -> None:
    with pytest.raises(ValueError, match="should return False/True or a kwarg dict"):
        names(tree(), CustomPolicy(lambda _: 1))  # type: ignore[arg-type, return-value]


def test_a_policy_is_callable_or_a_policy() -> None:
    with pytest.raises(ValueError, match="auto_wrap_policy should be a policy object"):
        names(tree(), 3)


def test_a_module_on_two_paths_is_wrapped_once_and_replaced_on_both() -> None:
    root = tree()
    root.again = root[0]
    root[2].third = root[0]
    targets = choose_targets(
        root, ModuleWrapPolicy({nn.Linear}), {"k": 1}, ignored_modules=set(), ignored_params=set()
    )
    replace_targets(root, targets, Box)
    assert isinstance(root[0], Box)
    assert root.again is root[0]
    assert root[2].third is root[0]
    assert root[0].kwargs == {"k": 1}
    assert sum(isinstance(m, Box) for m in root.modules()) == 4


def test_a_parent_is_wrapped_around_wrapped_children() -> None:
    root = tree()
    targets = choose_targets(
        root, always_wrap_policy, {}, ignored_modules=set(), ignored_params=set()
    )
    replace_targets(root, targets, Box)
    assert isinstance(root[2], Box)
    assert isinstance(root[2].inner[0], Box)
    assert isinstance(root[2].inner[0].inner, Wide)


def test_wrap_merges_its_arguments_over_those_of_the_context() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer) is layer
    with enable_wrap(wrapper_cls=Box, a=1, b=2):
        wrapped = wrap(layer, b=3)
        with (
            pytest.raises(NotImplementedError, match="already within an autowrap context"),
            enable_wrap(wrapper_cls=Box),
        ):
            pass
        assert isinstance(wrap(layer), Box)  # the refused one has not ended this one
    assert isinstance(wrapped, Box)
    assert wrapped.kwargs == {"a": 1, "b": 3}
    assert wrap(layer) is layer


def test_a_policy_is_readable() -> None:
    assert repr(ModuleWrapPolicy({nn.Linear, nn.ReLU})) == "ModuleWrapPolicy(['Linear', 'ReLU'])"
