import polars as pl
import pytest

from prismcalib.build import (
    graph_from_trace,
    lag_column,
    require_all_members,
    require_all_ranks,
    sorted_rows,
    structure_graph,
)
from prismcalib.errors import CalibError, CoverageError, MergeInputError, MissingMemberError
from prismcalib.merging import merge
from prismcalib.rows import absent_text
from prismtrace.schema import INDEX_BITS
from prismtrace.trace import Trace


def changed(run, *columns, header=None, **more):
    rows = run.table.with_columns(*columns, **more)
    return Trace(header=header or run.header, nodes=rows.lazy())


def where(rank, index):
    return (pl.col("rank") == rank) & (pl.col("index") == index)


def test_rows_become_a_graph(make_run):
    run = make_run(ranks=4, steps=1)
    graph, rows = graph_from_trace(run.trace)
    assert graph.rows == rows.height == len(run.rows)
    # Two pairs, one send-recv pair, one over the world.
    assert sorted(graph.instance_size.tolist()) == [2, 2, 2, 4]
    assert (graph.members_present == graph.instance_size).all()
    for row in range(graph.rows):
        node = rows.row(row, named=True)
        assert graph.deps(row).tolist() == [row - distance for distance in node["deps"]]
        assert (graph.instance[row] >= 0) == (node["seq"] is not None)
        assert graph.duration_ns[row] == node["dur_ns"]
        if not node["deps"]:
            assert graph.release_ns[row] == node["start_ns"]
    assert "rank 1 index 1 all_reduce group=pair_0 seq=0" in graph.label(
        rows.filter(pl.col("rank") < 1).height + 1
    )
    assert '"forward"' in graph.label(0)


def test_the_order_of_files_does_not_matter(make_run):
    run = make_run()
    shuffled = Trace(header=run.header, nodes=run.table.sample(fraction=1, shuffle=True).lazy())
    assert sorted_rows(shuffled).equals(run.table)


def test_edges_to_other_ranks_and_lags(make_run):
    run = make_run(ranks=2, steps=1)
    trace = changed(
        run,
        xdeps=pl.when(where(1, 2)).then(pl.lit([0, 1], pl.List(pl.Int64))),
        lag_ns=pl.when(where(1, 2)).then(pl.lit([5, 6, 7], pl.List(pl.Int64))),
    )
    graph, rows = graph_from_trace(trace)
    row = rows.with_row_index("row").filter(where(1, 2))["row"].item()
    assert graph.deps(row).tolist() == [row - 1, 0, 1]
    assert graph.lags(row).tolist() == [5, 6, 7]
    assert graph.lags(row - 1).tolist() == [0]
    column = lag_column(graph, graph.dep_lag_ns, rows["deps"])
    assert column[row].to_list() == [5, 6, 7]
    assert column.null_count() == graph.rows - 1


def test_transfers_of_calibrated_members_are_their_durations(make_run):
    run = make_run(ranks=2, steps=1)
    trace = changed(run, transfer_ns=pl.when(where(0, 1)).then(77))
    graph, _ = graph_from_trace(trace)
    assert graph.duration_ns[1] == 77


