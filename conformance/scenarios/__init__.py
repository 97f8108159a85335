"""Programs that all ranks and the oracle run with a model, and what they record."""

from conformance.scenarios.programs import SCENARIOS, Scenario
from conformance.scenarios.run import Run

__all__ = ["SCENARIOS", "Run", "Scenario"]
