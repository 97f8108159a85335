"""What is required of `fsdp` and of any wrapper: `requirements.toml`, checked, and its page.

It knows ids, statuses, reasons and the names of tests and checks, as text. It must not import a
check, a test or torch: whoever has the registry of checks hands its ids in.

`python -m conformance.requirements` writes docs/requirements.md in a checkout.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
TABLE = _HERE / "requirements.toml"
SPECIFICATION = _HERE.parent / "docs" / "spec.md"
PAGE = _HERE.parent / "docs" / "requirements.md"

_HEADING = re.compile(r"^#{2,3} (\d[\d.]* .+)$")
_REQUIREMENT = re.compile(r"^- ((?:[A-Z][A-Z0-9]*-)+\d{3})\b")
_WRAPPER_ID = re.compile(r"DP-[A-Z]+-\d{3}")

LONGEST = 180
"""Characters of a requirement that is still read in one go."""
VAGUE = re.compile(
    r"\b(should|may|might|could|can|would|shall|must|ideally|usually|normally|generally|typically"
    r"|properly|correctly|appropriate(?:ly)?|reasonabl[ey]|sensibl[ey]|suitabl[ey]|adequate(?:ly)?"
    r"|as expected|as needed|if possible|where possible|and/or|etc|several|various|TBD|TODO)\b",
    re.IGNORECASE,
)
"""Words with which nobody can tell whether a requirement holds."""


class Status(StrEnum):
    """Whether a requirement of the specification binds `fsdp`."""

    MUST = "must"
    ADAPTED = "adapted"
    EXCLUDED = "excluded"


@dataclass(frozen=True, kw_only=True)
class SpecRow:
    """One requirement of docs/spec.md and the pytest ids of the tests that prove it."""

    id: str
    status: Status
    reason: str
    proved_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WrapperRow:
    """One requirement on any wrapper, the spec ids behind it, and the checks that prove it."""

    id: str
    sentence: str
    generalises: tuple[str, ...]
    checks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Both id spaces, and what has no id, each in the order of the file.

    Attributes:
        spec: what binds `fsdp`.
        wrapper: what binds any wrapper.
        unjudged: what no check sees, and why.
    """

    spec: Mapping[str, SpecRow]
    wrapper: Mapping[str, WrapperRow]
    unjudged: Mapping[str, str]


def load(path: Path = TABLE) -> Requirements:
    """Read the table.

    Raises:
        ValueError: the file is no TOML, or a row has a missing, unknown or mistyped field.
    """
    with path.open("rb") as file:
        try:
            table = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
    return Requirements(
        spec={id_: _spec_row(id_, row) for id_, row in table.get("spec", {}).items()},
        wrapper={id_: _wrapper_row(id_, row) for id_, row in table.get("wrapper", {}).items()},
        unjudged={
            what: _text(what, "reason", reason)
            for what, reason in table.get("unjudged", {}).items()
        },
    )


def sections(specification: str) -> dict[str, tuple[str, ...]]:
    """The requirement ids in the text of the specification: heading to ids, both in order.

    Raises:
        ValueError: an id stands twice.
    """
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    heading = ""
    for line in specification.splitlines():
        if match := _HEADING.match(line):
            heading = match[1]
        elif match := _REQUIREMENT.match(line):
            if match[1] in seen:
                raise ValueError(f"specification: {match[1]} stands twice; an id is given once")
            seen.add(match[1])
            found.setdefault(heading, []).append(match[1])
    return {heading: tuple(ids) for heading, ids in found.items()}


def problems(
    requirements: Requirements, spec_ids: Sequence[str], check_ids: Collection[str]
) -> Iterator[str]:
    """One sentence per fault of the table, none when it is sound.

    Args:
        requirements: the table.
        spec_ids: every id of the specification.
        check_ids: every id of the registry of checks.
    """
    for id_ in spec_ids:
        if id_ not in requirements.spec:
            yield f"{id_}: stands in the specification and has no row; add one under [spec]"
    for id_, row in requirements.spec.items():
        if id_ not in spec_ids:
            yield f"{id_}: has a row and does not stand in the specification; remove or rename it"
        yield from _spec_row_problems(row)
    for wrapper_row in requirements.wrapper.values():
        yield from _wrapper_row_problems(wrapper_row, requirements.spec, check_ids)
    for what, reason in requirements.unjudged.items():
        if not reason.strip():
            yield f"{what}: unjudged without a reason; say which"
    used = {check for row in requirements.wrapper.values() for check in row.checks}
    for check in sorted(set(check_ids) - used):
        yield f"{check}: this check proves no requirement; name it in a [wrapper] row"


def wording(sentence: str) -> Iterator[str]:
    """One sentence per fault of the wording of a requirement, none when it can be decided.

    A requirement is one statement in the present tense of what holds, and says it of everything
    that it names.
    """
    text = " ".join(sentence.split())
    if not text.endswith("."):
        yield "the requirement is a sentence and ends with a full stop"
    if text[:1] != text[:1].upper():
        yield "the requirement begins with a capital letter"
    if re.search(r"[.!?] [A-Z]", text):
        yield "the requirement is one sentence; give the second one an id of its own"
    if len(text) > LONGEST:
        yield f"{len(text)} characters; {LONGEST} at most, or nobody reads it in one go"
    for word in dict.fromkeys(VAGUE.findall(text)):
        yield f"{word!r} leaves open what holds; say what is the case"


