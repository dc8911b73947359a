import polars as pl
import pytest

from prismcalib.build import graph_from_trace, sorted_rows, structure_graph
from prismcalib.errors import CalibError
from prismcalib.merging import merge
from prismcalib.paths import critical_path
from prismcalib.propagation import critical_rows, propagate, slack
from prismcalib.waiting import SEND_BYTES, WaitRules, apply_wait_rules, ready_times, waiting_rows
from prismtrace.schema import INDEX_BITS, ProcessGroup, TraceHeader
from prismtrace.trace import Trace, node_schema

ENGINES = ("networkx", "python", "array")


def trace_of(kind, arrivals, transfers, *, peers=(None, None, None), sizes=(8, 8, 8), **columns):
    """Ranks compute, do one communication together at their arrivals, and compute again."""
    rows = []
    for rank, arrival in enumerate(arrivals):
        kinds = kind if isinstance(kind, tuple) else (kind,) * len(arrivals)
        for index, (name, duration) in enumerate(
            (("compute", arrival), (kinds[rank], transfers[rank]), ("compute", 100))
        ):
            extra = {name: values[rank] for name, values in columns.items()}
            shared = {"group": 0, "seq": 0, "peer": peers[rank], "bytes": sizes[rank], **extra}
            rows.append(
                {
                    "id": rank << INDEX_BITS | index,
                    "rank": rank,
                    "index": index,
                    "kind": name,
                    "stream": 0,
                    "real": True,
                    "deps": [1] if index else [],
                    "start_ns": 0,
                    "dur_ns": duration,
                    **(shared if index == 1 else {}),
                }
            )
    schema = {**node_schema(), **{name: pl.List(pl.Int64) for name in columns}}
    ranks = tuple(range(len(arrivals)))
    return Trace(
        header=TraceHeader(
            kind="recorded",
            world_size=len(ranks),
            ranks=ranks,
            groups=(ProcessGroup(id=0, name="world", ranks=ranks),),
        ),
        nodes=pl.DataFrame(rows, schema=schema).lazy(),
    )


def waits_of(trace, rules):
    """Wait of every rank's communication."""
    rows = sorted_rows(trace)
    base = structure_graph(rows, trace.header)
    graph = apply_wait_rules(base, rows, trace.header, rules)
    durations = rows["dur_ns"].to_numpy()
    graph = type(graph)(
        duration_ns=durations,
        dep_offsets=graph.dep_offsets,
        dep_rows=graph.dep_rows,
        instance=graph.instance,
        instance_size=graph.instance_size,
        wait_offsets=graph.wait_offsets,
        wait_rows=graph.wait_rows,
    )
    timings = [propagate(graph, engine) for engine in ENGINES]
    for timing, engine in zip(timings, ENGINES, strict=True):
        assert (timing.end_ns == timings[0].end_ns).all()
        assert (timing.ready_ns == ready_times(graph, timing.start_ns)).all()
        late = slack(graph, timing, engine)
        assert (late[critical_rows(graph, timing)] == 0).all()
    return timings[0].wait_ns[1::3].tolist()


def test_by_default_all_wait_for_all():
    trace = trace_of("broadcast", (10, 30, 20), (5, 5, 5), peers=(0, 0, 0))
    assert waits_of(trace, WaitRules()) == [20, 0, 10]
    assert not WaitRules()


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
def test_from_the_root(kind):
    rules = WaitRules(rooted=True)
    assert waits_of(trace_of(kind, (10, 30, 20), (5,) * 3, peers=(2,) * 3), rules) == [10, 0, 0]


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_to_the_root(kind):
    rules = WaitRules(rooted=True)
    assert waits_of(trace_of(kind, (10, 30, 20), (5,) * 3, peers=(2,) * 3), rules) == [0, 0, 10]


def test_an_unknown_root_and_other_kinds_keep_waiting():
    rules = WaitRules(rooted=True)
    assert waits_of(trace_of("reduce", (10, 30, 20), (5,) * 3, peers=(2, None, 2)), rules) == [
        20,
        0,
        10,
    ]
    assert waits_of(trace_of("all_reduce", (10, 30, 20), (5,) * 3), rules) == [20, 0, 10]


@pytest.mark.parametrize(
    ("limit", "sizes", "waits"),
    [(9, (8, 8), [0, 0]), (8, (8, 8), [20, 0]), (9, (8, None), [20, 0]), (0, (8, 8), [20, 0])],
)
def test_eager_senders_go_on(limit, sizes, waits):
    trace = trace_of(("send", "recv"), (10, 30), (5, 5), peers=(1, 0), sizes=sizes)
    assert waits_of(trace, WaitRules(eager_below=limit)) == waits


def test_eager_receivers_wait_for_the_sender():
    trace = trace_of(("send", "recv"), (30, 10), (5, 5), peers=(1, 0), sizes=(8, 8))
    assert waits_of(trace, WaitRules(eager_below=9)) == [0, 20]


def test_all_to_all_waits_for_those_that_send():
    rules = WaitRules(sparse_all_to_all=True)
    arrivals, transfers = (10, 30, 20), (5, 5, 5)
    silent = trace_of("all_to_all", arrivals, transfers, sizes=(8, 0, 8))
    assert waits_of(silent, rules) == [10, 0, 0]
    unknown = trace_of("all_to_all", arrivals, transfers, sizes=(8, None, 8))
    assert waits_of(unknown, rules) == [20, 0, 10]
    pairs = trace_of(
        "all_to_all", arrivals, transfers, **{SEND_BYTES: ([0, 4, 4], [0, 4, 4], [4, 4, 4])}
    )
    # Rank 1, the last, sends nothing to rank 0.
    assert waits_of(pairs, rules) == [10, 0, 10]


def test_a_merge_keeps_its_rules_and_explains_times_with_them(make_run):
    trace = make_run(slow_rank=2).trace
    strict = merge(trace)
    eager = merge(trace, rules=WaitRules(eager_below=1 << 30), verify=True)
    assert eager.report.instances == strict.report.instances
    assert eager.report.difference_ns == strict.report.difference_ns == 0
    for result in (strict, eager):
        graph, rows = graph_from_trace(result.trace)
        timing = propagate(graph)
        assert (timing.start_ns == rows["start_ns"].to_numpy()).all()
        assert (timing.wait_ns == rows["wait_ns"].fill_null(0).to_numpy()).all()
        path = critical_path(result.trace)
        assert path.unmatched_ns == 0
    sends = pl.col("kind") == "send"
    assert strict.nodes.filter(sends)["wait_ns"].sum() > 0
    assert eager.nodes.filter(sends)["wait_ns"].sum() == 0
    assert graph.wait_rows is not None
    assert waiting_rows(graph).sum() == eager.nodes["transfer_ns"].is_not_null().sum()
    # Merging again without rules forgets them.
    again = merge(eager.trace)
    assert again.nodes.equals(strict.nodes)
    assert again.header == strict.header


def test_negative_sizes_are_refused():
    with pytest.raises(CalibError):
        WaitRules(eager_below=-1)
