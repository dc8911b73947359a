"""The longest waits: for whom, and what that rank did meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from prismcalib.chosen_steps import chosen_steps
from prismcalib.computing import covered_ns
from prismcalib.paths import calibrated_trace, inner_idle, require_partners
from prismtrace.group_names import group_labels
from prismtrace.reading import reading
from prismtrace.schema import LOCAL_KINDS
from prismtrace.trace import Trace, instance_columns

__all__ = ["LongWait", "longest_waits"]

_KEY = ["group", "seq", "src_rank", "dst_rank"]
_LOCAL = [kind.value for kind in LOCAL_KINDS]


@dataclass(frozen=True)
class LongWait:
    """The longest wait in one communication; times in ns.

    Attributes:
        rank: who waited longest, of several equals the lowest.
        wait_ns: how long; it may have computed beside.
        step, phase, kind, group, seq: of the communication on that rank; `group` is its label.
        waiting: how many members waited.
        all_wait_ns: waiting of all members.
        last: the rank that arrived last, for which they waited.
        computed_ns, waited_ns, other_ns: what that rank did in the `wait_ns` before it arrived:
            spans of its own; nothing but waiting for others itself; the rest (transfers, idle).
        inner_idle_ns: the part of computed_ns in which its device did nothing, between the kernels
            of spans; of a span that lies only partly in that time, in proportion. 0 where rows
            are kernels: then idle time is in other_ns.
        longest: its longest span of that time, by name or else kind; None if it had none.
        longest_ns: how much of the time that span took.
    """

    rank: int
    wait_ns: int
    step: int | None
    phase: str | None
    kind: str
    group: str | None
    seq: int
    waiting: int
    all_wait_ns: int
    last: int
    computed_ns: int
    waited_ns: int
    other_ns: int
    inner_idle_ns: int
    longest: str | None
    longest_ns: int

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def longest_waits(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    limit: int = 10,
    steps: str = "auto",
) -> tuple[LongWait, ...]:
    """The communications with the longest waits, one entry each, longest first.

    Args:
        source: a calibrated trace.
        limit: how many.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: the trace is not calibrated.
        CoverageError: it lacks ranks that others communicate with.
        StepError: steps that are not in it.
    """
    with chosen_steps(calibrated_trace(source), steps) as (trace, _):
        require_partners(trace)
        return _longest(trace, limit)


def _longest(trace: Trace, limit: int) -> tuple[LongWait, ...]:
    names = group_labels(trace.header.groups)
    with reading(trace.paths):
        found = _instances(trace.nodes, limit)
        own = _rows_of(trace.nodes, found["last"].unique().to_list())
    return tuple(
        _told(row, names, own.filter(pl.col("rank") == row["last"]))
        for row in found.iter_rows(named=True)
    )


def _instances(nodes: pl.LazyFrame, limit: int) -> pl.DataFrame:
    """A row for each of the communications: who waited longest, for whom, until when."""
    matched = nodes.filter(pl.col("seq").is_not_null() & pl.col("group").is_not_null())
    # The instances first, by few columns: of a large trace nothing else is held.
    worst = (
        matched.filter(pl.col("wait_ns") > 0)
        .select("wait_ns", *instance_columns())
        .group_by(_KEY)
        .agg(pl.col("wait_ns").max())
        .sort("wait_ns", *_KEY, descending=[True, False, False, False, False])
        .head(limit)
        .collect(engine="streaming")
    )
    columns = ["rank", "step", "kind", "phase", "start_ns", "wait_ns", *instance_columns()]
    members = (
        matched.select(columns)
        .join(worst.lazy().select(_KEY), on=_KEY, how="semi")
        .collect(engine="streaming")
        .sort("rank")
    )
    first = pl.all().exclude(*_KEY).sort_by("wait_ns", descending=True, maintain_order=True)
    return (
        members.group_by(_KEY)
        .agg(
            first.first(),
            waiting=(pl.col("wait_ns") > 0).sum(),
            all_wait_ns=pl.col("wait_ns").sum(),
            last=pl.col("rank").get(pl.col("start_ns").arg_max()),
        )
        .with_columns(ready_ns=pl.col("start_ns") + pl.col("wait_ns"))
        .sort("wait_ns", *_KEY, descending=[True, False, False, False, False])
    )


def _rows_of(nodes: pl.LazyFrame, ranks: Sequence[int]) -> pl.DataFrame:
    """What some ranks do: rank, text, local, idle (share), begin_ns, end_ns, wait_end_ns."""
    kind = pl.col("kind").cast(pl.String)
    start = pl.col("start_ns")
    return (
        nodes.filter(pl.col("rank").is_in(list(ranks)))
        .select(
            "rank",
            text=pl.coalesce(pl.col("name").cast(pl.String), kind),
            local=kind.is_in(_LOCAL),
            idle=inner_idle(nodes.collect_schema().names()) / pl.col("dur_ns").clip(lower_bound=1),
            begin_ns=start,
            end_ns=start + pl.col("dur_ns"),
            wait_end_ns=start + pl.col("wait_ns").fill_null(0),
        )
        .collect(engine="streaming")
    )


def _told(row: dict[str, Any], names: dict[int, str], own: pl.DataFrame) -> LongWait:
    begin, ready = row["ready_ns"] - row["wait_ns"], row["ready_ns"]
    within = own.filter((pl.col("begin_ns") < ready) & (pl.col("end_ns") > begin)).with_columns(
        pl.col("begin_ns", "end_ns", "wait_end_ns").clip(begin, ready)
    )
    local = within.filter("local").with_columns(took=pl.col("end_ns") - pl.col("begin_ns"))
    waits = within.filter(~pl.col("local")).with_columns(end_ns="wait_end_ns")
    computed = _covered(local)
    idle = local.select((pl.col("took") * pl.col("idle")).sum()).item()
    waited = _covered(pl.concat([local.drop("took"), waits])) - computed
    longest, longest_ns = None, 0
    if local.height:
        first = local.sort("took", descending=True, maintain_order=True)
        longest, longest_ns = first.select("text", "took").row(0)
    return LongWait(
        rank=row["rank"],
        wait_ns=row["wait_ns"],
        step=row["step"],
        phase=row["phase"],
        kind=row["kind"],
        group=names.get(row["group"]),
        seq=row["seq"],
        waiting=row["waiting"],
        all_wait_ns=row["all_wait_ns"],
        last=row["last"],
        computed_ns=computed,
        waited_ns=waited,
        other_ns=row["wait_ns"] - computed - waited,
        inner_idle_ns=min(round(idle), computed),
        longest=longest,
        longest_ns=longest_ns,
    )


def _covered(spans: pl.DataFrame) -> int:
    return int(covered_ns(spans.select("rank", "begin_ns", "end_ns"))["covered_ns"].sum())
