"""Check a trace against the rules of the format.

    for violation in prismtrace.validate(trace):
        print(violation)

Three families of rules: those of one row (`prismtrace.row_rules`), those of a rank's sequence
of rows, and those of the process groups and sync instances across ranks. Cycles across ranks
are not looked for: `prismcalib check` finds them.

Most broken rules are errors: a reader may go wrong. Some are warnings: real hardware does
it, or only the picture suffers. A recorded trace may have gaps in its sequence numbers
(an operation that the profiler lost) and spans that overlap on one stream (clock granularity,
kernels started by programmatic launch), so these two are warnings there and errors elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from prismtrace.blocks import rank_blocks
from prismtrace.instance_rules import (
    check_groups,
    check_instances,
    check_sequence_numbers,
)
from prismtrace.reading import reading
from prismtrace.row_rules import row_rules
from prismtrace.schema import INDEX_BITS, TraceKind
from prismtrace.trace import Trace

__all__ = ["RULES", "Findings", "Severity", "Violation", "validate"]

Severity = Literal["error", "warning"]
"""An error breaks the format; a warning tells of what is unlikely to be meant."""

RULES: dict[str, str] = {
    "unknown-column": "columns outside the format start with x_",
    "unsorted": "rows are sorted by (rank, index)",
    "duplicate-id": "every id occurs once",
    "index-gap": "within a rank, index counts from 0 without gaps (not virtual ranks of slices)",
    "dep-missing": "deps lead to rows that exist",
    "xdep-missing": "xdeps lead to rows that exist, where their rank is in the trace",
    "rank-not-in-header": "the header lists every rank that has rows",
    "rank-without-rows": "every rank of the header has rows (open all files of the trace)",
    "stream-not-in-header": "the header names every stream",
    "step-not-in-header": "a header that lists steps lists all that rows have",
    "negative-start": "times are not negative",
    "step-decreasing": "step does not decrease within a rank",
    "overlap": "spans of one rank and stream do not overlap, except within a batch",
    "group-unknown": "the header lists every process group that rows name",
    "rank-not-in-group": "a rank communicates in groups that it is a member of",
    "peer-not-in-group": "the peer is a member of the group",
    "seq-gap": "within a rank and group, seq counts without gaps",
    "duplicate-member": "a rank takes part in a sync instance once",
    "missing-member": "every rank of the trace that belongs to a collective takes part in it",
    "unmatched-p2p": "every send has its recv, where both ranks are in the trace",
    "unequal-kind": "all members of a sync instance have the same kind, or other_comm",
    "unequal-bytes": "all members of a sync instance move the same bytes (not all_to_all)",
    "unequal-dtype": "all members of a sync instance have the same dtype",
    "unequal-reduce-op": "all members of a sync instance have the same reduce_op",
}
"""Rules beyond single rows: what holds in a valid trace."""

_WARNINGS = frozenset({"negative-start", "stream-not-in-header"})
_WARNINGS_IF_RECORDED = frozenset({"overlap", "seq-gap"})


@dataclass(frozen=True)
class Violation:
    """A broken rule: how often, and the first rows (or instances) that break it.

    Every row has at least the keys id, rank and index, except where the header is at fault.
    """

    rule: str
    """Its name, as `prismtrace validate` prints it."""
    message: str
    """What it asks for."""
    severity: Severity
    """Whether the trace is unsound, or only unlikely to be meant so."""
    count: int
    """How often it is broken."""
    rows: tuple[dict[str, Any], ...] = ()
    """The first rows (or instances) that break it, as column -> value."""

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.rule} ({self.count}x): {self.message}"]
        lines += ["  " + " ".join(f"{k}={v}" for k, v in row.items()) for row in self.rows]
        return "\n".join(lines)


@dataclass
class Findings:
    """Broken rules while they are being collected: counts add up, the first rows are kept."""

    trace: Trace
    limit: int
    messages: dict[str, str] = field(default_factory=lambda: dict(RULES))
    counts: dict[str, int] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, rule: str, broken: pl.DataFrame, count: int | None = None) -> None:
        """Count `broken` rows (or `count`) against a rule; columns of the frame are shown."""
        count = broken.height if count is None else count
        if count == 0:
            return
        self.counts[rule] = self.counts.get(rule, 0) + count
        kept = self.rows.setdefault(rule, [])
        kept += broken.head(self.limit - len(kept)).to_dicts()

    def violations(self) -> list[Violation]:
        """Errors first, then warnings; each in the order the rules were looked at."""
        found = [
            Violation(
                rule=rule,
                message=self.messages[rule],
                severity=self._severity(rule),
                count=count,
                rows=tuple(self.rows[rule]),
            )
            for rule, count in self.counts.items()
        ]
        return sorted(found, key=lambda violation: violation.severity)

    def _severity(self, rule: str) -> Severity:
        recorded = self.trace.header.kind in {TraceKind.RECORDED, TraceKind.CALIBRATED}
        relaxed = rule in _WARNINGS or (recorded and rule in _WARNINGS_IF_RECORDED)
        return "warning" if relaxed else "error"


def validate(trace: Trace, *, limit: int = 5) -> list[Violation]:
    """Every rule that `trace` breaks, errors first; empty when it is valid.

    Each violation shows the first `limit` rows. Rows are read in blocks, so memory stays
    flat. Rules that need sound rows are not asked when row rules are broken.
    """
    findings = Findings(trace, limit)
    with reading(trace.paths):
        _check_columns(findings)
        _check_rows(findings)
        if not findings.counts:
            _check_header(findings)
            _check_sequences(findings)
            _check_xdeps(findings)
            check_groups(findings)
            check_sequence_numbers(findings)
            check_instances(findings)
    return findings.violations()


def _check_columns(findings: Findings) -> None:
    from prismtrace.schema import Node

    for name in findings.trace.nodes.collect_schema().names():
        if name not in Node.model_fields and not name.startswith("x_"):
            findings.add("unknown-column", pl.DataFrame({"column": [name]}))


def _check_rows(findings: Findings) -> None:
    nodes = findings.trace.nodes
    rules = row_rules(nodes.collect_schema())
    counted = nodes.select(
        rule.broken.fill_null(value=False).sum().alias(rule.name) for rule in rules
    )
    counts = counted.collect(engine="streaming").row(0, named=True)
    for rule in rules:
        if counts[rule.name]:
            findings.messages[rule.name] = rule.message
            shown = dict.fromkeys(("id", "rank", "index", *rule.columns))
            first = nodes.filter(rule.broken).select(*shown).head(findings.limit)
            findings.add(rule.name, first.collect(), counts[rule.name])


def _check_header(findings: Findings) -> None:
    trace = findings.trace
    header = trace.header
    present = set(trace.nodes.select("rank").unique().collect(engine="streaming")["rank"])
    absent = sorted(set(header.ranks) - present)
    findings.add("rank-without-rows", pl.DataFrame({"rank": absent}))
    for rule, column, known in (
        ("rank-not-in-header", "rank", list(header.ranks)),
        ("stream-not-in-header", "stream", list(header.streams)),
        ("step-not-in-header", "step", list(header.steps)),
    ):
        if column == "step" and not known:
            continue  # the steps are not marked
        counts = trace.nodes.group_by(column).len().collect(engine="streaming")
        unknown = counts.filter(~pl.col(column).is_in(known)).sort(column)
        # One row for each rank or stream; that many rows are at fault would say less.
        first = trace.nodes.filter(pl.col(column).is_in(unknown[column].to_list()))
        shown = first.unique(column, keep="first", maintain_order=True) if len(unknown) else first
        names = dict.fromkeys(("id", "rank", "index", column))
        findings.add(rule, shown.select(*names).head(findings.limit).collect(), len(unknown))


_SEQUENCE_COLUMNS = [
    "id", "rank", "index", "real", "stream", "batch", "step", "start_ns", "dur_ns",
]  # fmt: skip
_PLACE = ("id", "rank", "index")


def _check_sequences(findings: Findings) -> None:
    """Rules about the rows of one rank, in order."""
    nodes = findings.trace.nodes
    sliced = findings.trace.header.kind == TraceKind.SLICE
    # Not Series.rle, which panics when it streams a column of several chunks.
    last = pl.col("rank").shift(1)
    runs = nodes.select("rank", last=last).filter((pl.col("rank") != last).fill_null(value=True))
    split = runs.collect().with_row_index("run").filter(pl.col("rank") <= pl.col("last"))
    findings.add("unsorted", split.select("rank", "run"))
    for rows in rank_blocks(nodes, _SEQUENCE_COLUMNS):
        same_rank = pl.col("rank") == pl.col("rank").shift(1)
        back = rows.filter(same_rank & (pl.col("index") < pl.col("index").shift(1)))
        findings.add("unsorted", back.select(*_PLACE))
        findings.add("duplicate-id", rows.filter(pl.col("id").is_duplicated()).select(*_PLACE))
        ordered = rows if back.is_empty() else rows.sort("rank", "index", maintain_order=True)
        before = pl.col("index").shift(1).over("rank").fill_null(-1)
        gaps = ordered.with_columns(previous=before).filter(pl.col("index") - before > 1)
        # Of virtual ranks, a slice holds only the operations in which real ranks take part.
        found = gaps.filter("real") if sliced else gaps
        findings.add("index-gap", found.select(*_PLACE, "previous"))
        if not gaps.is_empty():
            _check_deps(findings, ordered["rank"].unique().to_list())
        last_step = pl.col("step").forward_fill().shift(1).over("rank")
        decreasing = ordered.filter(pl.col("step") < last_step)
        findings.add("step-decreasing", decreasing.select(*_PLACE, "step"))
        negative = ordered.filter(pl.col("start_ns") < 0)
        findings.add("negative-start", negative.select(*_PLACE, "start_ns"))
        _check_overlap(findings, ordered)


def _check_deps(findings: Findings, ranks: list[int]) -> None:
    """Deps of ranks with gaps in their index; elsewhere every distance back hits a row."""
    part = findings.trace.nodes.filter(pl.col("rank").is_in(ranks))
    rows = part.select(*_PLACE, dep="deps").collect()
    deps = rows.filter(pl.col("dep").list.len() > 0).explode(
        "dep", empty_as_null=False, keep_nulls=False
    )
    target = pl.col("id") - pl.col("dep").cast(pl.Int64)
    missing = deps.filter(~target.is_in(rows["id"].implode()))
    findings.add("dep-missing", missing)


def _check_overlap(findings: Findings, rows: pl.DataFrame) -> None:
    stream = ["rank", "stream"]
    end = pl.col("start_ns") + pl.col("dur_ns")
    timed = (
        rows.filter(pl.col("start_ns").is_not_null())
        .sort(*stream, maintain_order=True)
        .with_columns(reach=end.cum_max().shift(1).over(stream))
    )
    # Members of a batch overlap each other: each is measured against what ran before all.
    before_batch = pl.col("reach").first().over([*stream, "batch"])
    reach = pl.when(pl.col("batch").is_null()).then(pl.col("reach")).otherwise(before_batch)
    broken = timed.filter(pl.col("start_ns") < reach)
    findings.add("overlap", broken.select(*_PLACE, "stream", "start_ns", previous_end_ns=reach))


def _check_xdeps(findings: Findings) -> None:
    nodes, header = findings.trace.nodes, findings.trace.header
    rows = nodes.filter(pl.col("xdeps").list.len() > 0).select(*_PLACE, xdep="xdeps").collect()
    if rows.is_empty():
        return
    xdeps = rows.explode("xdep", empty_as_null=False, keep_nulls=False)
    wanted = xdeps["xdep"].unique()
    found = nodes.filter(pl.col("id").is_in(wanted.implode())).select("id").collect()["id"]
    present = nodes.select("rank").unique().collect(engine="streaming")["rank"].to_list()
    rank = pl.col("xdep") // (1 << INDEX_BITS)
    missing = xdeps.filter(
        ~pl.col("xdep").is_in(found.implode()) & (rank.is_in(present) | (rank >= header.world_size))
    )
    findings.add("xdep-missing", missing)
