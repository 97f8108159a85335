"""What users of PyTorch's wrapper say through environment variables. Read when a unit is made."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fsdp.engine.trace import logger


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The switches, each "1" to be on.

    Attributes:
        skip_writeback_check: parameters that the user has replaced are not looked for.
        full_precision_in_eval: modules in eval mode compute in the dtype of their parameters.
    """

    skip_writeback_check: bool = False
    full_precision_in_eval: bool = False

    @classmethod
    def read(cls) -> Environment:
        """Return what is set now."""
        found = cls(
            skip_writeback_check=_on("FSDP_SKIP_WRITEBACK_CHECK"),
            full_precision_in_eval=_on("FSDP_USE_FULL_PREC_IN_EVAL"),
        )
        if found.skip_writeback_check:
            logger.warning(
                "FSDP_SKIP_WRITEBACK_CHECK=1: parameters that are replaced, or given other memory, "
                "are trained no further and nobody is told"
            )
        return found


def _on(name: str) -> bool:
    return os.environ.get(name, "") == "1"
