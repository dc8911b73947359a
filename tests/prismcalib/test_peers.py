"""What operations are compared with."""

import numpy as np
import polars as pl

from prismcalib.blocks import HeldTable
from prismcalib.peers import peer_durations
from prismtrace.schema import TraceHeader


def table(*rows):
    columns = ["rank", "kind", "duration"]
    return pl.DataFrame(rows, schema=columns, orient="row").with_columns(
        step=pl.lit(0),
        stream=pl.lit(0),
        phase=pl.lit(None, pl.String),
        microbatch=pl.lit(None, pl.Int32),
        chunk=pl.lit(None, pl.Int16),
    )


def test_computation_that_ranks_cut_differently_is_compared_as_a_whole():
    rows = table(
        (0, "compute", 10),
        (0, "compute", 20),
        (0, "all_reduce", 5),
        (0, "compute", 8),
        (1, "compute", 60),
        (1, "all_reduce", 7),
        (1, "compute", 8),
    )
    header = TraceHeader(kind="calibrated", world_size=2, ranks="0-1")
    actual = rows["duration"].to_numpy()
    ideal, lonely = peer_durations(HeldTable(rows), header, actual, "position")
    assert ideal.tolist() == [15, 30, 6, 8, 45, 6, 8]
    assert lonely == 0


def test_ranks_that_communicate_differently_have_no_peers():
    rows = table((0, "compute", 10), (0, "all_reduce", 5), (1, "compute", 60))
    header = TraceHeader(kind="calibrated", world_size=2, ranks="0-1")
    ideal, lonely = peer_durations(HeldTable(rows), header, np.array([10, 5, 60]), "position")
    assert ideal.tolist() == [10, 5, 60]
    assert lonely == 3
