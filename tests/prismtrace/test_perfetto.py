from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from decimal import Decimal

import polars as pl
import pytest

from prismtrace import blocks
from prismtrace.converters import convert
from prismtrace.errors import OutputError, TraceError
from prismtrace.export.perfetto import STEPS_TID, assign_lanes, export_perfetto
from prismtrace.exporting import export
from prismtrace.trace import open_trace

AR = {"kind": "all_reduce", "group": 0, "seq": 0}


def exported(trace, folder, name="run.json"):
    """The file as a list of events, numbers exact."""
    path = folder / name
    export_perfetto(trace, path)
    content = path.read_bytes()
    text = gzip.decompress(content) if name.endswith(".gz") else content
    return json.loads(text, parse_float=Decimal)


def events(trace, folder, phase):
    return [event for event in exported(trace, folder)["traceEvents"] if event["ph"] == phase]


def assert_nested(spans):
    """Spans of one thread either follow each other or lie within each other."""
    threads: dict[tuple[int, int], list[tuple[Decimal, Decimal]]] = {}
    for span in spans:
        threads.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["dur"]))
    for times in threads.values():
        open_until: list[Decimal] = []
        for ts, dur in sorted(times, key=lambda time: (time[0], -time[1])):
            while open_until and open_until[-1] <= ts:
                open_until.pop()
            assert not open_until or ts + dur <= open_until[-1]
            open_until.append(ts + dur)


def test_processes_are_ranks_and_threads_are_streams(job, tmp_path):
    named = {
        (event["name"], event["pid"], event.get("tid")): event["args"]
        for event in events(job, tmp_path, "M")
    }
    assert named["process_name", 0, None] == {"name": "rank 0"}
    assert named["process_sort_index", 1, None] == {"sort_index": 1}
    assert named["thread_name", 1, 0] == {"name": "stream 7"}
    assert named["thread_name", 0, 1] == {"name": "stream 20"}
    assert named["thread_name", 0, STEPS_TID] == {"name": "steps"}
    assert len([key for key in named if key[0] == "thread_name"]) == 4 + 2


def test_steps_have_a_thread_of_their_own(make_trace, tmp_path):
    # On rank 0 step 4 begins while step 3 still communicates; rank 1 has no step.
    rows = [
        {"step": 3, "start_ns": 0, "dur_ns": 10},
        {"step": 3, "start_ns": 10, "dur_ns": 50, "stream": 1},
        {"step": 4, "start_ns": 40, "dur_ns": 30},
        {"start_ns": 70, "dur_ns": 5},
        {"rank": 1, "start_ns": 0, "dur_ns": 5},
    ]
    trace = make_trace(*rows)
    spans = events(trace, tmp_path, "X")
    steps = [
        (e["pid"], e["name"], e["ts"], e["dur"], e["tid"]) for e in spans if e["cat"] == "step"
    ]
    assert steps == [
        (0, "step 3", Decimal("0.000"), Decimal("0.040"), STEPS_TID),
        (0, "step 4", Decimal("0.040"), Decimal("0.030"), STEPS_TID),
    ]
    assert_nested(spans)
    named = [e["args"]["name"] for e in events(trace, tmp_path, "M") if e["name"] == "thread_name"]
    assert named.count("steps") == 1


def test_times_are_microseconds_from_the_first_start(job, tmp_path):
    whole = exported(job, tmp_path)
    assert whole["baseTimeNanoseconds"] == 1_000
    drawn = ("compute", "communication")
    spans = [e for e in whole["traceEvents"] if e["ph"] == "X" and e["cat"] in drawn]
    assert len(spans) == 7
    assert [(e["ts"], e["dur"]) for e in spans if e["pid"] == 1] == [
        (Decimal("0.000"), Decimal("0.050")),
        (Decimal("0.050"), Decimal("0.030")),
        (Decimal("0.080"), Decimal("0.015")),
    ]


def test_large_times_stay_exact(make_trace, tmp_path):
    start = 1_753_000_000_123_456_789
    rows = [{"start_ns": start, "dur_ns": 1}, {"start_ns": start + 10**15 + 1, "dur_ns": 10**15}]
    first, second = events(make_trace(*rows), tmp_path, "X")
    assert (first["ts"], first["dur"]) == (Decimal(0), Decimal("0.001"))
    assert (second["ts"], second["dur"]) == (Decimal("1000000000000.001"), Decimal(10**12))


def test_arguments_say_what_the_row_says(job, tmp_path):
    spans = events(job, tmp_path, "X")
    reduce = next(s for s in spans if s["pid"] == 0 and s["cat"] == "communication")
    assert reduce["name"] == "all_reduce world"
    expected = {"kind": "all_reduce", "group": "world", "seq": 0, "bytes": 64, "step": 0}
    expected |= {"dtype": "float32", "reduce_op": "sum", "wait_ns": 20, "transfer_ns": 30}
    assert reduce["args"] == {**expected, "index": 1}
    gemm = next(s for s in spans if s["pid"] == 1 and s["cat"] == "compute")
    assert gemm["name"] == 'gemm<128, "x">'
    assert gemm["args"]["critical"] is True
    assert gemm["cname"] == "terrible"
    assert [s for s in spans if "cname" in s] == [
        s for s in spans if s.get("args", {}).get("critical")
    ]


