"""Execution: collect a job's graph, record a true run, time slices, run a few ranks for real.

Importing the package imports next to nothing: torch does so in every process in which the
package is installed (`prismreplay.runtime.bootstrap`).
"""

from __future__ import annotations

from importlib import import_module

# As checkers know it: importing `typing` for it would take longer than all the rest.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from prismreplay.doctor import Check, Report, Status, examine
    from prismreplay.errors import ReplayError

__all__ = ["Check", "ReplayError", "Report", "Status", "examine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'prismreplay' has no attribute {name!r}")
    module = "prismreplay.errors" if name == "ReplayError" else "prismreplay.doctor"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
