"""The longest waits, for whom, and what that rank did meanwhile."""

from __future__ import annotations

import json

import polars as pl
import pytest

from prismcalib import critical_path, longest_waits, merge, synth
from prismcalib.cli import app
from prismcalib.errors import MergeInputError
from prismtrace.querying import query
from prismtrace.trace import Trace, write
from tests.prismtrace.conftest import build_trace


def made():
    """Three ranks: rank 2 waits for rank 1, which computes and waits for rank 0 before."""
    group = {"kind": "all_reduce", "stream": 1, "group": 0, "dtype": "float32", "bytes": 4}
    pair = {"stream": 1, "group": 0, "seq": 9, "bytes": 4, "transfer_ns": 0}
    return build_trace(
        {"rank": 0, "name": "slow", "start_ns": 0, "dur_ns": 40},
        {**pair, "rank": 0, "kind": "send", "peer": 1, "start_ns": 40, "dur_ns": 0, "wait_ns": 0},
        {**group, "rank": 0, "seq": 0, "start_ns": 40, "dur_ns": 35, "wait_ns": 30}
        | {"transfer_ns": 5, "step": 3, "phase": "backward"},
        {"rank": 1, "name": "short", "start_ns": 0, "dur_ns": 10},
        {**pair, "rank": 1, "kind": "recv", "peer": 0, "start_ns": 10, "dur_ns": 30}
        | {"wait_ns": 30},
        {"rank": 1, "start_ns": 45, "dur_ns": 25},
        {**group, "rank": 1, "seq": 0, "start_ns": 70, "dur_ns": 5, "wait_ns": 0}
        | {"transfer_ns": 5, "step": 3, "phase": "backward"},
        {**group, "rank": 2, "seq": 0, "start_ns": 5, "dur_ns": 70, "wait_ns": 65}
        | {"transfer_ns": 5, "step": 3, "phase": "backward"},
        kind="calibrated",
        steps=(3,),
    )


def test_each_communication_once_and_what_the_last_rank_did():
    first, second = longest_waits(made())
    assert (first.rank, first.wait_ns, first.last) == (2, 65, 1)
    assert (first.kind, first.group, first.seq) == ("all_reduce", "world", 0)
    assert (first.step, first.phase) == (3, "backward")
    assert (first.waiting, first.all_wait_ns) == (2, 95)
    # From 5 to 70: computes 5 and 25, waits 30 for rank 0; 5 are neither.
    assert (first.computed_ns, first.waited_ns, first.other_ns) == (30, 30, 5)
    assert (first.longest, first.longest_ns) == ("compute", 25)
    assert (second.rank, second.kind, second.wait_ns, second.last) == (1, "recv", 30, 0)
    assert (second.computed_ns, second.longest, second.longest_ns) == (30, "slow", 30)
    assert longest_waits(made(), limit=1) == (first,)


def test_a_straggler_is_waited_for():
    job = synth.JobSpec(pp=1, tp=1, dp=4, layers_per_stage=2, steps=2, stragglers={2: 1.5})
    calibrated = merge(synth.generate(job)).trace
    found = longest_waits(calibrated, limit=4)
    assert {one.last for one in found} == {2}
    waits = [one.wait_ns for one in found]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == calibrated.nodes.select("wait_ns").collect()["wait_ns"].max()
    for one in found:
        assert one.computed_ns + one.waited_ns + one.other_ns == one.wait_ns
        assert min(one.computed_ns, one.waited_ns, one.other_ns, one.longest_ns) >= 0


def test_the_command(tmp_path, capsys):
    import prismtrace as pt

    path = tmp_path / "run.parquet"
    pt.write(made(), path)
    app(["waits", str(path)], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("longest waits, one line for each communication")
    assert lines[3].split("  ")[0] == "65 ns"
    assert "2 ranks" in lines[3]
    app(["waits", str(path), "--json", "--limit", "1"], standalone_mode=False)
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps_looked_at"]["left_out_before"] == []
    (only,) = answer["waits"]
    assert (only["rank"], only["last"], only["waited_ns"]) == (2, 1, 30)


def test_idle_time_inside_spans_is_no_computation(tmp_path, capsys):
    import prismtrace as pt

    trace = made()
    busy = {"slow": 10, "short": 10, "compute": 5}
    name = pl.col("name").cast(pl.String).fill_null("compute")
    local = pl.col("kind").cast(pl.String) == "compute"
    known = pl.when(local).then(name.replace_strict(busy, default=None, return_dtype=pl.Int64))
    spans = Trace(header=trace.header, nodes=trace.nodes.with_columns(x_busy_ns=known))
    first, second = longest_waits(spans)
    # Of its span of 25, 20 idle; of the span of 10 that began 5 before, nothing.
    assert (first.computed_ns, first.inner_idle_ns) == (30, 20)
    # The last 30 of a span of 40 that is idle for 30, in proportion.
    assert (second.computed_ns, second.inner_idle_ns) == (30, 22)
    path = tmp_path / "spans.parquet"
    pt.write(spans, path)
    app(["waits", str(path)], standalone_mode=False)
    heads, _, row, *_ = capsys.readouterr().out.splitlines()[1:]
    assert [head for head in ("computed", "idle inside") if head in heads] == [
        "computed",
        "idle inside",
    ]
    assert "10 ns" in row
    assert "20 ns" in row


def test_nobody_waits(tmp_path, capsys):
    import prismtrace as pt

    path = tmp_path / "alone.parquet"
    pt.write(build_trace({"start_ns": 0, "dur_ns": 1}, kind="calibrated"), path)
    app(["waits", str(path)], standalone_mode=False)
    assert capsys.readouterr().out == "nobody waits for anybody\n"


@pytest.mark.parametrize(
    ("kind", "hint"),
    [("recorded", "run `prismcalib merge`"), ("slice", "all slices"), ("bare", "has no times")],
)
def test_what_has_no_common_timeline_is_refused(kind, hint):
    with pytest.raises(MergeInputError, match="no common timeline") as caught:
        longest_waits(build_trace({}, kind=kind))
    assert hint in caught.value.hint


def test_a_group_that_the_job_numbered_is_shown_by_its_ranks(tmp_path, capsys):
    """torch's name "3" of a group is not the id 0 that SQL shows for it."""
    trace = made()
    (group,) = trace.header.groups
    numbered = group.model_copy(update={"name": "3"})
    renamed = Trace(
        header=trace.header.model_copy(update={"groups": (numbered,)}), nodes=trace.nodes
    )
    write(renamed, tmp_path / "run.parquet")
    assert {one.group for one in longest_waits(renamed)} == {"[0-2]"}
    assert set(critical_path(renamed).segments["group"].drop_nulls()) <= {"[0-2]"}
    groups = query(renamed, "SELECT id, name, label FROM groups").collect()
    assert groups.rows() == [(0, "3", "[0-2]")]
    path = str(tmp_path / "run.parquet")
    app(
        ["what-if", path, "--scale", "group_label = '[0-2]' AND kind = 'all_reduce'", "2"],
        standalone_mode=False,
    )
    assert "[0-2]" in capsys.readouterr().out
