"""From profiler traces to one timeline: what merge finds is what was simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismcalib.merging import merge
from prismtrace.converters import convert
from prismtrace.trace import open_trace
from tests.prismtrace.kineto_jobs import Job


@pytest.mark.parametrize("grain", ["communication", "kernel"])
def test_clocks_of_hosts_and_step_time_are_recovered(grain: str, tmp_path: Path) -> None:
    offset = 3_000_000_000
    job = Job(torch="2.6", pp=2, steps=2, ranks_per_host=2, host_offset_ns=offset)
    convert(job.write(tmp_path / "in"), tmp_path / "run.parquet", grain=grain)
    report = merge(open_trace(tmp_path / "run.parquet")).report
    assert [domain.ranks for domain in report.clock.domains] == ["0-1", "2-3", "4-5", "6-7"]
    for number, domain in enumerate(report.clock.domains):
        # Ends differ by up to 4 µs between members.
        assert abs(domain.offset_ns + number * offset) < 4_000
    assert report.difference_ns == 0


def test_a_job_of_one_host_keeps_its_times(tmp_path: Path) -> None:
    job = Job(torch="2.13", pp=2, batched_p2p=True, steps=2)
    convert(job.write(tmp_path / "in"), tmp_path / "run.parquet")
    result = merge(open_trace(tmp_path / "run.parquet"))
    assert [domain.offset_ns for domain in result.report.clock.domains] == [0]
    assert result.report.recorded_ns == result.report.propagated_ns
    assert result.report.most_delayed_ns == 0
