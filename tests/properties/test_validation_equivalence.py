"""The vectorised row rules accept exactly the rows that the model `Node` accepts."""

from __future__ import annotations

from typing import Any

import polars as pl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prismtrace.row_rules import row_rules
from prismtrace.schema import (
    LOCAL_KINDS,
    P2P_KINDS,
    REDUCING_KINDS,
    ROOTED_KINDS,
    DType,
    Kind,
    Node,
    Phase,
    ReduceOp,
    TransferSource,
)
from prismtrace.trace import node_schema

# Wider than any column, so that values beyond a column's range reach the rules; enums as text.
WIDE = {
    name: pl.List(pl.Int128)
    if isinstance(dtype, pl.List)
    else pl.Int128
    if dtype.is_integer()
    else dtype
    if dtype == pl.Boolean
    else pl.String
    for name, dtype in node_schema().items()
}
RULES = row_rules(pl.Schema(WIDE))

EDGES = [bound + d for bound in (0, 2**15, 2**31, 2**32, 2**63, -(2**63)) for d in (-1, 0, 1)]
integers = st.sampled_from(EDGES) | st.integers(-(2**70), 2**70) | st.integers(-2, 20)
small = st.integers(0, 30)
ns = st.integers(0, 2**40)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def texts(enum: Any) -> st.SearchStrategy[str]:
    return st.sampled_from([*(member.value for member in enum), "", "All_Reduce", "nonsense"])


ANYTHING: dict[str, st.SearchStrategy[Any]] = {
    name: maybe(st.lists(maybe(integers), max_size=4))
    if isinstance(dtype, pl.List)
    else maybe(integers)
    if dtype == pl.Int128
    else maybe(st.booleans() if dtype == pl.Boolean else st.text(max_size=5))
    for name, dtype in WIDE.items()
}
ANYTHING |= {
    name: maybe(texts(enum))
    for name, enum in {
        "kind": Kind,
        "phase": Phase,
        "dtype": DType,
        "reduce_op": ReduceOp,
        "transfer_source": TransferSource,
    }.items()
}


@st.composite
def valid_rows(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(list(Kind)))
    rank, index = draw(small), draw(small)
    row: dict[str, Any] = dict.fromkeys(WIDE)
    row |= {"id": rank << 32 | index, "rank": rank, "index": index, "kind": kind.value}
    row |= {"stream": draw(small), "real": draw(st.booleans()), "name": draw(maybe(st.text()))}
    earlier = st.integers(1, index) if index else st.nothing()
    row["deps"] = draw(st.lists(earlier, unique=True, max_size=3)) if index else []
    others = st.builds(lambda r, i: (r if r < rank else r + 1) << 32 | i, small, small)
    row["xdeps"] = draw(maybe(st.lists(others, max_size=2)))
    edges = len(row["deps"]) + len(row["xdeps"] or [])
    row["lag_ns"] = draw(maybe(st.lists(ns, min_size=edges, max_size=edges)))
    if draw(st.booleans()):
        row["start_ns"], row["dur_ns"] = draw(st.integers(-(2**40), 2**62)), draw(ns)
    if kind not in LOCAL_KINDS:
        row |= {"group": draw(maybe(small)), "bytes": draw(maybe(ns))}
        row["seq"] = None if row["group"] is None else draw(maybe(ns))
        row["transfer_ns"] = draw(
            maybe(st.integers(0, 5 if row["dur_ns"] is None else row["dur_ns"]))
        )
        row["dtype"] = draw(maybe(st.sampled_from([member.value for member in DType])))
    if kind in P2P_KINDS or (kind in ROOTED_KINDS and draw(st.booleans())):
        row["peer"] = draw(small.filter(lambda peer: peer != rank))
    if kind in REDUCING_KINDS:
        row["reduce_op"] = draw(maybe(st.sampled_from([member.value for member in ReduceOp])))
    row["mem_bytes"] = draw(maybe(st.integers(0, 100)))
    row["mem_peak_bytes"] = draw(maybe(st.integers(row["mem_bytes"] or 0, 200)))
    return row


