"""Changes of virtual ranks as people type them."""

from __future__ import annotations

import pytest

from prismcalib.edits import Scale, SetDuration
from prismreplay.errors import PlanError
from prismreplay.plan import compile_plan
from prismreplay.run.injecting import edits_of
from tests.prismreplay.run.jobs import job


def test_what_a_text_means():
    (one, other) = edits_of(["rank=4-5,kind=compute,scale=1.4", "name=attn,set=3ms"], [0])
    assert one == Scale("rank IN (4, 5) AND kind = 'compute' AND rank NOT IN (0)", 1.4)
    assert other == SetDuration("name LIKE '%attn%' AND rank NOT IN (0)", 3_000_000)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rank=4", "does not say what to change"),
        ("rank=4,scale=fast", "no number"),
        ("rank=4,scale=-1", "from 0 on"),
        ("rank=four,scale=2", "four"),
        ("colour=red,scale=2", "not understood"),
        ("scale=2,set=3ms", "twice"),
        ("rank 4,scale=2", "no name=value"),
        ("rank=4,set=long", "long"),
        ("rank=0-1,scale=2", "run for real"),
    ],
)
def test_what_is_refused(text, why):
    with pytest.raises(PlanError, match=why):
        edits_of([text], [0, 1])


def test_a_slow_virtual_rank_arrives_later():
    trace = job(steps=2)
    usual, slow = (
        compile_plan(trace, [0], edits_of(texts, [0]))
        for texts in ([], ["rank=5,kind=compute,scale=2"])
    )
    assert slow.boundary.edge_weight_ns.sum() > usual.boundary.edge_weight_ns.sum()