def test_virtual_spans_are_marked(make_trace, tmp_path):
    row = {"start_ns": 0, "dur_ns": 1}
    virtual, real = events(make_trace({**row, "real": False}, {**row, "rank": 1}), tmp_path, "X")
    assert virtual["args"]["real"] is False
    assert "real" not in real["args"]


def test_waits_are_nested(job, tmp_path):
    spans = events(job, tmp_path, "X")
    waits = [(s["pid"], s["tid"], s["ts"], s["dur"]) for s in spans if s["name"] == "wait"]
    assert waits == [
        (0, 1, Decimal("0.030"), Decimal("0.020")),
        (1, 1, Decimal("0.080"), Decimal("0.005")),
    ]
    assert_nested(spans)


def test_flows_lead_from_the_last_arrival_to_those_who_waited(job, tmp_path):
    flows = [e for e in exported(job, tmp_path)["traceEvents"] if e["ph"] in "sf"]
    assert [(e["ph"], e["id"], e["pid"], e["tid"], e["ts"]) for e in flows] == [
        ("s", 1, 1, 1, Decimal("0.050")),
        ("f", 1, 0, 1, Decimal("0.050")),
        ("s", 2, 0, 1, Decimal("0.085")),
        ("f", 2, 1, 1, Decimal("0.085")),
    ]
    assert all(e["bp"] == "e" for e in flows if e["ph"] == "f")
    assert len({(e["cat"], e["name"]) for e in flows}) == 1


def enclosed(flow, spans):
    return any(
        span["pid"] == flow["pid"]
        and span["tid"] == flow["tid"]
        and span["ts"] <= flow["ts"] < span["ts"] + span["dur"]
        for span in spans
    )


def test_one_flow_for_each_member_that_waited(make_trace, tmp_path):
    rows = [{**AR, "rank": rank, "start_ns": 10 * rank, "dur_ns": 100} for rank in range(5)]
    rows.append({**AR, "rank": 5, "start_ns": 40, "dur_ns": 60})  # as late as rank 4
    trace = make_trace(*rows)
    ends = events(trace, tmp_path, "f")
    assert sorted(event["pid"] for event in ends) == [0, 1, 2, 3]
    assert {event["pid"] for event in events(trace, tmp_path, "s")} == {4}
    spans = events(trace, tmp_path, "X")
    assert all(enclosed(flow, spans) for flow in ends + events(trace, tmp_path, "s"))


def test_flows_run_forward_even_where_clocks_disagree(make_trace, tmp_path):
    early = {**AR, "rank": 0, "start_ns": 0, "dur_ns": 10}
    late = {**AR, "rank": 1, "start_ns": 500, "dur_ns": 10}
    trace = make_trace(early, late, kind="recorded")
    (begin,), (end,) = (events(trace, tmp_path, phase) for phase in "sf")
    assert (begin["pid"], end["pid"]) == (0, 1)
    assert begin["ts"] < end["ts"]
    assert begin["name"] == end["name"] == "not aligned"
    spans = events(trace, tmp_path, "X")
    assert enclosed(begin, spans)
    assert enclosed(end, spans)


def test_no_flow_without_an_instance_or_without_length(make_trace, tmp_path):
    orphans = [{**AR, "rank": rank, "seq": None, "start_ns": rank, "dur_ns": 5} for rank in (0, 1)]
    empty = [{**AR, "rank": rank, "start_ns": 10 + rank, "dur_ns": 0} for rank in (0, 1)]
    assert events(make_trace(*orphans, *empty), tmp_path, "s") == []


def test_overlapping_spans_move_to_further_threads(make_trace, tmp_path):
    p2p = {"group": 0, "seq": 0, "batch": 1, "stream": 1}
    rows = [
        {**p2p, "kind": "send", "peer": 1, "start_ns": 10, "dur_ns": 20},
        {**p2p, "kind": "recv", "peer": 1, "start_ns": 15, "dur_ns": 30},
        {"start_ns": 45, "dur_ns": 5, "stream": 1},
        {**p2p, "kind": "recv", "peer": 0, "rank": 1, "start_ns": 10, "dur_ns": 20},
        {**p2p, "kind": "send", "peer": 0, "rank": 1, "start_ns": 8, "dur_ns": 30},
    ]
    trace = make_trace(*rows)
    spans = events(trace, tmp_path, "X")
    assert_nested(spans)
    assert len({s["tid"] for s in spans if s["pid"] == 0}) == 2
    assert [s["tid"] for s in spans if s["pid"] == 0 and s["cat"] == "compute"] == [1]
    names = [e["args"]["name"] for e in events(trace, tmp_path, "M") if e["name"] == "thread_name"]
    assert names == ["stream 20", "stream 20 (overlapping 2)"] * 2
    flows = events(trace, tmp_path, "s") + events(trace, tmp_path, "f")
    assert len(flows) == 2
    assert all(enclosed(flow, spans) for flow in flows)


