"""Every rule has an example that breaks it; the same trace without the fault is valid."""

from __future__ import annotations

import polars as pl
import pytest

from prismtrace import blocks
from prismtrace.schema import ProcessGroup
from prismtrace.trace import node_schema
from prismtrace.validation import RULES, Violation, validate

AR = {"kind": "all_reduce", "group": 0, "seq": 0, "bytes": 8, "dtype": "int8", "reduce_op": "sum"}
SEND = {"kind": "send", "group": 0, "seq": 0, "peer": 1, "bytes": 8}
RECV = {"kind": "recv", "group": 0, "seq": 0, "peer": 0, "bytes": 8}


def span(start, end, **more):
    return {"start_ns": start, "dur_ns": end - start, **more}


def world(*ranks):
    return (ProcessGroup(id=0, name="world", ranks=ranks),)


# rule -> (rows, header facts) of a trace that breaks it, then of a valid one
CASES = {
    "unsorted": (
        ([{"rank": 1}, {"rank": 0}], {}),
        ([{"rank": 0}, {"rank": 1}], {}),
    ),
    "duplicate-id": (
        ([{"index": 0}, {"index": 0}], {}),
        ([{"index": 0}, {"index": 1}], {}),
    ),
    "index-gap": (
        ([{"index": 0}, {"index": 2}], {}),
        ([{}, {}], {}),
    ),
    "dep-missing": (
        ([{"index": 0}, {"index": 2, "deps": [1, 2]}], {}),
        ([{"index": 0}, {"index": 1}, {"index": 2, "deps": [1, 2]}], {}),
    ),
    "xdep-missing": (
        ([{"rank": 0}, {"rank": 1, "xdeps": [1]}], {}),
        ([{"rank": 0}, {"rank": 1, "xdeps": [0]}], {}),
    ),
    "rank-not-in-header": (
        ([{"rank": 0}, {"rank": 1}], {"ranks": [0], "groups": world(0)}),
        ([{"rank": 0}, {"rank": 1}], {"ranks": [0, 1], "groups": world(0)}),
    ),
    "rank-without-rows": (
        ([{"rank": 1}], {"ranks": [0, 1]}),
        ([{"rank": 1}], {"ranks": [1]}),
    ),
    "stream-not-in-header": (
        ([{"stream": 5}], {}),
        ([{"stream": 5}], {"streams": {5: "x"}}),
    ),
    "step-not-in-header": (
        ([{"step": None}, {"step": 3}, {"step": 4}], {"steps": [3]}),
        ([{"step": None}, {"step": 3}, {"step": 4}], {"steps": [3, 4, 5]}),
    ),
    "negative-start": (
        ([span(-1, 1)], {}),
        ([span(0, 1)], {}),
    ),
    "step-decreasing": (
        ([{"step": 1}, {"step": None}, {"step": 0}, {"step": 1}], {}),
        ([{"step": 0}, {"step": None}, {"step": 0}, {"step": 1}], {}),
    ),
    "overlap": (
        ([span(0, 5), span(4, 6)], {}),
        ([span(0, 5), span(5, 6), span(3, 4, stream=1), span(6, 6), {}], {}),
    ),
    "group-unknown": (
        ([AR], {"groups": ()}),
        ([AR], {}),
    ),
    "rank-not-in-group": (
        ([AR, {**AR, "rank": 1}], {"groups": world(0)}),
        ([AR, {**AR, "rank": 1}], {"groups": world(0, 1)}),
    ),
    "peer-not-in-group": (
        ([{**SEND, "peer": 3}], {"world_size": 4}),
        ([{**SEND, "peer": 3}], {"world_size": 4, "groups": world(0, 3)}),
    ),
    "seq-gap": (
        ([AR, {**AR, "seq": 3}], {}),
        ([{**AR, "seq": 4}, {**AR, "seq": 3}, {**AR, "seq": None}], {}),
    ),
    "duplicate-member": (
        ([AR, AR], {}),
        ([AR, {**AR, "seq": 1}], {}),
    ),
    "missing-member": (
        ([AR, {"rank": 1}, {**AR, "rank": 2}], {}),
        ([AR, {**AR, "rank": 2}], {"groups": world(0, 1, 2)}),
    ),
    "unmatched-p2p": (
        ([SEND, {"rank": 1}], {}),
        ([SEND, {**RECV, "rank": 1}], {}),
    ),
    "unequal-kind": (
        ([AR, {**AR, "rank": 1, "kind": "reduce_scatter"}], {}),
        ([AR, {**AR, "rank": 1}], {}),
    ),
    "unequal-bytes": (
        ([AR, {**AR, "rank": 1, "bytes": 9}], {}),
        ([AR, {**AR, "rank": 1, "bytes": None}], {}),
    ),
    "unequal-dtype": (
        ([AR, {**AR, "rank": 1, "dtype": "uint8"}], {}),
        ([AR, {**AR, "rank": 1, "dtype": None}], {}),
    ),
    "unequal-reduce-op": (
        ([AR, {**AR, "rank": 1, "reduce_op": "max"}], {}),
        ([AR, {**AR, "rank": 1, "reduce_op": None}], {}),
    ),
}


