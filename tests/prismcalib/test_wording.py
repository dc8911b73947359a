from __future__ import annotations

import pytest

from prismcalib.wording import idle_inside, parts_of_spans
from prismtrace.schema import TraceHeader


@pytest.mark.parametrize(
    ("streams", "unit"),
    [
        ({0: "cpu thread 0", 1: "gloo worker 0"}, "operators"),
        ({0: "stream 7"}, "kernels"),
        ({}, "kernels"),
    ],
)
def test_a_cpu_job_has_operators(streams: dict[int, str], unit: str) -> None:
    header = TraceHeader(kind="calibrated", world_size=1, ranks=(0,), streams=streams)
    assert parts_of_spans(header) == unit
    assert idle_inside(header) == f"idle between {unit}"
