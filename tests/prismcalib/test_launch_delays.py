"""Whose late launches cost the step."""

from __future__ import annotations

import pytest

from prismcalib import find_stragglers, merge, predict
from prismtrace.schema import ClockDomain
from tests.prismtrace.conftest import build_trace

STEPS = 3


def made(*late_ns: int):
    """Ranks that compute 100 ns and reduce; each launches its computation so much too late."""
    clock = (ClockDomain(id=0, ranks=tuple(range(len(late_ns))), source="test"),)
    rows = []
    for rank, late in enumerate(late_ns):
        for step in range(STEPS):
            begin = step * (110 + max(late_ns))
            ready, end = begin + 100 + max(late_ns), begin + 110 + max(late_ns)
            compute = {"start_ns": begin + late, "dur_ns": 100, "deps": [1] if step else []}
            reduce = {"kind": "all_reduce", "group": 0, "seq": step, "stream": 1, "deps": [1]}
            times = {"start_ns": begin + late + 100, "dur_ns": end - begin - late - 100}
            assert times["start_ns"] <= ready
            rows += [{"rank": rank, "step": step, **some} for some in (compute, reduce | times)]
    facts = {"kind": "recorded", "clock": clock, "steps": tuple(range(STEPS))}
    return merge(build_trace(*rows, **facts), max_residual_ns=10**9).trace


def test_the_rank_that_delays_is_named():
    (cause,) = find_stragglers(made(0, 50, 0)).causes
    assert (cause.kind, cause.where) == ("launch-delays", "host of rank 1")
    assert cause.saves == pytest.approx(50 / 160)
    assert cause.evidence.endswith("; with the delays of one rank only: 0.000 ms of rank 1")


def test_delays_of_all_are_nobodys():
    (cause,) = find_stragglers(made(50, 50, 50)).causes
    assert cause.where == "host"
    assert cause.evidence.count("of rank") == 3


def test_what_lies_before_the_path_is_no_idle_time():
    rows = (
        {"rank": 0, "start_ns": 0, "dur_ns": 10},
        {"rank": 1, "start_ns": 30, "dur_ns": 70},
    )
    clock = (ClockDomain(id=0, ranks=(0, 1), source="test"),)
    basis = predict(merge(build_trace(*rows, kind="recorded", clock=clock)).trace).basis
    assert basis == {"computation, measured": 0.7, "before the path starts": 0.3}
