"""The parts of the page that say what to act on, each a function from numbers to HTML."""

from __future__ import annotations

from html import escape
from typing import Any

import polars as pl

from prismcalib.paths import ShareColumn
from prismcalib.report.data import RunSummary
from prismcalib.report.markup import (
    PART_WORDS,
    Bar,
    Cell,
    Name,
    Number,
    about_text,
    bytes_text,
    legend,
    ns_text,
    parts_bar,
    percent,
    render_columns,
    render_table,
)
from prismcalib.step_times import steps_text
from prismcalib.wording import (
    CAUSE_MEANING,
    IDLE_BETWEEN,
    IDLE_INSIDE,
    PART_MEANINGS,
    RankNames,
    no_peers,
    share_text,
)
from prismtrace.ranks import format_ranks

__all__ = [
    "communication_section",
    "path_section",
    "pipeline_section",
    "ranks_section",
    "stragglers_section",
]

_TIMES = ("compute_ns", "inner_idle_ns", "transfer_ns", "wait_ns", "gap_ns")
_MOST_COLUMNS = 128
_MOST_ROWS = 24


def path_section(summary: RunSummary) -> str:
    """The critical path: what it is made of, where it runs, its longest segments."""
    path, names = summary.path, RankNames.of(summary.header)
    length = max(path.length_ns, 1)
    parts = [
        ("computation", "compute", path.compute_ns - path.inner_idle_ns),
        (IDLE_INSIDE, "inner-idle", path.inner_idle_ns),
        ("transfers", "transfer", path.transfer_ns),
        ("communication without recorded partners", "wait", path.unmatched_ns),
        (f"{IDLE_BETWEEN} (launch and host delays)", "inner-idle", path.gap_ns),
        ("before the path starts", "inner-idle", path.lead_in_ns),
    ]
    whole = render_table(
        f"{ns_text(length)}: {path.segments.height:,} segments, {path.hops:,} change{'s' if path.hops != 1 else ''} of rank",
        ("what", "", "time", "share"),
        [
            (word, Bar(((name, time / length),)), ns_text(time), percent(time / length))
            for word, name, time in parts
            if time
        ],
    )
    shares = []
    columns: tuple[ShareColumn, ...] = ("rank", "kind", "group", "phase", "step")
    for column in columns:
        table = path.shares(column)
        if table[column].null_count() == table.height or (column == "step" and table.height < 2):
            continue
        if column == "step":
            table = table.sort("step", nulls_last=True)
        more = f", first 8 of {table.height}" if table.height > 8 else ""
        shares.append(
            render_table(
                f"by {column}{more}",
                (
                    *(names.heads if column == "rank" else (column,)),
                    "",
                    "share",
                    "busy",
                    "idle, both",
                ),
                [
                    (
                        *(_rank_cells(names, row["rank"]) if column == "rank" else ()),
                        *_share_row(row, length)[1 if column == "rank" else 0 :],
                    )
                    for row in table.head(8).iter_rows(named=True)
                ],
            )
        )
    longest = render_table(
        "longest segments",
        (*names.heads, "name", "kind", "group", "seq", "busy", IDLE_INSIDE, "idle before it"),
        [
            (
                *_rank_cells(names, row["rank"]),
                Name((row["name"] or "–")[:120]),
                row["kind"],
                row["group"],
                Number("–" if row["seq"] is None else row["seq"]),
                ns_text(row["busy_ns"] - row["inner_idle_ns"]),
                ns_text(row["inner_idle_ns"]),
                ns_text(row["gap_ns"]),
            )
            for row in path.longest(12).iter_rows(named=True)
        ],
    )
    reading = about_text(
        "The longest chain of work and transfers through all ranks: the run ends sooner only if "
        "something on it gets faster."
    )
    return f'{reading}<div class="narrow">{whole}</div><div class="columns">{"".join(shares)}</div>{longest}'


def _share_row(row: dict[str, Any], length: int) -> tuple[Cell, ...]:
    name = next(iter(row.values()))
    busy = row["busy_ns"] - row["inner_idle_ns"]
    idle = row["inner_idle_ns"] + row["gap_ns"]
    return (
        "(none)" if name is None else str(name),
        Bar((("plain", busy / length), ("inner-idle", idle / length))),
        percent(row["share"]),
        ns_text(busy),
        ns_text(idle),
    )


def _fine_percent(share: float) -> Number:
    """With the digits that `prismcalib stragglers` prints."""
    return Number(share_text(share).replace("%", " %"))


def _rank_cells(names: RankNames, rank: int | None) -> tuple[Cell, ...]:
    return tuple("–" if cell is None else str(cell) for cell in names.cells(rank))


