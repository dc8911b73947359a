"""Execution: collect a job's graph, time it slice by slice, run a few ranks for real.

This release ships `prismreplay doctor`, which says what the machine can do. Importing the
package imports neither torch nor CUDA; only the commands that execute something do.
"""

from prismreplay.doctor import Check, Report, Status, examine
from prismreplay.errors import ReplayError

__all__ = ["Check", "ReplayError", "Report", "Status", "examine"]
