"""Slices of programs that do more or less than their graph."""

from __future__ import annotations

import polars as pl
import pytest

from prismreplay.errors import SliceError
from prismreplay.slicing.completeness import require_whole
from prismreplay.slicing.progress import Execution
from prismtrace.trace import open_trace
from tests.prismreplay.slicing.jobs import bare_graph

SLICE = Execution(0, 3, (0, 1))


@pytest.fixture
def traces(tmp_path):
    return [open_trace(bare_graph(tmp_path / f"{n}.parquet", steps=n)) for n in (2, 5)]


def test_what_is_the_graph_s_passes(traces):
    for trace in traces:
        require_whole(trace.nodes.filter(pl.col("rank") < 2), trace, SLICE)


def test_fewer_steps_are_refused(traces):
    short, whole = traces
    with pytest.raises(
        SliceError, match="on rank 0 of slice 3, and on 1 more of its ranks 3 of the 5 communic"
    ) as caught:
        require_whole(short.nodes, whole, SLICE)
    assert "collected with" in caught.value.hint


def test_more_steps_are_refused(traces):
    short, whole = traces
    rows = pl.concat([short.nodes.filter(pl.col("rank") == 0), whole.nodes.filter(rank=1)])
    with pytest.raises(SliceError, match=r"on rank 1 of slice 3 3 communications .* beyond the 2"):
        require_whole(rows, short, SLICE)


def test_only_steps_that_are_kept_count(traces):
    short, whole = traces
    require_whole(short.nodes, whole, SLICE, (0, 1))
    require_whole(whole.nodes, short, SLICE, (0, 1))
    with pytest.raises(SliceError, match="were not made in steps 1-2"):
        require_whole(short.nodes, whole, SLICE, (1, 2))
