"""What is in a trace, in numbers: the answer of `prismtrace info`."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.schema import LOCAL_KINDS, TraceHeader
from prismtrace.trace import Trace

__all__ = ["GroupInfo", "KindInfo", "RankInfo", "StepInfo", "TraceInfo", "summarize"]


@dataclass(frozen=True)
class RankInfo:
    """Rows of one rank and the time they span; times are null without timing."""

    rank: int
    nodes: int
    start_ns: int | None
    end_ns: int | None


@dataclass(frozen=True)
class KindInfo:
    """All nodes of one kind. `dur_ns` adds up all ranks and streams.

    `unmatched` counts communications whose partners are not known (no `group` or no `seq`): they
    wait for nobody.
    """

    kind: str
    nodes: int
    dur_ns: int | None
    wait_ns: int | None
    bytes: int | None
    unmatched: int


@dataclass(frozen=True)
class GroupInfo:
    """A process group and how many communications ran in it, over all its ranks."""

    id: int
    name: str
    desc: str
    ranks: str
    nodes: int


@dataclass(frozen=True)
class StepInfo:
    """A training step: from the first start to the last end on any rank."""

    step: int
    nodes: int
    start_ns: int | None
    end_ns: int | None


@dataclass(frozen=True)
class TraceInfo:
    """Summary of a trace. `critical` counts nodes on the critical path of a calibrated one."""

    files: tuple[str, ...]
    file_bytes: int
    header: TraceHeader
    nodes: int
    start_ns: int | None
    end_ns: int | None
    critical: int
    ranks: tuple[RankInfo, ...]
    kinds: tuple[KindInfo, ...]
    groups: tuple[GroupInfo, ...]
    steps: tuple[StepInfo, ...]
    extra_columns: tuple[str, ...]

    @property
    def window_ns(self) -> int | None:
        """From the first start to the last end, over all ranks; null without timing."""
        if self.start_ns is None or self.end_ns is None:
            return None
        return self.end_ns - self.start_ns


def summarize(trace: Trace) -> TraceInfo:
    """Count what is in a trace, streaming: memory stays flat in the number of rows."""
    nodes = trace.nodes
    end = pl.col("start_ns") + pl.col("dur_ns")
    span = [
        pl.len().alias("nodes"),
        pl.col("start_ns").min().alias("start_ns"),
        end.max().alias("end_ns"),
    ]
    with reading(trace.paths):
        # One after another: collected together, they would share the table, and hold it.
        ranks, kinds, groups, steps, critical = (
            table.collect(engine="streaming")
            for table in (
                nodes.group_by("rank").agg(span).sort("rank"),
                _by_kind(nodes),
                nodes.filter(pl.col("group").is_not_null()).group_by("group").len(),
                nodes.filter(pl.col("step").is_not_null()).group_by("step").agg(span).sort("step"),
                nodes.select(pl.col("critical").sum()),
            )
        )
    counts = dict(groups.iter_rows())
    names = nodes.collect_schema().names()
    return TraceInfo(
        files=tuple(str(path) for path in trace.paths),
        file_bytes=sum(path.stat().st_size for path in trace.paths),
        header=trace.header,
        nodes=int(ranks["nodes"].sum()),
        start_ns=_int(ranks["start_ns"].min()),
        end_ns=_int(ranks["end_ns"].max()),
        critical=int(critical.item()),
        ranks=tuple(RankInfo(**row) for row in ranks.iter_rows(named=True)),
        kinds=tuple(KindInfo(**row) for row in kinds.iter_rows(named=True)),
        groups=tuple(
            GroupInfo(g.id, g.name, g.desc, format_ranks(g.ranks), counts.get(g.id, 0))
            for g in trace.header.groups
        ),
        steps=tuple(StepInfo(**row) for row in steps.iter_rows(named=True)),
        extra_columns=tuple(name for name in names if name.startswith("x_")),
    )


def _by_kind(nodes: pl.LazyFrame) -> pl.LazyFrame:
    def total(name: str) -> pl.Expr:
        # A sum over nulls alone is 0 in Polars, yet "not applicable" here.
        column = pl.col(name)
        return pl.when(column.is_not_null().any()).then(column.sum()).alias(name)

    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    return (
        nodes.group_by("kind")
        .agg(
            pl.len().alias("nodes"),
            *(total(name) for name in ("dur_ns", "wait_ns", "bytes")),
            unmatched=pl.col("seq").null_count(),
        )
        .with_columns(unmatched=pl.when(local).then(0).otherwise("unmatched"))
        .sort("kind")
    )


def _int(value: object) -> int | None:
    return int(value) if isinstance(value, int) else None
