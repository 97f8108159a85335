"""What becomes of a mutant: told by hand, and measured on a handful with real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from conformance import session
from conformance.adapter import Adapter, Wrapped
from conformance.causes import Cause
from conformance.cli.kill_page import kills_page
from conformance.cli.selftesting import diagonal_status, diagonal_text
from conformance.mutants import MUTANTS
from conformance.selftest import Kill, assess, diagonal
from conformance.session import Setting
from conformance.verdicts import EXIT_BAD, EXIT_OK, EXIT_UNDECIDED, Finding, Verdict
from tests.ranks.leasing import fake_leases

ROW = MUTANTS["step_counted_twice"]


def finding(check: str, verdict: Verdict = Verdict.PASS, cause: Cause | None = None) -> Finding:
    return Finding(
        check=check,
        adapter=ROW.base,
        variant="default",
        case=ROW.case,
        seed=0,
        verdict=verdict,
        cause=cause,
    )


RIGHT = finding(ROW.check, Verdict.FAIL, ROW.cause)
OTHER = finding("losses.value", Verdict.FAIL, Cause.STALE)
QUIET = [finding("losses.value"), finding(ROW.check)]


@pytest.mark.parametrize(
    ("mutated", "base", "expected"),
    [
        ([RIGHT, OTHER], QUIET, Kill.KILLED),
        (QUIET, QUIET, Kill.SURVIVED),
        ([OTHER, finding(ROW.check)], QUIET, Kill.SURVIVED),
        ([OTHER], QUIET, Kill.SURVIVED),
        ([OTHER, finding(ROW.check, Verdict.BLOCKED)], QUIET, Kill.SURVIVED),
        ([OTHER, RIGHT], QUIET, Kill.NOT_FIRST),
        ([replace(RIGHT, cause=Cause.ZERO)], QUIET, Kill.WRONG_CAUSE),
        ([replace(RIGHT, verdict=Verdict.CRASH)], QUIET, Kill.WRONG_CAUSE),
        ([RIGHT], [OTHER], Kill.FALSE_ALARM),
        ([RIGHT], [finding("losses.value", Verdict.ERROR)], Kill.FALSE_ALARM),
    ],
)
def test_a_mutant_is_killed_only_by_its_check_first_with_its_cause(
    mutated: list[Finding], base: list[Finding], expected: Kill
) -> None:
    result = assess(ROW, mutated, base)
    assert result.kill is expected, result.sentence
    assert result.mutant == ROW.name


def test_a_world_that_is_too_small_is_said_and_nothing_runs(tmp_path: Path) -> None:
    results = diagonal(Setting(world=1, directory=tmp_path), [replace(ROW, world=2)])
    assert [result.kill for result in results] == [Kill.WORLD_TOO_SMALL]
    assert list(tmp_path.iterdir()) == []


def test_a_defect_of_streams_is_not_looked_for_where_there_are_none(tmp_path: Path) -> None:
    rows = [row for row in MUTANTS.values() if row.device is not None]
    assert rows
    results = diagonal(Setting(directory=tmp_path), rows)
    assert {result.kill for result in results} == {Kill.OTHER_DEVICE}
    assert list(tmp_path.iterdir()) == []
    assert all(row.shows_on("other") and not row.shows_on("cpu") for row in rows)


def test_a_case_that_needs_more_devices_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(session, "leases_of", lambda kind: fake_leases(tmp_path, "a,b"))
    rows = [row for row in MUTANTS.values() if "ranks=double" in row.case]
    assert rows
    setting = Setting(directory=tmp_path / "runs", device="fake", world=2)
    results = diagonal(setting, rows)
    assert {result.kill for result in results} == {Kill.TOO_FEW_DEVICES}
    assert list(setting.directory.iterdir()) == []
    text = diagonal_text(results, "2 ranks on fake", 0.0)
    needs = "needs 4 fake devices, of which 2 are here"
    assert f"not measured, too few devices: its second job {needs}" in text
    assert all(row.name in text for row in rows)


def test_what_is_left_out_decides_nothing() -> None:
    left_out, killed, survived = (
        replace(assess(ROW, [RIGHT], QUIET), kill=kill)
        for kill in (Kill.TOO_FEW_DEVICES, Kill.KILLED, Kill.SURVIVED)
    )
    assert diagonal_status([left_out]) == EXIT_UNDECIDED
    assert diagonal_status([left_out, killed]) == EXIT_OK
    assert diagonal_status([left_out, killed, survived]) == EXIT_BAD


def test_gradients_in_bfloat16_come_to_the_optimizer_in_the_dtype_of_parameters() -> None:
    """One that takes many tensors at once, as it does on an accelerator, refuses a mixture."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stepped: list[torch.dtype] = []
    optimizer.register_step_pre_hook(
        lambda *_: stepped.extend(p.grad.dtype for p in module.parameters())
    )
    w = Wrapped(module=module, optimizer=optimizer)
    with MUTANTS["gradients_in_bfloat16"].planted(Adapter()) as adapter:
        adapter.backward(w, module(torch.ones(1, 2)).square().sum())
        assert {p.grad.dtype for p in module.parameters()} == {torch.bfloat16}
        adapter.optimizer_step(w)
    assert stepped == [torch.float32, torch.float32]