def test_every_rule_has_a_case():
    assert set(CASES) | {"unknown-column"} == set(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_broken(rule, make_trace):
    rows, header = CASES[rule][0]
    found = {violation.rule: violation for violation in validate(make_trace(*rows, **header))}
    assert rule in found
    assert found[rule].count >= 1
    assert found[rule].rows
    assert found[rule].message == RULES[rule]
    # A missing row, or a row that is there twice, may be seen by two rules; no more than that.
    allowed = {rule, "index-gap", "rank-not-in-group", "missing-member", "unmatched-p2p"}
    assert set(found) <= allowed


@pytest.mark.parametrize("rule", CASES)
def test_kept(rule, make_trace):
    rows, header = CASES[rule][1]
    assert validate(make_trace(*rows, **header)) == []


def test_a_valid_job(job):
    assert validate(job) == []


def test_an_empty_trace_is_valid(make_trace):
    assert validate(make_trace()) == []


def test_row_rules_name_count_and_rows(make_trace):
    rows = [{"start_ns": 5}] * 7 + [{"kind": "send", "group": 0}]
    first, second = validate(make_trace(*rows), limit=3)
    assert (first.rule, first.count, first.severity) == ("p2p-without-peer", 1, "error")
    assert (second.rule, second.count, len(second.rows)) == ("half-timed", 7, 3)
    assert second.rows[0] == {"id": 0, "rank": 0, "index": 0, "start_ns": 5, "dur_ns": None}
    assert str(second).startswith("error: half-timed (7x): start_ns and dur_ns come together")


def test_unknown_column(make_trace):
    trace = make_trace({})
    extended = trace.nodes.with_columns(x_mine=pl.lit(1), mine=pl.lit(1))
    found = validate(type(trace)(trace.header, extended))
    assert [violation.rule for violation in found] == ["unknown-column"]
    assert found[0].rows == ({"column": "mine"},)


def test_values_that_the_stored_type_cannot_hold(make_trace):
    wide = {**node_schema(), "step": pl.Int64, "stream": pl.Int64, "kind": pl.String}
    row = {"step": 2**31, "stream": 2**15, "kind": "allreduce"}
    trace = make_trace(row, {}, schema=pl.Schema(wide))
    found = {violation.rule for violation in validate(trace)}
    assert found == {
        "step-out-of-range",
        "stream-out-of-range",
        "kind-unknown",
    }


def test_a_kind_that_its_source_does_not_tell_contradicts_none(make_trace):
    rows = [AR, {**AR, "rank": 1, "kind": "other_comm"}]
    assert "unequal-kind" not in {each.rule for each in validate(make_trace(*rows))}


def test_long_lists_of_deps(make_trace):
    """The limit of an array's length is read off the model like the other bounds."""
    trace = make_trace({"index": 2**20 + 1, "deps": list(range(1, 2**20 + 2))})
    assert [violation.rule for violation in validate(trace)] == ["deps-too-long"]


def test_recorded_traces_may_overlap_and_skip(make_trace):
    rows = [span(0, 5), span(4, 6), AR, {**AR, "seq": 2}]
    for kind, severity in (("slice", "error"), ("recorded", "warning"), ("calibrated", "warning")):
        found = {v.rule: v.severity for v in validate(make_trace(*rows, kind=kind))}
        assert found == {"overlap": severity, "seq-gap": severity}


def test_slices_hold_only_some_rows_of_virtual_ranks(make_trace):
    rows = [{"index": 3, "real": False}, {"index": 7, "real": False}]
    assert validate(make_trace(*rows, kind="slice")) == []
    # Of a real rank all rows are there, and a recorded trace has no virtual ones.
    gaps = [{**row, "real": True} for row in rows]
    assert [v.rule for v in validate(make_trace(*gaps, kind="slice"))] == ["index-gap"]
    assert [v.rule for v in validate(make_trace(*rows, kind="recorded"))] == ["index-gap"]
    # What a virtual rank's rows depend on has to be there all the same.
    lost = [{"index": 3, "real": False}, {"index": 7, "real": False, "deps": [1]}]
    assert [v.rule for v in validate(make_trace(*lost, kind="slice"))] == ["dep-missing"]


@pytest.mark.parametrize("rank", [0, 1])
def test_tables_of_several_chunks(make_trace, rank):
    """Polars panics when it streams run lengths of such a column."""
    first = make_trace({}, {}, {})
    rest = [{"rank": rank}, {"rank": rank}]
    second = make_trace({"rank": rank, "index": 0 if rank else 3}, *rest).nodes.collect()
    header = make_trace({}, {"rank": rank}).header
    parts = [first.nodes.collect(), second]
    for tables, broken in ((parts, []), (parts[::-1], ["unsorted"])):
        table = pl.concat(tables, rechunk=False)
        assert table.n_chunks() > 1
        assert [v.rule for v in validate(type(first)(header, table.lazy()))] == broken


def test_errors_come_before_warnings(make_trace):
    rows = [span(-5, 5), span(4, 6), AR, {**AR, "bytes": 3}]
    severities = [v.severity for v in validate(make_trace(*rows, kind="recorded"))]
    assert severities == sorted(severities)


def test_batches(make_trace):
    """Members of one coalesced launch overlap; what follows must not reach into it."""
    exchange = [span(5, 9, batch=1), span(6, 8, batch=1), span(5, 9, batch=1)]
    assert validate(make_trace(span(0, 5), *exchange, span(9, 10))) == []
    for rows in ([span(0, 6), *exchange], [*exchange, span(8, 10)]):
        assert [v.rule for v in validate(make_trace(*rows))] == ["overlap"]


def test_a_long_span_overlaps_all_that_start_before_its_end(make_trace):
    (found,) = validate(make_trace(span(0, 9), span(1, 2), span(3, 4), span(9, 10)))
    assert (found.rule, found.count) == ("overlap", 2)
    assert found.rows[1]["previous_end_ns"] == 9


def test_missing_members_are_named(make_trace):
    rows = [AR, {"rank": 1}, {**AR, "rank": 2}, {"rank": 3}]
    (found,) = validate(make_trace(*rows))
    assert found.rows[0]["missing_ranks"] == [1, 3]
    assert (found.rows[0]["group"], found.rows[0]["seq"]) == (0, 0)


def test_ranks_that_are_not_in_the_trace_are_not_missed(make_trace):
    trace = make_trace(AR, {**SEND, "peer": 2}, {**AR, "rank": 1}, {"rank": 2})
    some = type(trace)(trace.header.model_copy(update={"ranks": (0, 1)}), trace.nodes)
    assert validate(some.ranks([0, 1])) == []


def test_uneven_all_to_all_is_fine(make_trace):
    a2a = {"kind": "all_to_all", "group": 0, "seq": 0}
    assert validate(make_trace({**a2a, "bytes": 1}, {**a2a, "rank": 1, "bytes": 2})) == []


def test_p2p_numbers_count_by_direction(make_trace):
    sends = [SEND, {**SEND, "peer": 2}, {**RECV, "peer": 1}]
    one = [{**RECV, "rank": 1}, {**SEND, "rank": 1, "peer": 0}]
    assert validate(make_trace(*sends, *one, {**RECV, "rank": 2})) == []


def test_unequal_values_are_shown(make_trace):
    (found,) = validate(make_trace(AR, {**AR, "rank": 1, "dtype": "uint8"}))
    assert sorted(found.rows[0]["dtype_values"]) == ["int8", "uint8"]


def test_answers_do_not_depend_on_the_size_of_blocks(make_trace, monkeypatch):
    rows = [
        {**AR, **span(10 * i + rank, 10 * i + 9), "rank": rank, "seq": i, "step": i // 3}
        for rank in range(6)
        for i in range(9)
    ]
    rows[5]["bytes"] = 9
    rows[20]["seq"] = 11
    rows[30]["dur_ns"] = 30
    trace = make_trace(*rows)
    whole = validate(trace, limit=100)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 10)
    in_parts = validate(trace, limit=100)

    def comparable(violations: list[Violation]) -> dict:
        return {v.rule: (v.count, sorted(map(str, v.rows))) for v in violations}

    assert comparable(whole) == comparable(in_parts)
    assert {"overlap", "seq-gap", "missing-member", "unequal-bytes"} == set(comparable(whole))
