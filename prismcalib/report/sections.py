"""The parts of the page below the timeline, each a function from numbers to HTML."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prismcalib.report.answers import (
    communication_section,
    path_section,
    pipeline_section,
    ranks_section,
    stragglers_section,
)
from prismcalib.report.conclusion import peaks_note
from prismcalib.report.data import RunSummary
from prismcalib.report.grids import LEVELS
from prismcalib.report.lanes import Lane
from prismcalib.report.markup import (
    PART_CLASSES,
    PART_WORDS,
    Bar,
    Cell,
    Number,
    about_text,
    bytes_text,
    ns_text,
    percent,
    render_lines,
    render_table,
)
from prismcalib.step_times import steps_text
from prismcalib.wording import RankNames
from prismtrace.ranks import format_ranks

__all__ = ["render_sections", "timeline_tables"]

_SLICES = 16
_MOST_ROWS = 24


def render_sections(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Anchor, title and HTML of every section, in order."""
    sections = [
        ("path", "Critical path", path_section(summary)),
        ("stragglers", "Stragglers", stragglers_section(summary)),
        ("ranks", "Where ranks spend their time", ranks_section(summary)),
    ]
    if summary.pipeline is not None:
        sections.append(("pipeline", "Pipeline bubbles", pipeline_section(summary)))
    sections.append(("communication", "Waits and transfers", communication_section(summary)))
    sections.append(("steps", "Steps", _steps(summary)))
    if summary.memory is not None:
        sections.append(("memory", "Memory", _memory(summary)))
    sections.append(("basis", "What the numbers rest on", _basis(summary)))
    return sections