def stragglers_section(summary: RunSummary) -> str:
    """What uneven ranks, stages and kinds cost, and likely causes."""
    report, names = summary.stragglers, RankNames.of(summary.header)
    if report is None:
        reason = f'<p class="empty">{escape(summary.stragglers_absent)}</p>'
        return reason + _late_ranks(summary) + _slow_ranks(summary)
    if report.nothing_compared:
        reason = f'<p class="empty">{escape(no_peers(report.peers))}</p>'
        return reason + _late_ranks(summary) + _slow_ranks(summary)
    reading = about_text(
        f"Computed anew with every operation as long as on its peers, a step would take "
        f"{ns_text(float(report.ideal_ns.mean()))} instead of "
        f"{ns_text(float(report.without_delays_ns.mean()))} (without launch delays; "
        f"{ns_text(float(report.base_ns.mean()))} as it was; "
        f"{steps_text(len(report.steps) + report.warmup, report.warmup, 'mean')}). "
        + " ".join(f"{meaning.capitalize()}." for meaning in (*PART_MEANINGS, CAUSE_MEANING))
    )
    causes = render_table(
        "likely causes (they overlap)",
        ("cause", "where", "saves", "", "evidence", "what to do"),
        [
            (
                cause.kind.replace("-", " "),
                cause.where,
                _fine_percent(cause.saves),
                cause.without,
                cause.evidence,
                cause.advice,
            )
            for cause in report.causes
        ],
        empty="nothing stands out: ranks, stages and groups take about equally long",
    )
    most = max((part.slowdown - 1 for parts in report.parts.values() for part in parts), default=0)
    tables = [
        render_table(
            f"by {by}"
            + (
                f", first 8 of {len(parts) + report.not_simulated.get(by, 0)}"
                if len(parts) > 8
                else ""
            ),
            (*(names.heads if by == "rank" else (by,)), "", "slowdown", "saves if like its peers"),
            [
                (
                    *(_rank_cells(names, int(part.name)) if by == "rank" else (part.name,)),
                    Bar((("plain", (part.slowdown - 1) / max(most, 1e-9)),)),
                    Number(f"{part.slowdown:.4f}"),
                    _fine_percent(part.saves),
                )
                for part in parts[:8]
            ],
        )
        for by, parts in report.parts.items()
    ]
    parts = f'<div class="columns">{"".join(tables)}</div>'
    return reading + causes + parts + _late_ranks(summary) + _slow_ranks(summary)


def _late_ranks(summary: RunSummary) -> str:
    late, names = summary.late, RankNames.of(summary.header)
    if late is None or not late.wait_ns:
        return ""
    return render_table(
        late.sentence,
        (*names.heads, "", "of all waiting", "waiting caused", "arrived last"),
        [
            (
                *_rank_cells(names, rank),
                Bar((("wait", share),)),
                percent(share),
                ns_text(caused),
                Number(f"{last:,}"),
            )
            for rank, last, caused, share in late.ranks.head(8).rows()
        ],
    )


def _slow_ranks(summary: RunSummary) -> str:
    slow = summary.ranks.filter(pl.col("excess") > 0).sort("excess", descending=True).head(8)
    most, names = max(slow["excess"].to_list(), default=0), RankNames.of(summary.header)
    peers = "of their stage" if summary.pipeline is not None else ""
    return render_table(
        f"ranks that compute longest against the median of the other ranks {peers}".strip(),
        (*names.heads, "", "longer by", "computes", "its peers", "of the critical path"),
        [
            (
                *_rank_cells(names, row["rank"]),
                Bar((("plain", row["excess"] / max(most, 1e-9)),)),
                percent(row["excess"], sign=True),
                ns_text(row["compute_ns"]),
                ns_text(row["peers_ns"]),
                percent(row["path_share"]),
            )
            for row in slow.iter_rows(named=True)
        ],
        empty="no rank has peers to compare with",
    )