def page(requirements: Requirements, by_section: Mapping[str, Sequence[str]]) -> str:
    """The generated page, Markdown; `by_section` comes from `sections`."""
    lines = [
        "# Requirements",
        "",
        "Generated from `conformance/requirements.toml` by `python -m conformance.requirements`;",
        "a change made here is lost. The text of each id stands in [spec.md](spec.md).",
        *_wrapper_part(requirements.wrapper),
        *_unjudged_part(requirements.unjudged),
        *_spec_part(requirements.spec, by_section),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with `--check` say whether it is up to date (exit status 1 if not)."""
    parser = argparse.ArgumentParser(prog="python -m conformance.requirements", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    text = page(load(), sections(SPECIFICATION.read_text(encoding="utf-8")))
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def _spec_row(id_: str, row: Any) -> SpecRow:
    fields = _fields(id_, row, required={"status", "proved_by"}, optional={"reason"})
    if fields["status"] not in list(Status):
        wanted = ", ".join(Status)
        raise ValueError(f"{id_}: status: got {fields['status']!r}, want one of {wanted}")
    return SpecRow(
        id=id_,
        status=Status(fields["status"]),
        reason=_text(id_, "reason", fields.get("reason", "")),
        proved_by=_names(id_, "proved_by", fields["proved_by"]),
    )


def _wrapper_row(id_: str, row: Any) -> WrapperRow:
    fields = _fields(id_, row, required={"sentence", "generalises", "checks"}, optional=set())
    return WrapperRow(
        id=id_,
        sentence=_text(id_, "sentence", fields["sentence"]),
        generalises=_names(id_, "generalises", fields["generalises"]),
        checks=_names(id_, "checks", fields["checks"]),
    )


def _fields(id_: str, row: Any, *, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{id_}: got {row!r}, want a table with {', '.join(sorted(required))}")
    if missing := required - row.keys():
        raise ValueError(f"{id_}: misses {', '.join(sorted(missing))}")
    if unknown := row.keys() - required - optional:
        known = ", ".join(sorted(required | optional))
        raise ValueError(f"{id_}: unknown {', '.join(sorted(unknown))}; known are {known}")
    return row


def _text(id_: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{id_}: {field}: got {value!r}, want text")
    return value


def _names(id_: str, field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{id_}: {field}: got {value!r}, want a list of texts")
    if len(set(value)) < len(value):
        raise ValueError(f"{id_}: {field}: a name stands twice in {value!r}")
    return tuple(value)


def _spec_row_problems(row: SpecRow) -> Iterator[str]:
    if row.status is Status.MUST and row.reason:
        yield f"{row.id}: must, and yet a reason; a reason belongs to adapted or excluded"
    if row.status is not Status.MUST and not row.reason.strip():
        yield f"{row.id}: {row.status} without a reason; say which"
    if row.status is not Status.EXCLUDED and not row.proved_by:
        yield f"{row.id}: {row.status} without a test that proves it"
    if row.status is Status.EXCLUDED and row.proved_by:
        yield f"{row.id}: excluded, and yet proved by a test; it is must or adapted"


def _wrapper_row_problems(
    row: WrapperRow, spec: Mapping[str, SpecRow], check_ids: Collection[str]
) -> Iterator[str]:
    if not _WRAPPER_ID.fullmatch(row.id):
        yield f"{row.id}: want DP-, a word in capitals, and three digits"
    yield from (f"{row.id}: {problem}" for problem in wording(row.sentence))
    if not row.generalises or not row.checks:
        yield f"{row.id}: names at least one spec id and one check"
    for id_ in row.generalises:
        if id_ not in spec:
            yield f"{row.id}: generalises {id_}, which has no [spec] row"
        elif spec[id_].status is Status.EXCLUDED:
            yield f"{row.id}: generalises {id_}, which is excluded"
    for check in row.checks:
        if check not in check_ids:
            yield f"{row.id}: names the check {check}, which is not registered"


def _wrapper_part(wrapper: Mapping[str, WrapperRow]) -> Iterator[str]:
    rows = (
        (row.id, row.sentence, ", ".join(row.generalises), _code(row.checks))
        for row in wrapper.values()
    )
    yield from ("", "## Of any wrapper", "", "Each is proved by checks of the suite.", "")
    yield from _table(("id", "requirement", "generalises", "checks"), rows)


def _unjudged_part(unjudged: Mapping[str, str]) -> Iterator[str]:
    if unjudged:
        yield from ("", "### Not judged", "", "What no check of the suite sees.", "")
        yield from _table(("what", "why"), iter(unjudged.items()))


def _spec_part(
    spec: Mapping[str, SpecRow], by_section: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    exceptions = (
        (row.id, row.status, row.reason) for row in spec.values() if row.status is not Status.MUST
    )
    proved = ((row.id, _code(row.proved_by)) for row in spec.values() if row.proved_by)
    yield from ("", "## Of `fsdp`", "")
    yield "Each is proved by tests. *Adapted* differs on purpose, *excluded* concerns only torch's"
    yield from ("own internals.", "")
    yield from _table(("section", *Status, "with a test"), _totals(spec, by_section))
    yield from ("", "### Adapted and excluded", "")
    yield from _table(("id", "status", "reason"), exceptions)
    yield from ("", "### Proved", "")
    yield from _table(("id", "tests"), proved)


def _totals(
    spec: Mapping[str, SpecRow], by_section: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    groups = [*by_section.items(), ("all", list(spec))]
    for heading, ids in groups:
        counts = Counter(spec[id_].status for id_ in ids)
        proved = sum(bool(spec[id_].proved_by) for id_ in ids)
        yield heading, *(str(counts[status]) for status in Status), str(proved)


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> list[str]:
    body = [_line(row) for row in rows]
    return [_line(head), _line(["---"] * len(head)), *body]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
