"""Whatever was observed, merge explains it: exactly, or later by what it clamped."""

import random

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from prismcalib.errors import CycleError
from prismcalib.merging import merge
from prismtrace.schema import INDEX_BITS, ProcessGroup, TraceHeader
from prismtrace.trace import Trace, node_schema


def random_trace(draw: random.Random, *, tidy: bool) -> Trace:
    """Up to four ranks with any dependencies; collectives over all ranks, in one order.

    Tidy times respect the dependencies and the collectives, others are arbitrary.
    """
    ranks = draw.randint(1, 4)
    rows = []
    ready = [0] * draw.randint(0, 4)
    ends: list[list[int]] = []
    for rank in range(ranks):
        sync_at = sorted(draw.sample(range(12), len(ready)))
        ends.append([])
        for index in range(12):
            deps = draw.sample(range(1, index + 1), min(index, draw.choice([0, 1, 1, 2])))
            earliest = max([ends[rank][index - distance] for distance in deps], default=0)
            start = earliest + draw.choice([0, draw.randint(0, 99)])
            if not tidy:
                start = draw.randint(0, 999)
            member = index in sync_at
            duration = draw.randint(0, 50)
            if member and tidy:
                # All ranks meet far beyond everything before.
                number = sync_at.index(index)
                duration = 10_000 * (number + 1) + draw.randint(0, 9) - start
            ends[rank].append(start + duration)
            rows.append(
                {
                    "id": rank << INDEX_BITS | index,
                    "rank": rank,
                    "index": index,
                    "kind": "all_reduce" if member else "compute",
                    "stream": 0,
                    "group": 0 if member else None,
                    "seq": sync_at.index(index) if member else None,
                    "real": True,
                    "deps": sorted(deps),
                    "start_ns": start,
                    "dur_ns": max(duration, 0),
                }
            )
    header = TraceHeader(
        kind="recorded",
        world_size=ranks,
        ranks=tuple(range(ranks)),
        groups=(ProcessGroup(id=0, name="world", ranks=tuple(range(ranks))),),
    )
    return Trace(header=header, nodes=pl.DataFrame(rows, schema=node_schema()).lazy())


@given(st.randoms(use_true_random=False), st.booleans())
@settings(deadline=None, max_examples=120)
def test_propagation_gives_back_what_was_observed(draw, tidy):
    trace = random_trace(draw, tidy=tidy)
    observed = trace.collect()
    try:
        result = merge(trace, clock="keep", max_residual_ns=10**15)
    except CycleError:
        return
    nodes, report = result.nodes, result.report
    assert (nodes["start_ns"] >= observed["start_ns"]).all()
    assert nodes["x_observed_start_ns"].equals(observed["start_ns"], check_names=False)
    assert nodes["x_observed_dur_ns"].equals(observed["dur_ns"], check_names=False)
    clamped = report.overlap_clamps.total_ns + report.transfer_clamps.total_ns
    # Below 0 if the first row of all was moved behind another.
    assert -clamped <= report.difference_ns <= clamped
    assert 0 <= report.most_delayed_ns <= clamped
    if clamped == 0:
        assert nodes["start_ns"].equals(observed["start_ns"])
        assert nodes["dur_ns"].equals(observed["dur_ns"])
    if tidy:
        assert report.overlap_clamps.count == 0
