"""What is run: a model, a scenario and its options, as one string that every output repeats.

Knows no tensors and no adapters; the plan of a run is a list of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OPTION_DEFAULTS: Mapping[str, str] = {"optimizer": "adamw", "accumulation": "1"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training program on one model.

    Attributes:
        model: name of a model case.
        scenario: name of a scenario.
        options: the scenario's options, sorted by name; values are strings as in the id.
    """

    model: str
    scenario: str
    options: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def of(cls, model: str, scenario: str, **options: object) -> Case:
        """A case from keyword options: ``Case.of("mlp", "train", accumulation=3)``."""
        return cls(
            model=model,
            scenario=scenario,
            options=tuple(sorted((key, str(value)) for key, value in options.items())),
        )

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `text` names.

        Raises:
            ValueError: `text` is not ``model/scenario`` or ``model/scenario/k=v,...``.
        """
        parts = text.split("/")
        pairs = [item.partition("=") for item in parts[2].split(",")] if len(parts) == 3 else []
        if len(parts) not in (2, 3) or not all(key and eq and value for key, eq, value in pairs):
            raise ValueError(f"{text!r} is not a case; expected model/scenario/k=v,...")
        return cls.of(parts[0], parts[1], **{key: value for key, _, value in pairs})

    def __str__(self) -> str:
        base = f"{self.model}/{self.scenario}"
        return f"{base}/{','.join(f'{k}={v}' for k, v in self.options)}" if self.options else base

    def option(self, name: str) -> str:
        """Value of an option, or its default."""
        return dict(self.options).get(name, OPTION_DEFAULTS.get(name, ""))

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return int(self.option("accumulation"))

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""
        return self.option("optimizer")
