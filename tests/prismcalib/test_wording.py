from __future__ import annotations

import pytest

from prismcalib.wording import RankNames, parts_of_spans, share_text
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


@pytest.mark.parametrize(
    ("share", "text"), [(0.0625, "6.25%"), (-0.00001, "0.00%"), (0.0, "0.00%"), (-0.0004, "-0.04%")]
)
def test_what_rounds_to_nothing_has_no_sign(share: float, text: str) -> None:
    assert share_text(share) == text


def test_ranks_have_the_number_of_the_log_too_where_it_is_another() -> None:
    header = TraceHeader(kind="calibrated", world_size=3, ranks=(0, 1, 2))
    plain = RankNames.of(header)
    assert (plain.heads, plain.cells(1), plain.text(1)) == (("rank",), (1,), "1")
    assert plain.text(1, "stage 0") == "1 (stage 0)"
    anew = RankNames.of(header.model_copy(update={"extra": {"source_ranks": "0-4/2"}}))
    assert (anew.heads, anew.cells(1)) == (("rank", "in the log"), (1, 2))
    assert anew.cells(None) == (None, None)
    assert anew.text(2, "stage 0") == "2 (4 in the log, stage 0)"
