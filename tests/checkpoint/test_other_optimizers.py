"""The state of another optimizer is refused; the same one with other options is taken as saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.reshard import reshard
from tests.checkpoint.test_directory import FORMATS
from tests.fsdp.plain import batch, build, loss_of
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.reshard.faces import everything, made, same

Make = Callable[[Any], torch.optim.Optimizer]
HEAVY: Make = lambda params: SGD(params, lr=0.5, momentum=0.9)  # noqa: E731


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for number in range(steps):
        loss_of(model, batch(number, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def pair(make: Make, seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = build()
    optimizer = make(model.parameters())
    stepped(model, optimizer, steps)
    return model, optimizer


def _refused(context: RankContext, *, path: str, face: str, form: str) -> list[str]:
    ranks = list(range(context.world_size))
    source, target = (made(face, ranks, model=build()) for _ in range(2))
    assert source is not None
    assert target is not None
    before = AdamW(source.parameters(), lr=1e-3)
    after = HEAVY(target.parameters())
    stepped(source, before)
    stepped(target, after)
    kept = everything(target, after)
    if form == "live":
        error = error_of(lambda: reshard(source, target, before, after))
    else:
        checkpoint.save(path, source, before, format=form)
        error = error_of(lambda: checkpoint.load(path, target, after))
    same(everything(target, after), kept)
    return error


@pytest.mark.parametrize("form", ["sharded", "safetensors", "live"])
@pytest.mark.parametrize("face", ["flat", "fully"])
def test_another_optimizer_is_refused_on_every_rank(face: str, form: str, tmp_path: Path) -> None:
    errors = on_ranks(_refused, 2, path=str(tmp_path / "saved"), face=face, form=form)
    named_on_every_rank(errors, ValueError, "exp_avg, exp_avg_sq, step, with the options amsgrad,")
    named_on_every_rank(errors, ValueError, "this SGD keeps momentum_buffer, with the options")


@pytest.mark.parametrize(
    ("saved", "loading", "steps"),
    [
        (AdamW, SGD, 2),  # whose state is empty: its options tell
        (HEAVY, AdamW, 2),
        (SGD, AdamW, 2),
        (Adam, Adamax, 2),  # whose options are some of Adam's: its entries tell
        (Adamax, Adam, 2),
        (Adam, NAdam, 2),
        (RMSprop, Adagrad, 2),
        (AdamW, SGD, 0),
        (HEAVY, AdamW, 0),
        (RMSprop, Adam, 0),
        (AdamW, Adamax, 0),  # what an optimizer with these options would have kept
        (Adam, Adagrad, 0),
        (Adamax, AdamW, 0),  # whose options are some of AdamW's
    ],
)
def test_entries_and_options_tell_optimizers_apart(
    saved: Make, loading: Make, steps: int, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "saved", *pair(saved, 1, steps))
    model, optimizer = pair(loading, 2)
    kept = everything(model, optimizer)
    with pytest.raises(ValueError, match="the state to load is of another optimizer: it has "):
        checkpoint.load(tmp_path / "saved", model, optimizer)
    same(everything(model, optimizer), kept)


@FORMATS
@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        (AdamW, lambda p: AdamW(p, lr=0.5, betas=(0.1, 0.2), fused=True)),
        (Adam, lambda p: Adam(p, amsgrad=True)),
        (lambda p: Adam(p, amsgrad=True), Adam),
        (SGD, HEAVY),
        (HEAVY, SGD),
        (RMSprop, lambda p: RMSprop(p, centered=True, momentum=0.5)),
    ],
    ids=["values", "amsgrad on", "amsgrad off", "momentum on", "momentum off", "centered on"],
)
def test_what_options_switch_is_as_it_was_saved(
    saved: Make, loading: Make, form: str, tmp_path: Path
) -> None:
    source, before = pair(saved, 1)
    model, after = pair(loading, 2, steps=1)
    checkpoint.save(tmp_path / "saved", source, before, format=form)
    checkpoint.load(tmp_path / "saved", model, after)
    same(everything(model, after), everything(source, before))
    stepped(source, before)
    stepped(model, after)
    same(everything(model, after), everything(source, before))


def test_adam_goes_on_as_adamw(tmp_path: Path) -> None:
    """What makes it AdamW is an option of torch's Adam, and no state of Adam takes it away."""
    checkpoint.save(tmp_path / "saved", *pair(lambda p: Adam(p, lr=0.25), 1))
    model, optimizer = pair(AdamW, 2)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


