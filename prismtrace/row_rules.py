"""Rules that one row of the node table must keep, as Polars expressions.

They accept exactly the rows that `prismtrace.schema.Node` accepts (a property test draws rows
and compares), at the speed of columns. The rules of a single column are read off the fields
of `Node`: null, bounds, values of an enum, length of a list. The rules across columns carry
the names that `Node` uses for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl
from annotated_types import Ge, Lt, MaxLen
from pydantic.fields import FieldInfo

from prismtrace.schema import (
    INDEX_BITS,
    LOCAL_KINDS,
    P2P_KINDS,
    REDUCING_KINDS,
    ROOTED_KINDS,
    ColumnType,
    Kind,
    Node,
)

__all__ = ["RowRule", "row_rules"]


@dataclass(frozen=True)
class RowRule:
    """A rule and the rows that break it.

    `broken` is a Boolean expression over the node table, null counting as kept; `columns`
    are those worth showing beside rank and index.
    """

    name: str
    message: str
    columns: tuple[str, ...]
    broken: pl.Expr


def row_rules(schema: pl.Schema) -> list[RowRule]:
    """The rules of a row for a node table with these column types.

    Integers may have any width and enums may be text; what a type rules out by itself is
    not asked again.
    """
    rules = [
        rule
        for name, field in Node.model_fields.items()
        for rule in _field_rules(name, field, schema[name])
    ]
    rules += _graph_rules(schema["xdeps"])
    rules += _meaning_rules()
    return rules


def _field_rules(name: str, field: FieldInfo, dtype: pl.DataType) -> Iterator[RowRule]:
    column = pl.col(name)
    if field.is_required():
        yield RowRule(f"{name}-null", f"{name} must not be null", (name,), column.is_null())
    for item in field.metadata:
        if isinstance(item, ColumnType) and item.values is not None:
            if not isinstance(dtype, pl.Enum):
                allowed = [member.value for member in item.values]
                yield RowRule(
                    f"{name}-unknown",
                    f"{name} is none of {', '.join(allowed)}",
                    (name,),
                    ~column.cast(pl.String).is_in(allowed),
                )
        elif isinstance(item, MaxLen):
            yield RowRule(
                f"{name}-too-long",
                f"{name} has more than {item.max_length} entries",
                (),
                column.list.len() > item.max_length,
            )
    if isinstance(dtype, pl.List):
        yield RowRule(
            f"{name}-element-null",
            f"an entry of {name} is null",
            (name,),
            column.list.count_matches(None) > 0,
        )
    yield from _bound_rules(name, field, dtype)


def _bound_rules(name: str, field: FieldInfo, dtype: pl.DataType) -> Iterator[RowRule]:
    if not dtype.is_integer():
        return
    column = pl.col(name)
    least, most = _limits(dtype)
    low = next((int(item.ge) for item in field.metadata if isinstance(item, Ge)), least)  # type: ignore[call-overload]
    high = next((int(item.lt) for item in field.metadata if isinstance(item, Lt)), most + 1)  # type: ignore[call-overload]
    broken = [column < low] if low > least else []
    broken += [column >= high] if high <= most else []
    if broken:
        yield RowRule(
            f"{name}-out-of-range",
            f"{name} must be at least {low} and below {high}",
            (name,),
            pl.any_horizontal(broken),
        )


def _limits(dtype: pl.DataType) -> tuple[int, int]:
    bits = int(str(dtype).lstrip("UInt"))
    if dtype.is_unsigned_integer():
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _graph_rules(xdeps_type: pl.DataType) -> list[RowRule]:
    """Identity and directional edges."""
    rank, index, deps = pl.col("rank"), pl.col("index"), pl.col("deps")
    xdeps, lags = pl.col("xdeps"), pl.col("lag_ns")
    edges = deps.list.len() + xdeps.list.len().fill_null(0)
    xdep_ranks = xdeps.list.eval(pl.element() // (1 << INDEX_BITS))
    # A rank that does not fit is reported by its own rule; here it must not stop the query.
    own_rank = rank.cast(xdeps_type.inner, strict=False)  # type: ignore[attr-defined]
    own_id = rank.cast(pl.Int64, strict=False) * (1 << INDEX_BITS)
    own_id += index.cast(pl.Int64, strict=False)
    return [
        RowRule(
            "id-mismatch",
            "id is not rank << 32 | index",
            ("id",),
            pl.col("id") != own_id,
        ),
        RowRule(
            "dep-not-earlier",
            "deps are distances back: from 1 to the row's index",
            ("deps",),
            (deps.list.max() > index) | (deps.list.min() < 1),
        ),
        RowRule(
            "dep-twice",
            "deps names the same node twice",
            ("deps",),
            deps.list.n_unique() != deps.list.len(),
        ),
        RowRule(
            "xdep-of-same-rank",
            "xdeps are edges from other ranks; the rank's own belong in deps",
            ("xdeps",),
            xdep_ranks.list.contains(own_rank),
        ),
        RowRule(
            "xdep-out-of-range",
            "an entry of xdeps is no node id",
            ("xdeps",),
            _any_outside_int64(xdeps),
        ),
        RowRule(
            "lag-length",
            "lag_ns needs one entry for each entry of deps, then xdeps",
            ("deps", "xdeps", "lag_ns"),
            lags.list.len() != edges,
        ),
        RowRule("lag-out-of-range", "a lag is negative", ("lag_ns",), _any_outside_int64(lags)),
    ]


def _any_outside_int64(lists: pl.Expr) -> pl.Expr:
    return (lists.list.min() < 0) | (lists.list.max() >= 2**63)


def _meaning_rules() -> list[RowRule]:
    """Columns that go together."""
    local, p2p = _kind_in(LOCAL_KINDS), _kind_in(P2P_KINDS)
    rooted, reducing = _kind_in(ROOTED_KINDS), _kind_in(REDUCING_KINDS)
    group, peer, dur = pl.col("group"), pl.col("peer"), pl.col("dur_ns")
    transfer, level, peak = pl.col("transfer_ns"), pl.col("mem_bytes"), pl.col("mem_peak_bytes")
    return [
        RowRule(
            "local-with-group",
            "compute and memcpy belong to no group and have no seq",
            ("kind", "group", "seq"),
            local & (group.is_not_null() | pl.col("seq").is_not_null()),
        ),
        RowRule(
            "seq-without-group",
            "a seq numbers the operations of a group, which is missing",
            ("kind", "name", "seq"),
            pl.col("seq").is_not_null() & group.is_null(),
        ),
        RowRule("p2p-without-peer", "send and recv need a peer", ("kind",), p2p & peer.is_null()),
        RowRule(
            "p2p-with-itself",
            "a rank sends to itself",
            ("kind", "peer"),
            p2p & (peer == pl.col("rank")),
        ),
        RowRule(
            "peer-without-meaning",
            "only send, recv and rooted collectives have a peer",
            ("kind", "peer"),
            ~p2p & ~rooted & peer.is_not_null(),
        ),
        RowRule(
            "reduce-op-without-meaning",
            "this kind reduces nothing, yet has a reduce_op",
            ("kind", "reduce_op"),
            ~reducing & pl.col("reduce_op").is_not_null(),
        ),
        RowRule(
            "half-timed",
            "start_ns and dur_ns come together or not at all",
            ("start_ns", "dur_ns"),
            pl.col("start_ns").is_null() != dur.is_null(),
        ),
        RowRule(
            "end-out-of-range",
            "start_ns + dur_ns is no 64-bit number",
            ("start_ns", "dur_ns"),
            _int64(dur) > 2**63 - 1 - _int64(pl.col("start_ns")).clip(lower_bound=0),
        ),
        RowRule(
            "local-with-transfer",
            "compute and memcpy transfer nothing between ranks",
            ("kind", "transfer_ns"),
            local & transfer.is_not_null(),
        ),
        RowRule(
            "transfer-longer-than-span",
            "transfer_ns is longer than dur_ns",
            ("dur_ns", "transfer_ns"),
            transfer > dur,
        ),
        RowRule(
            "peak-below-level",
            "mem_peak_bytes is less than mem_bytes",
            ("mem_bytes", "mem_peak_bytes"),
            peak < level,
        ),
    ]


def _int64(column: pl.Expr) -> pl.Expr:
    """What fits; the rest is reported by the column's own rule."""
    return column.cast(pl.Int64, strict=False)


def _kind_in(kinds: frozenset[Kind]) -> pl.Expr:
    return pl.col("kind").cast(pl.String).is_in(sorted(kind.value for kind in kinds))
