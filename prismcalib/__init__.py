"""Graph and time: from recorded ranks to one true timeline, and what it says.

    import prismcalib

    result = prismcalib.merge("run.parquet")
    result.report.propagated_ns
    prismcalib.critical_path(result.trace).shares("kind")

Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module

# As checkers know it: importing `typing` for it would take longer than all the rest.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from prismcalib.build import graph_from_trace
    from prismcalib.coarsening import Coarse, CoarsenReport, coarsen
    from prismcalib.comm_table import CommTable, read_comm_logs
    from prismcalib.comparing import Comparison, compare
    from prismcalib.edits import Drop, Scale, ScaleGaps, SetDuration, SwapDurations, read_scenarios
    from prismcalib.errors import (
        CalibError,
        ClockError,
        CoarsenError,
        CommLogError,
        ComparisonError,
        CoverageError,
        CycleError,
        MergeInputError,
        MissingMemberError,
        PredicateError,
        ScenarioError,
        StructureError,
        TooLargeError,
    )
    from prismcalib.estimates import EstimateRange
    from prismcalib.graph import Graph
    from prismcalib.health import Finding, Health, device_health
    from prismcalib.long_waits import LongWait, longest_waits
    from prismcalib.merge_result import MergeReport, MergeResult
    from prismcalib.merging import merge
    from prismcalib.nxgraph import to_networkx
    from prismcalib.paths import CriticalPath, critical_path
    from prismcalib.prediction import Prediction, predict
    from prismcalib.propagation import (
        BatchTiming,
        Timing,
        critical_rows,
        propagate,
        propagate_batch,
        slack,
    )
    from prismcalib.report import RunSummary, describe_run, write_report
    from prismcalib.resampling import Quantile, StepSpread
    from prismcalib.slices import SliceOptions, SlicesReport
    from prismcalib.stragglers import StragglerReport, find_stragglers
    from prismcalib.waiting import WaitRules
    from prismcalib.whatif import Scenario, WhatIf, what_if

__all__ = [
    "BatchTiming",
    "CalibError",
    "ClockError",
    "Coarse",
    "CoarsenError",
    "CoarsenReport",
    "CommLogError",
    "CommTable",
    "Comparison",
    "ComparisonError",
    "CoverageError",
    "CriticalPath",
    "CycleError",
    "Drop",
    "EstimateRange",
    "Finding",
    "Graph",
    "Health",
    "LongWait",
    "MergeInputError",
    "MergeReport",
    "MergeResult",
    "MissingMemberError",
    "PredicateError",
    "Prediction",
    "Quantile",
    "RunSummary",
    "Scale",
    "ScaleGaps",
    "Scenario",
    "ScenarioError",
    "SetDuration",
    "SliceOptions",
    "SlicesReport",
    "StepSpread",
    "StragglerReport",
    "StructureError",
    "SwapDurations",
    "Timing",
    "TooLargeError",
    "WaitRules",
    "WhatIf",
    "coarsen",
    "compare",
    "critical_path",
    "critical_rows",
    "describe_run",
    "device_health",
    "find_stragglers",
    "graph_from_trace",
    "longest_waits",
    "merge",
    "predict",
    "propagate",
    "propagate_batch",
    "read_comm_logs",
    "read_scenarios",
    "slack",
    "to_networkx",
    "what_if",
    "write_report",
]

_HOMES = {
    "build": ("graph_from_trace",),
    "coarsening": ("Coarse", "CoarsenReport", "coarsen"),
    "comm_table": ("CommTable", "read_comm_logs"),
    "comparing": ("Comparison", "compare"),
    "edits": ("Drop", "Scale", "ScaleGaps", "SetDuration", "SwapDurations", "read_scenarios"),
    "estimates": ("EstimateRange",),
    "graph": ("Graph",),
    "health": ("Finding", "Health", "device_health"),
    "long_waits": ("LongWait", "longest_waits"),
    "merge_result": ("MergeReport", "MergeResult"),
    "merging": ("merge",),
    "nxgraph": ("to_networkx",),
    "paths": ("CriticalPath", "critical_path"),
    "prediction": ("Prediction", "predict"),
    "propagation": (
        "BatchTiming",
        "Timing",
        "critical_rows",
        "propagate",
        "propagate_batch",
        "slack",
    ),
    "resampling": ("Quantile", "StepSpread"),
    "slices": ("SliceOptions", "SlicesReport"),
    "report": ("RunSummary", "describe_run", "write_report"),
    "stragglers": ("StragglerReport", "find_stragglers"),
    "waiting": ("WaitRules",),
    "whatif": ("Scenario", "WhatIf", "what_if"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'prismcalib' has no attribute {name!r}")
    module = import_module(f"prismcalib.{_MODULE_OF.get(name, 'errors')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