@pytest.mark.parametrize(
    ("starts", "durations", "lanes"),
    [
        ([], [], []),
        ([0, 5, 10], [5, 5, 5], [0, 0, 0]),
        ([0, 4, 10], [5, 5, 5], [0, 1, 0]),
        ([0, 0, 0], [5, 5, 5], [0, 1, 2]),
        ([0, 0, 5], [0, 5, 1], [0, 0, 0]),
        ([-5, 1], [5, 1], [0, 0]),
    ],
)
def test_lanes(starts, durations, lanes):
    assert assign_lanes(starts, durations) == lanes


def test_streams_without_a_name_or_with_a_text(make_trace, tmp_path):
    rows = [{"start_ns": 0, "dur_ns": 1, "stream": stream} for stream in (0, 1)]
    trace = make_trace(*rows, streams={1: "thread 81"})
    meta = events(trace, tmp_path, "M")
    names = [event["args"]["name"] for event in meta if event["name"] == "thread_name"]
    assert names == ["stream 0", "thread 81"]


def test_gzip_when_the_name_says_so(job, tmp_path):
    assert exported(job, tmp_path, "run.json.gz") == exported(job, tmp_path)
    first = (tmp_path / "run.json.gz").read_bytes()
    export_perfetto(job, tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == first


def test_blocks_change_nothing(job, tmp_path, monkeypatch):
    whole = exported(job, tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 2)

    def comparable(trace):
        # Numbers of flows follow the order in which instances are read.
        return sorted(
            json.dumps({k: v for k, v in event.items() if k != "id"}, sort_keys=True, default=str)
            for event in trace["traceEvents"]
        )

    assert comparable(exported(job, tmp_path)) == comparable(whole)


def test_rows_without_times_are_left_out(make_trace, tmp_path):
    assert len(events(make_trace({}, {"start_ns": 5, "dur_ns": 1}), tmp_path, "X")) == 1


def test_a_bare_graph_cannot_be_drawn(make_trace, tmp_path):
    with pytest.raises(TraceError, match="nothing to draw"):
        export_perfetto(make_trace({}, kind="bare"), tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_old_file(job, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    broken = type(job)(job.header, job.nodes.with_columns(rank=pl.lit("x").cast(pl.Int32)))
    with pytest.raises(pl.exceptions.PolarsError):
        export_perfetto(broken, path)
    assert path.read_text() == "old"
    with pytest.raises(OutputError):
        export_perfetto(job, tmp_path / "absent" / "run.json")


def test_progress_counts_all_rows(job, tmp_path):
    counts: list[int] = []
    export(job, tmp_path / "run.json", to="perfetto", advance=counts.append)
    assert sum(counts) == 7


def test_unknown_format(job, tmp_path):
    with pytest.raises(ValueError, match="html"):
        export(job, tmp_path / "run.html", to="html")


def test_a_recorded_job(data_dir, tmp_path):
    """Real clocks, real overlaps: still nested, and every arrow begins and ends in a span."""
    convert(data_dir / "kineto" / "dlrm8", tmp_path / "run.parquet", grain="kernel")
    found = exported(open_trace(tmp_path / "run.parquet"), tmp_path)["traceEvents"]
    spans = [event for event in found if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == set(range(8))
    assert_nested(spans)
    flows = [event for event in found if event["ph"] in "sf"]
    assert all(enclosed(flow, spans) for flow in flows)
    # 8 instances of 8 ranks each, less those that came last together.
    assert 0 < len(flows) // 2 <= 8 * 7
    pairs = zip(flows[::2], flows[1::2], strict=True)
    assert all(s["id"] == f["id"] and s["ts"] <= f["ts"] for s, f in pairs)


QUERY = """
select 'processes', count(*) from process where name like 'rank %'
union all select 'threads', count(*) from thread where name like 'stream %'
union all select 'spans', count(*) from slice where name != 'wait' and category != 'step'
union all select 'steps', count(*) from slice where category = 'step'
union all select 'waits', count(*) from slice where name = 'wait' and depth = 1
union all select 'flows', count(*) from flow
union all select 'problems', ifnull(sum(value), 0) from stats
    where severity in ('error', 'data_loss') and value > 0;
"""


def test_perfetto_reads_it(job, tmp_path):
    """What Perfetto's own importer makes of the file."""
    program = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if program is None:
        pytest.skip("trace_processor_shell is not installed (it comes from perfetto.dev)")
    export_perfetto(job, tmp_path / "run.json")
    (tmp_path / "query.sql").write_text(QUERY)
    command = [program, "-q", str(tmp_path / "query.sql"), str(tmp_path / "run.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.replace('"', "").split(",") for line in done.stdout.splitlines() if "," in line]
    counts = {key: int(value) for key, value in lines if value.isdecimal()}
    assert counts == {
        "processes": 2,
        "threads": 4,
        "spans": 7,
        "steps": 2,
        "waits": 2,
        "flows": 2,
        "problems": 0,
    }
