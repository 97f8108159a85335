"""The head start of ranks, and what a command does meanwhile."""

from __future__ import annotations

import gc

import pytest

from conformance import preload


def test_garbage_is_collected_now_and_then_only_while_a_command_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preload, "lease_server", lambda *_: None)
    monkeypatch.setattr(preload, "release_server", lambda _: None)
    often = gc.get_threshold()
    with preload.forkserver_starting():
        assert gc.isenabled()
        assert gc.get_threshold()[0] > 10 * often[0]
    assert gc.get_threshold() == often