class Cautious(AdamW):
    """A later version of an optimizer, with an option of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.defaults["cautious"] = True
        self.param_groups[0]["cautious"] = True


class Counting(AdamW):
    """Has the options of torch's, and keeps more."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in self.state:
            self.state[param]["calls"] = torch.tensor(1.0)


def test_options_of_other_versions_and_of_schedulers_are_no_other_optimizer(tmp_path: Path) -> None:
    source, before = pair(AdamW, 1)
    torch.optim.lr_scheduler.OneCycleLR(before, 1.0, total_steps=9)
    before.param_groups[0]["layer"] = "all"
    checkpoint.save(tmp_path / "newer", source, before)
    model, after = pair(AdamW, 2)
    checkpoint.load(tmp_path / "newer", model, after)
    assert after.param_groups[0]["layer"] == "all"
    for option in ("layer", "foreach", "maximize", "capturable", "fused", "decoupled_weight_decay"):
        del before.param_groups[0][option]
    checkpoint.save(tmp_path / "older", source, before)
    model, other = pair(Cautious, 2)
    checkpoint.load(tmp_path / "older", model, other)
    assert other.param_groups[0]["cautious"] is True
    assert other.param_groups[0]["initial_lr"] == before.param_groups[0]["initial_lr"]


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        *((kind, kind) for kind in (AdamW, Adamax, NAdam, RAdam, HEAVY, Counting)),
        (AdamW, RAdam),
        (AdamW, Cautious),
        (Cautious, AdamW),  # whose options no optimizer of torch has
    ],
)
def test_what_keeps_the_same_goes_on_from_before_the_first_step(
    saved: Make, loading: Make, tmp_path: Path
) -> None:
    source, before = pair(saved, 1, steps=0)
    torch.optim.lr_scheduler.LambdaLR(before, lambda _: 0.5)
    checkpoint.save(tmp_path / "saved", source, before)
    model, after = pair(loading, 2)
    checkpoint.load(tmp_path / "saved", model, after)
    assert not any(after.state.values())
    assert after.param_groups[0]["lr"] == before.param_groups[0]["lr"]


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_kept_of_matrices_is_not_asked_of_vectors(order: int, tmp_path: Path) -> None:
    """Adafactor keeps other entries for them, whichever come first."""
    source, before = pair(lambda params: Adafactor([*params][::order], lr=0.25), 1, steps=0)
    checkpoint.save(tmp_path / "saved", source, before)
    model, after = pair(lambda params: Adafactor([*params][::order]), 2, steps=0)
    checkpoint.load(tmp_path / "saved", model, after)
    assert after.param_groups[0]["lr"] == 0.25


def test_parameters_without_a_state_tell_nothing(tmp_path: Path) -> None:
    """Frozen ones, and those that no loss has reached."""
    source, before = pair(AdamW, 1)
    for param in list(source.parameters())[:3]:
        del before.state[param]
    checkpoint.save(tmp_path / "saved", source, before)
    model, after = pair(AdamW, 2)
    checkpoint.load(tmp_path / "saved", model, after)
    same(everything(model, after), everything(source, before))


def _foreign(make: Make, path: Path) -> None:
    source, before = pair(make, 1)
    model, optim = get_state_dict(source, before)
    save_with_torch({"model": model, "optim": optim}, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_foreign_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    _foreign(AdamW, tmp_path / "saved")
    model, optimizer = pair(HEAVY, 2)
    with pytest.raises(ValueError, match="this SGD keeps momentum_buffer"):
        checkpoint.load(tmp_path / "saved", model, optimizer)
    model, other = pair(AdamW, 2)
    checkpoint.load(tmp_path / "saved", model, other)


class Holding(AdamW):
    """Keeps a tensor of its own, so that nobody can try what it keeps for a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = torch.ones(())


def test_an_optimizer_that_cannot_be_tried_is_told_by_its_options(tmp_path: Path) -> None:
    source, before = pair(Holding, 1)
    checkpoint.save(tmp_path / "saved", source, before)
    model, after = pair(Holding, 2)
    checkpoint.load(tmp_path / "saved", model, after)
    same(everything(model, after), everything(source, before))
    checkpoint.save(tmp_path / "other", *pair(HEAVY, 1))
    kept = copy.deepcopy(after.state_dict())
    with pytest.raises(ValueError, match=r"this Holding keeps the options amsgrad, betas"):
        checkpoint.load(tmp_path / "other", model, after)
    assert str(after.state_dict()) == str(kept)