@st.composite
def rows_with_mutations(draw: st.DrawFn) -> dict[str, Any]:
    row = draw(valid_rows())
    for name in draw(st.lists(st.sampled_from(list(WIDE)), max_size=3)):
        row[name] = draw(ANYTHING[name])
    return row


def accepted_by_model(row: dict[str, Any]) -> bool:
    try:
        Node.model_validate(row)
    except ValidationError:
        return False
    return True


def wide_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """The rows as a frame; lists one by one, for Polars takes their type from the first entry."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in WIDE}
    for name, dtype in WIDE.items():
        if isinstance(dtype, pl.List):
            columns[name] = [
                None if values is None else pl.Series(values, dtype=dtype.inner)
                for values in columns[name]
            ]
    return pl.DataFrame(columns, schema=WIDE)


def accepted_by_rules(rows: list[dict[str, Any]]) -> list[bool]:
    frame = wide_frame(rows)
    broken = [rule.broken.fill_null(value=False) for rule in RULES]
    return (~frame.lazy().select(pl.any_horizontal(broken)).collect().to_series()).to_list()


def row(**changes: Any) -> dict[str, Any]:
    plain = {"id": 3, "rank": 0, "index": 3, "kind": "compute", "stream": 0, "real": True}
    return {**dict.fromkeys(WIDE), **plain, "deps": [], **changes}


@settings(max_examples=100)
@given(st.lists(rows_with_mutations(), min_size=1, max_size=6))
@example([row(xdeps=[2**63]), row(xdeps=[-1]), row(xdeps=[None]), row(xdeps=[2**127 - 1])])
@example([row(deps=[None]), row(deps=[0]), row(deps=[4]), row(deps=[2, 2]), row(deps=None)])
@example([row(deps=[-1, 2**63]), row(xdeps=[-1, 2**64]), row(lag_ns=[None, 2**63, -(2**63) - 1])])
@example([row(deps=[1], lag_ns=[]), row(lag_ns=[]), row(deps=[1], lag_ns=[2**63])])
@example([row(rank=2**31, id=2**63 | 3), row(index=2**31, id=2**31), row(stream=2**15)])
@example([row(kind="send", group=0), row(kind="send", group=0, peer=0)])
@example(
    [row(start_ns=start, dur_ns=2**63 - 1) for start in (-(2**63), -1, 0, 1, 2**63 - 1, 2**63)]
)
@example([row(dtype="f32"), row(transfer_ns=1), row(wait_ns=-1), row(slack_ns=2**63)])
@example([row(kind="barrier", group=0, transfer_ns=2**63), row(name="", critical=None)])
def test_model_and_rules_accept_the_same_rows(rows):
    assert accepted_by_rules(rows) == [accepted_by_model(each) for each in rows]


@given(st.lists(valid_rows(), min_size=1, max_size=6))
def test_rows_meant_to_be_valid_are(rows):
    """Without it the comparison above might only ever see broken rows."""
    assert all(accepted_by_rules(rows))


@given(st.sampled_from(list(WIDE)), st.data())
def test_one_changed_column(name, data):
    changed = data.draw(valid_rows()) | {name: data.draw(ANYTHING[name])}
    assert accepted_by_rules([changed]) == [accepted_by_model(changed)]


@given(st.lists(valid_rows(), min_size=1, max_size=6))
def test_rules_of_stored_types_agree_with_those_of_wide_ones(rows):
    """In a file most bounds are kept by the type; the rules that are left accept the same."""
    frame = wide_frame(rows).cast(node_schema())
    broken = [rule.broken.fill_null(value=False) for rule in row_rules(node_schema())]
    assert not frame.select(pl.any_horizontal(broken)).to_series().any()


def test_rules_across_columns_have_the_same_names():
    """What `Node` says in its error is what `prismtrace validate` says."""
    named = {name for name, _ in Node.model_validate(row())._row_rules()}
    of_one_column = tuple(f"{column}-" for column in WIDE)
    assert named <= {rule.name for rule in RULES}
    assert all(r.name in named or r.name.startswith(of_one_column) for r in RULES)
