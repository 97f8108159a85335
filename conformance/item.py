"""The unit of work of a run: one case of one adapter variant, and why it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.plan import Planned
from conformance.report.lines import Role
from conformance.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Item:
    """One case of one adapter variant.

    Attributes:
        subject: what is judged.
        planned: case, checks and probe.
        role: why.
    """

    subject: Subject
    planned: Planned
    role: Role = Role.JUDGED