def timeline_tables(summary: RunSummary, lanes: Sequence[Lane]) -> str:
    """The timeline in numbers."""
    grid = summary.grids[0].shares.astype(float)
    parts, _, bins = grid.shape
    shares = grid.mean(axis=1).reshape(parts, _SLICES, bins // _SLICES).mean(axis=2) / LEVELS
    edges = [summary.extent.window_ns * i // _SLICES for i in range(_SLICES + 1)]
    rows: list[tuple[Cell, ...]] = [
        (
            f"{ns_text(edges[i])} to {ns_text(edges[i + 1])}",
            Bar(tuple(zip(PART_CLASSES.values(), shares[:, i].tolist(), strict=False))),
            *(percent(float(share)) for share in shares[:, i]),
            percent(max(1 - float(shares[:, i].sum()), 0.0)),
        )
        for i in range(_SLICES)
    ]
    heads, names = ("time", "", *PART_WORDS.values()), RankNames.of(summary.header)
    text = render_table("All ranks over time (means over all ranks)", heads, rows)
    detail = render_table(
        "Ranks shown span by span",
        (*names.heads, "chosen because", "spans", "left out (shortest)", "their time"),
        [
            (
                *map(str, names.cells(lane.rank)),
                lane.why or "all ranks are shown",
                Number(f"{lane.spans.height:,}"),
                Number(f"{lane.dropped:,}"),
                ns_text(lane.dropped_ns),
            )
            for lane in lanes
        ],
    )
    return f"<details><summary>The timeline in numbers</summary>{text}{detail}</details>"


def _steps(summary: RunSummary) -> str:
    steps = summary.steps
    if steps["step"].null_count():
        return (
            f'<p class="empty">The trace marks no steps; its whole window lasts '
            f"{ns_text(summary.extent.window_ns)}.</p>"
        )
    longest = max([1, *steps["duration_ns"].to_list()])
    shown = steps.head(64)
    reading = about_text(
        "A step lasts from the end of the step before (the first: from the first start) to its own "
        "last end over all ranks. The step time is the median of the steps after the warm-up, as "
        "in every command."
        + (f" The first 64 of {steps.height} steps." if steps.height > 64 else "")
    )
    table = render_table(
        f"step times, {steps_text(steps.height, summary.warmup)}: {ns_text(summary.step_ns)}",
        ("step", "", "time", "against the median"),
        [
            (
                str(step),
                Bar((("plain", duration / longest),)),
                ns_text(duration),
                percent(duration / max(summary.step_ns, 1) - 1, sign=True),
            )
            for step, duration in shown.rows()
        ],
    )
    return reading + table + _spread(summary)


def _spread(summary: RunSummary) -> str:
    """Quantiles of the step time, and what estimated transfers leave open, where known."""
    prediction = summary.prediction
    if prediction is None:
        return ""
    html = ""
    if prediction.spread is not None:
        spread = prediction.spread
        html += render_table(
            f"step time to expect, from {spread.observed_steps} steps shuffled per rank",
            ("quantile", "step time", "90 % sure between"),
            [
                (
                    f"p{round(100 * quantile.level)}",
                    ns_text(quantile.ns),
                    f"{ns_text(quantile.low_ns)} and {ns_text(quantile.high_ns)}",
                )
                for quantile in spread.quantiles
            ],
        )
    if prediction.estimates is not None:
        estimates = prediction.estimates
        html += about_text(
            f"Transfers that were not measured leave the step time between "
            f"{ns_text(estimates.low_ns)} and {ns_text(estimates.high_ns)}."
        )
    return f'<div class="narrow">{html}</div>' if html else ""


def _memory(summary: RunSummary) -> str:
    memory = summary.memory
    if memory is None:
        raise AssertionError
    levels, window = memory.levels, summary.extent.window_ns
    peaks = levels.argmax(axis=1)
    chart = render_lines("allocated bytes over time", memory.names, levels, window)
    most = max(int(levels.max(initial=0)), 1)
    table = render_table(
        "allocated bytes",
        ("", "", "peak", "at", "lowest", "at the end"),
        [
            (
                name,
                Bar((("plain", int(line.max()) / most),)),
                bytes_text(int(line.max())),
                ns_text((int(peak) + 0.5) * window / levels.shape[1]),
                bytes_text(int(line.min())),
                bytes_text(int(line[-1])),
            )
            for name, line, peak in zip(memory.names, levels, peaks, strict=True)
        ],
    )
    about = "Highest level in each of 256 slices of the window."
    if summary.peaks_left_out is not None:
        note = peaks_note(summary.peaks_left_out, RankNames.of(summary.header))
        about = " ".join([*note, about])
    return about_text(about) + chart + table


def _basis(summary: RunSummary) -> str:
    header = summary.header
    tables = [
        render_table(
            "what the critical path rests on",
            ("", "", "share"),
            [
                (name, Bar((("plain", share),)), percent(share))
                for name, share in summary.basis.items()
            ],
        ),
        render_table(
            "all transfers by source of their time",
            ("source", "rows", "time"),
            [
                (source or "unknown", Number(f"{rows:,}"), ns_text(time))
                for source, rows, time in summary.sources.rows()
            ],
        ),
        render_table(
            "repairs and assumptions",
            ("what", "times"),
            [
                (name.replace("-", " ").replace(".", ": "), Number(f"{count:,}"))
                for name, count in header.policies.items()
                if count
            ]
            + (
                [("rows of virtual ranks", Number(f"{summary.virtual_rows:,}"))]
                if summary.virtual_rows
                else []
            ),
            empty="none: nothing had to be repaired, dropped or assumed",
        ),
        _clocks(summary),
    ]
    return f'<div class="columns">{"".join(tables)}</div>'


def _clocks(summary: RunSummary) -> str:
    domains = sorted(
        summary.header.clock, key=lambda domain: (-(domain.uncertainty_ns or 0), domain.id)
    )
    offsets = np.array([abs(domain.offset_ns or 0) for domain in domains])
    moved = int((offsets > 0).sum())
    more = (
        f", the {_MOST_ROWS} most uncertain of {len(domains)}" if len(domains) > _MOST_ROWS else ""
    )
    return render_table(
        f"clocks: {moved} of {len(domains)} corrected{more}",
        ("ranks", "host", "added", "uncertain by"),
        [
            (
                format_ranks(domain.ranks)[:60],
                domain.host,
                ns_text(domain.offset_ns),
                ns_text(domain.uncertainty_ns),
            )
            for domain in domains[:_MOST_ROWS]
        ],
        empty="the trace names no clocks",
    )