def ranks_section(summary: RunSummary) -> str:
    """What every rank (of many ranks: every few) does, and how much it overlaps."""
    ranks = summary.ranks
    window = max(summary.extent.window_ns, 1)
    per_column = -(-ranks.height // _MOST_COLUMNS)
    columns = (
        ranks.with_columns(column=pl.int_range(pl.len()) // per_column)
        .group_by("column", maintain_order=True)
        .agg(
            pl.col("rank"),
            *(pl.col(time).mean() for time in (*_TIMES, "hidden_ns")),
            pl.col("path_share").sum(),
            pl.col("peak_bytes").max(),
        )
    )
    stacks: list[tuple[str, list[float]]] = []
    rows: list[list[Cell]] = []
    memory = columns["peak_bytes"].null_count() < columns.height
    for row in columns.iter_rows(named=True):
        name = ("ranks " if len(row["rank"]) > 1 else "rank ") + format_ranks(row["rank"])
        shares = [row[time] / window for time in _TIMES]
        sent = row["hidden_ns"] + row["transfer_ns"]
        stacks.append((name, shares))
        rows.append(
            [
                name,
                parts_bar([row[time] for time in _TIMES[:4]], window),
                *(percent(share) for share in shares),
                percent(row["hidden_ns"] / sent if sent else None),
                percent(row["path_share"]),
                *([bytes_text(row["peak_bytes"])] if memory else []),
            ]
        )
    reading = about_text(
        "At every instant the first that applies: computing, transferring, waiting, nothing. "
        "Overlap: the part of the transfers that is hidden behind computation."
        + (f" Each column is the mean of {per_column} ranks." if per_column > 1 else "")
    )
    heads = ["", "", *PART_WORDS.values(), "overlap", "of the critical path"]
    table = render_table(
        "shares of the whole window", [*heads, *(["peak memory"] if memory else [])], rows
    )
    if len(rows) > _MOST_ROWS:
        table = f"<details><summary>The same as a table</summary>{table}</details>"
    return reading + legend() + render_columns("time by rank", stacks) + table


def pipeline_section(summary: RunSummary) -> str:
    """Bubbles per stage."""
    pipeline = summary.pipeline
    if pipeline is None:
        raise AssertionError
    window = max(summary.extent.window_ns, 1)
    least = pipeline.least_bubble
    reading = about_text(
        "Bubble: the time in which a stage's ranks neither compute nor transfer. "
        f"Mean over all stages: {percent(pipeline.bubble)}."
        + (
            ""
            if least is None
            else f" A perfect 1F1B schedule of {pipeline.stages} stages and "
            f"{pipeline.microbatches} microbatches has {percent(least)}."
        )
    )
    rows = [
        (
            str(row["stage"]),
            Number(f"{row['ranks']:,}"),
            parts_bar([row[time] for time in _TIMES[:4]], window),
            percent(row["bubble"]),
            ns_text(row["compute_ns"]),
            ns_text(row["transfer_ns"]),
            ns_text(row["wait_ns"]),
            ns_text(row["inner_idle_ns"] + row["gap_ns"]),
            percent(row["path_share"]),
        )
        for row in pipeline.stage_table.iter_rows(named=True)
    ]
    heads = (
        *("stage", "ranks", "", "bubble", "computing", "transferring", "waiting", "idle, both"),
        "of the critical path",
    )
    return reading + render_table("stages (means over their ranks)", heads, rows)


def communication_section(summary: RunSummary) -> str:
    """Waits and transfers per family of groups, and the groups that wait most."""
    traffic = summary.traffic
    if not traffic.height:
        return '<p class="empty">The trace has no communication.</p>'
    reading = about_text(
        "Waiting: from a member's own start until the last member has started; it shrinks when "
        "ranks become even. Transfer: the rest; it shrinks with a faster network or less data."
    )
    most = float(traffic["wait_share"].max() or 1)  # type: ignore[arg-type]
    kinds = render_table(
        "by family of groups and kind (means per member)",
        *(
            ("groups", "kind", "operations", "", "waiting", "transfer", "payload", "payload rate"),
            [
                (
                    f"{row['family']} ({row['groups']:,})",
                    row["kind"],
                    Number(
                        f"{row['operations']:,}"
                        + (f" (+{row['unmatched']:,} unmatched)" if row["unmatched"] else "")
                    ),
                    Bar((("wait", row["wait_share"] / max(most, 1e-9)),)),
                    Number(
                        f"{ns_text(row['wait_ns'])} ({percent(row['wait_share'])} of the window)"
                    ),
                    ns_text(row["transfer_ns"]),
                    bytes_text(row["bytes"] or None),
                    _rate(row["bytes"], row["transfer_ns"]),
                )
                for row in traffic.iter_rows(named=True)
            ],
        ),
    )
    groups, names = summary.groups, RankNames.of(summary.header)
    more = f", first 12 of {groups.height:,}" if groups.height > 12 else ""
    single = render_table(
        f"groups that wait most{more}",
        (
            "group",
            "ranks",
            "operations",
            "waiting, all members",
            "mean wait",
            "mean transfer",
            "arrives last most often",
        ),
        [
            (
                row["name"],
                Number(f"{row['ranks']:,}"),
                Number(f"{row['operations']:,}"),
                ns_text(row["total_wait_ns"]),
                ns_text(row["wait_ns"]),
                ns_text(row["transfer_ns"]),
                "–"
                if row["last_rank"] is None
                else f"rank {names.text(row['last_rank'])}, {percent(row['last_share'])}",
            )
            for row in groups.head(12).iter_rows(named=True)
        ],
    )
    return reading + kinds + single


def _rate(size: float | None, ns: float) -> Number:
    return Number("–" if not size or not ns else f"{size / ns:,.1f} GB/s")
