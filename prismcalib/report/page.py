"""The page: everything in one file, bounded in size, with no need for a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from string import Template

from prismcalib.chosen_steps import chosen_steps
from prismcalib.paths import calibrated_trace
from prismcalib.report.data import RunSummary, about_steps, describe_run
from prismcalib.report.encode import encode_timeline
from prismcalib.report.lanes import Lane, read_lanes
from prismcalib.report.markup import legend, ns_text
from prismcalib.report.sections import render_sections, timeline_tables
from prismcalib.step_times import steps_text
from prismtrace import __version__
from prismtrace.output import atomic_output
from prismtrace.ranks import format_ranks
from prismtrace.trace import Trace

__all__ = ["MOST_BYTES", "render_page", "write_report"]

MOST_BYTES = 10_000_000
"""A page is never larger: where it would be, the timeline shows fewer cells and spans."""

_MOST_SPANS = 160_000
_MOST_PATH_RUNS = 60_000


def write_report(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    most_bytes: int = MOST_BYTES,
    on_rows: Callable[[int], None] | None = None,
    steps: str = "auto",
) -> RunSummary:
    """Write the report of a calibrated trace as one HTML file; returns its numbers.

    Args:
        source: a calibrated trace, or where it is.
        path: the file to write; replaced when the new one is whole.
        most_bytes: largest size of the file.
        on_rows: is told how many more rows have been read.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: the trace is not calibrated, or rows lack times.
        StepError: steps that are not in it.
        OutputError: the file cannot be written.
    """
    whole = calibrated_trace(source)
    with (
        atomic_output(path) as temporary,
        chosen_steps(whole, steps, marks=True) as (trace, looked_at),
    ):
        summary = describe_run(trace, on_rows=on_rows, steps="all")
        summary = about_steps(summary, whole, looked_at)
        page = render_page(trace, summary, most_bytes=most_bytes)
        temporary.write_text(page, encoding="utf-8")
    return summary


def render_page(trace: Trace, summary: RunSummary, *, most_bytes: int = MOST_BYTES) -> str:
    """The page as text; at most `most_bytes` long unless the tables alone are longer.

    Args:
        trace: the trace that `summary` describes.
        summary: its numbers.
        most_bytes: largest size in UTF-8.
    """
    spans, runs = _MOST_SPANS, _MOST_PATH_RUNS
    while True:
        lanes = read_lanes(trace, summary, spans)
        page = _render(trace, summary, lanes, runs)
        if len(page.encode()) <= most_bytes or spans < 1000:
            return page
        spans, runs = spans // 2, runs // 2
        summary = replace(summary, grids=tuple(grid.coarser() for grid in summary.grids))


def _render(trace: Trace, summary: RunSummary, lanes: Sequence[Lane], runs: int) -> str:
    description, block = encode_timeline(summary, lanes, runs)
    sections = render_sections(summary)
    every = len(lanes) == len(summary.extent.ranks)
    return Template(_read("page.html")).substitute(
        title=escape(_title(trace, summary)),
        facts=escape(_facts(summary)),
        headline=escape(summary.conclusion.headline),
        notes="\n".join(f"<li>{escape(note)}</li>" for note in summary.conclusion.notes),
        contents="".join(
            f'<a href="#{anchor}">{escape(title)}</a>'
            for anchor, title in [
                ("timeline", "Timeline"),
                *((anchor, title) for anchor, title, _ in sections),
            ]
        ),
        legend=legend(),
        lanes_title="All ranks, span by span" if every else "Some ranks, span by span",
        timeline_tables=timeline_tables(summary, lanes),
        sections="\n".join(
            f'<section id="{anchor}">\n<h2>{escape(title)}</h2>\n{html}\n</section>'
            for anchor, title, html in sections
        ),
        footer=escape(_footer(summary)),
        # `<` would let a kernel's name end the script element.
        description=json.dumps(description, separators=(",", ":")).replace("<", "\\u003c"),
        block=block,
        style=_read("page.css"),
        script="\n".join(_read(f"{name}.js") for name in ("reading", "drawing", "moving")),
    )


def _read(name: str) -> str:
    return files("prismcalib.report").joinpath(name).read_text(encoding="utf-8")


def _title(trace: Trace, summary: RunSummary) -> str:
    names = [path.stem for path in trace.paths[:1]]
    more = f" and {len(trace.paths) - 1} more files" if len(trace.paths) > 1 else ""
    ranks = f"{len(summary.extent.ranks):,} ranks"
    return f"{names[0]}{more}: {ranks}" if names else ranks


def _facts(summary: RunSummary) -> str:
    header, extent = summary.header, summary.extent
    facts = []
    axes = " × ".join(f"{name} {size}" for name, size in header.axes.items() if size > 1)
    if axes:
        facts.append(axes)
    if len(extent.ranks) < header.world_size:
        facts.append(f"ranks {format_ranks(extent.ranks.tolist())} of {header.world_size:,}")
    steps = summary.steps.drop_nulls("step").height
    if steps:
        facts.append(f"{steps:,} step{'s' if steps > 1 else ''}")
        facts.append(f"step time {ns_text(summary.step_ns)} ({steps_text(steps, summary.warmup)})")
    if summary.looked_at is not None and summary.looked_at.sentence:
        facts.append(summary.looked_at.sentence)
    facts.append(f"window {ns_text(extent.window_ns)}")
    facts.append(f"{int(extent.rows.sum()):,} spans")
    groups = len(header.groups)
    facts.append(f"{groups:,} process group{'s' if groups != 1 else ''}")
    return " · ".join(facts)


def _footer(summary: RunSummary) -> str:
    header = summary.header
    made = (
        f"Made by prismcalib report {__version__} from a trace by {header.created_by or 'unknown'}."
    )
    sources = header.sources
    if sources:
        shown = ", ".join(sources[:4]) + (
            f" and {len(sources) - 4} more" if len(sources) > 4 else ""
        )
        made += f" Sources: {shown}."
    return (
        f"{made} This page needs no network and sends nothing. "
        "The same numbers for programs: prismcalib report TRACE --json."
    )