def test_trouble_with_one_mutant_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = replace(ROW, name="broken", case="no-such-model/train")
    told: list[str] = []
    results = diagonal(
        Setting(directory=tmp_path), [broken], done=lambda result: told.append(result.mutant)
    )
    assert [result.kill for result in results] == [Kill.ERROR]
    assert "no-such-model" in results[0].sentence
    assert told == ["broken"]


HANDFUL = ("step_counted_twice", "wrapper_prefix_in_keys", "moments_shifted_by_load", "rank_killed")


def test_the_page_has_every_check_on_every_mutant() -> None:
    numbers = replace(RIGHT, error=6.0, bound=0.5)
    quiet = [finding("losses.value"), replace(finding(ROW.check), error=1e-3, bound=1e-2)]
    killed, survived = assess(ROW, [numbers, OTHER], quiet), assess(ROW, [OTHER], QUIET)
    apart = replace(survived, mutant="elsewhere", kill=Kill.OTHER_DEVICE, sentence="no streams")
    text = kills_page([killed, survived, apart], "On a day, somewhere.")
    lines = text.splitlines()
    assert "On a day, somewhere." in lines
    assert "3 mutants: 1 killed, 1 survived, 1 other device." in lines
    row = f"{ROW.name} | killed | `{ROW.check}` | {ROW.cause} | 12 | 0.1 | `losses.value` |"
    assert f"| {row}" in lines
    assert f"| {ROW.name} | survived | `{ROW.check}` | none | - | - | `losses.value` |" in lines
    assert f"| `{ROW.check}` | 1 | 1 |" in lines
    assert "| `losses.value` | 1 | 2 |" in lines
    assert "| elsewhere | other device: no streams |" in lines
    assert sum("elsewhere" in line for line in lines) == 1


@pytest.mark.usefixtures("forkserver")
def test_a_handful_is_killed_and_mislabelled_ones_are_not(tmp_path: Path) -> None:
    mislabelled = {
        replace(ROW, cause=Cause.ZERO): Kill.WRONG_CAUSE,
        replace(ROW, check="optimizer.state"): Kill.NOT_FIRST,
        replace(ROW, check="gradients.scale"): Kill.SURVIVED,
        replace(ROW, check="resume.model"): Kill.SURVIVED,
    }
    chosen = [*(MUTANTS[name] for name in HANDFUL), *mislabelled]
    results = diagonal(Setting(directory=tmp_path), chosen)
    expected = [*(Kill.KILLED for _ in HANDFUL), *mislabelled.values()]
    assert [result.kill for result in results] == expected, [r.sentence for r in results]
