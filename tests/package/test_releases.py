"""Released sets of checks stay what they were, and are what a run says that it used."""

from __future__ import annotations

import dataclasses

import pytest

from conformance import releases as module
from conformance.checks import CHECKS
from conformance.errors import UsageError
from conformance.names import PROFILES
from conformance.plan import select_checks
from conformance.releases import definition_hash, header_row, ids_of, release_of, releases, today

RELEASES = [(version, name) for version, rows in releases().items() for name in rows]


@pytest.mark.parametrize(("version", "name"), RELEASES)
def test_the_checks_of_a_release_still_mean_what_they_meant(version: str, name: str) -> None:
    released = releases()[version][name]
    assert definition_hash(CHECKS[id] for id in released.checks) == released.hash


def test_the_first_release_has_every_profile() -> None:
    assert list(releases()["1.0"]) == list(PROFILES)


def test_a_released_profile_can_be_asked_for() -> None:
    name, version = next(iter(PROFILES)), next(iter(releases()))
    wanted = list(releases()[version][name].checks)
    assert [check.id for check in select_checks([f"{name}@{version}"])] == wanted
    assert ids_of([f"{name}@{version}", name]) >= set(wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cor@1.0", "no profile 'cor'; did you mean core"),
        ("core@0.9", "no release of checks '0.9'"),
    ],
)
def test_a_wrong_name_is_named(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ids_of([given])


@pytest.mark.parametrize("field", ["sentence", "scenarios", "needs"])
def test_a_profile_with_a_changed_check_is_no_release(monkeypatch, field: str) -> None:
    id_ = next(check.id for check in today("core") if check.scenarios)
    released = release_of("core")
    changed = {"sentence": "Another.", "scenarios": frozenset(), "needs": frozenset({"save"})}
    other = dataclasses.replace(CHECKS[id_], **{field: changed[field]})
    monkeypatch.setitem(CHECKS, id_, other)  # type: ignore[arg-type]
    assert header_row("core")["release"] is None
    assert released is None or header_row("core")["hash"] != releases()[released]["core"].hash


def test_a_release_is_appended_and_never_written_twice(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(module, "FILE", tmp_path / "releases.toml")
    module.FILE.write_text("# nothing yet\n")
    releases.cache_clear()
    try:
        assert module.main(["2.7"]) == 0
        releases.cache_clear()
        assert release_of("core") == "2.7"
        assert module.main(["2.7"]) == 64
        assert "never edited" in capsys.readouterr().err
        assert module.main(["two"]) == 64
        assert "want two numbers" in capsys.readouterr().err
    finally:
        releases.cache_clear()
