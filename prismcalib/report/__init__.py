"""One HTML page that says what a run is waiting for: `prismcalib report`.

    trace --scan--> times per rank, bins, groups, steps --describe--> RunSummary (all numbers)
                                                                          |
    spans of chosen ranks, bins of all ranks --encode--> page with its timeline <--render--+

`data` holds the numbers and no HTML; `page` and its neighbours draw them and compute nothing.
A trace is read block by block, so that memory does not grow with its rows.
"""

from prismcalib.report.data import RunSummary, describe_run
from prismcalib.report.page import write_report

__all__ = ["RunSummary", "describe_run", "write_report"]