def test_a_communication_without_seq_waits_for_nobody(make_run):
    run = make_run(ranks=2, steps=1)
    graph = structure_graph(
        sorted_rows(changed(run, seq=pl.when(pl.col("group") == 0).then(pl.col("seq")))), run.header
    )
    assert graph.instances == 1


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"deps": pl.when(where(1, 2)).then(pl.lit([3], pl.List(pl.UInt32))).otherwise("deps")},
         "not in the trace"),
        ({"deps": pl.when(where(0, 2)).then(pl.lit([9], pl.List(pl.UInt32))).otherwise("deps")},
         "not in the trace"),
        ({"xdeps": pl.when(where(1, 2)).then(pl.lit([99], pl.List(pl.Int64)))}, "not in the trace"),
        ({"id": pl.col("id") + 1}, "do not number the rows"),
        ({"index": pl.when(where(1, 2)).then(7).otherwise("index"),
          "id": pl.when(where(1, 2)).then((1 << INDEX_BITS) + 7).otherwise("id")},
         "do not number the rows"),
        ({"group": pl.col("group") + 50}, "a group of id 50"),
        ({"lag_ns": pl.when(where(1, 2)).then(pl.lit([1, 2], pl.List(pl.Int64)))}, "differ in len"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(make_run, columns, text):
    run = make_run(ranks=2, steps=1)
    trace = changed(run, **columns)
    with pytest.raises(MergeInputError, match=text):
        graph_from_trace(trace)


def test_an_empty_trace_is_refused(make_run):
    run = make_run()
    with pytest.raises(MergeInputError, match="no rows"):
        sorted_rows(Trace(header=run.header, nodes=run.table.clear().lazy()))


def test_absent_ranks_are_named(make_run):
    run = make_run(ranks=6, steps=1)
    require_all_ranks(run.table, run.header)
    with pytest.raises(CoverageError) as caught:
        require_all_ranks(run.table.filter(pl.col("rank") == 2), run.header)
    assert "1 of 6 ranks present: ranks 0-1, 3-5 missing" in str(caught.value)
    assert "world, pair_0" in str(caught.value)


def test_absent_members_are_named(make_run):
    run = make_run(ranks=4, steps=2)
    rows = run.table.filter(~where(2, run.table.filter(pl.col("rank") == 2).height - 1))
    with pytest.raises(MissingMemberError) as caught:
        require_all_members(structure_graph(rows, run.header), rows, run.header)
    assert "all_reduce seen on 3 of 4 ranks" in str(caught.value)
    assert "group=world seq=1 missing ranks=2" in str(caught.value)
    assert len(caught.value.rows) == 3


def test_an_absent_receiver_is_named(make_run):
    run = make_run(ranks=4, steps=1)
    rows = run.table.with_columns(
        seq=pl.when(pl.col("kind") != "recv").then(pl.col("seq")),
    )
    with pytest.raises(MissingMemberError) as caught:
        require_all_members(structure_graph(rows, run.header), rows, run.header)
    assert "send seen on 1 of 2 ranks" in str(caught.value)
    assert "missing ranks=2" in str(caught.value)


def test_a_rank_that_takes_part_twice_is_refused(make_run):
    run = make_run(ranks=4, steps=2)
    world = (pl.col("group") == 0) & (pl.col("kind") == "all_reduce")
    # Rank 1 twice in seq 0 and rank 2 not at all: the number of members is right.
    rows = run.table.with_columns(
        seq=pl.when(world & (pl.col("rank") == 1)).then(0)
        .when(world & (pl.col("rank") == 2)).then(1)
        .otherwise("seq")
    )  # fmt: skip
    with pytest.raises(MergeInputError, match="rank 1 takes part twice"):
        require_all_members(structure_graph(rows, run.header), rows, run.header)
    # More members than the group has ranks.
    rows = run.table.with_columns(seq=pl.when(world).then(0).otherwise("seq"))
    with pytest.raises(CalibError, match="8 members but expects 4"):
        structure_graph(rows, run.header)


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("start_ns", None, "no start or duration"),
        ("dur_ns", None, "no start or duration"),
        ("dur_ns", -1, "negative duration"),
        ("start_ns", 2**63 - 1, "outside of 64 bits"),
    ],
)
def test_a_merged_trace_has_times_that_can_be(make_run, column, value, problem):
    trace = merge(make_run().trace).trace
    one = pl.when(where(2, 3)).then(pl.lit(value, pl.Int64)).otherwise(pl.col(column))
    broken = Trace(header=trace.header, nodes=trace.nodes.with_columns(one.alias(column)))
    with pytest.raises(MergeInputError, match=problem) as caught:
        graph_from_trace(broken)
    assert caught.value.where.endswith("rank=2 index=3")


def test_a_merged_trace_has_rows_of_all_its_ranks(make_run):
    trace = merge(make_run().trace).trace
    cut = Trace(header=trace.header, nodes=trace.nodes.filter(pl.col("rank") % 2 == 0))
    with pytest.raises(CoverageError, match="no rows of ranks 1, 3"):
        graph_from_trace(cut)


def test_absent_ranks_of_a_world_of_any_size():
    assert absent_text([0, 2], 6) == "1, 3-5"
    assert absent_text([1, 5], 2**60) == f"0, 2-4, 6-{2**60 - 1}"
