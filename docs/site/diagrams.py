"""The diagrams of docs/concepts.md, drawn from the code: its import rules and its own results.

python docs/site/diagrams.py        writes docs/images/*.svg; a test keeps them current
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import polars as pl

import prismcalib
import prismtrace as pt
from prismcalib import synth
from prismtrace.schema import Phase

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("prismtrace", "prismcalib", "prismreplay")
WIDTH, MARGIN, ROW = 760, 70, 26

# Colours that stay apart for all eyes and on both backgrounds.
COLORS = {
    Phase.FORWARD: "#56b4e9",
    Phase.BACKWARD: "#0072b2",
    Phase.OPTIMIZER: "#999999",
    Phase.OTHER: "#cc79a7",
    "transfer": "#e69f00",
    "wait": "#f6d99a",
}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.quiet{fill:#6e7781}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9aa4af}}"
)
CRITICAL = "#d55e00"


class Bar(NamedTuple):
    """Something that a rank does for a while; times in ns."""

    row: int
    start: int
    end: int
    what: Phase | str
    critical: bool = False


def diagrams() -> dict[str, str]:
    """The text of every diagram by its file's name."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "layers.svg": _layers(),
            "wait-and-transfer.svg": _wait_and_transfer(),
            "pipeline.svg": _pipeline(),
            "slices.svg": _slices(Path(folder)),
        }


# --- packages -------------------------------------------------------------------------


def _layers() -> str:
    """The packages on top of each other, each with what it must not import."""
    parts = []
    for place, package in enumerate(reversed(PACKAGES)):
        rules = tomllib.loads((REPO / package / "ruff.toml").read_text(encoding="utf-8"))
        tidy = rules["lint"]["flake8-tidy-imports"]
        never = sorted(tidy["banned-api"])
        inside = sorted(set(tidy.get("banned-module-level-imports", [])) - set(never))
        top = 10 + 66 * place
        box = f'x="10" y="{top}" width="{WIDTH - 20}" height="56" rx="6"'
        parts += [
            f'<rect {box} fill="none" stroke="{COLORS[Phase.BACKWARD]}" stroke-width="1.5"/>',
            _text(24, top + 33, package),
            _text(140, top + 24, f"never imports {', '.join(never)}", "quiet"),
        ]
        if inside:
            parts.append(
                _text(140, top + 43, f"inside functions only: {', '.join(inside)}", "quiet")
            )
    return _svg(10 + 66 * len(PACKAGES), parts, "Packages, each on top of what it may import")


# --- timelines ------------------------------------------------------------------------


def _wait_and_transfer() -> str:
    """One reduce_scatter of 4 ranks: as a profiler shows it, and split."""
    job = synth.JobSpec(pp=1, tp=1, dp=4, microbatches=1, layers_per_stage=2, stragglers={2: 1.3})
    nodes = prismcalib.merge(synth.generate(job)).nodes
    one = nodes.filter(pl.col("kind") == "reduce_scatter", pl.col("seq") == 0)
    shown, split = [], []
    for row, (start, length, wait) in enumerate(one.select("start_ns", "dur_ns", "wait_ns").rows()):
        ready, end = start + wait, start + length
        shown.append(Bar(row, start, end, "transfer"))
        split += [Bar(row, start, ready, "wait"), Bar(row, ready, end, "transfer")]
    return _timelines(
        [("in a profile", shown), ("after merge", split)],
        "One reduce_scatter of four ranks. In a profile the ranks that came early seem slow; after "
        "merge their wait for rank 2 is split off",
    )


def _pipeline() -> str:
    """One step of a pipeline, with its critical path."""
    job = synth.JobSpec(pp=4, tp=1, dp=1, microbatches=6, layers_per_stage=1)
    nodes = prismcalib.merge(synth.generate(job)).nodes
    return _timelines(
        [("one step", list(_bars(nodes)))],
        "One step of a pipeline of four stages and six microbatches; the line under the bars is "
        "the critical path",
    )


def _slices(folder: Path) -> str:
    """The same step as slices of one rank each, and merged from these."""
    job = synth.JobSpec(pp=4, tp=1, dp=1, microbatches=6, layers_per_stage=1)
    paths = synth.cut_into_slices(job, folder, 1)
    alone: list[Bar] = []
    for path in paths:
        rows = pt.open(path).collect().filter("real")
        began = pl.col("start_ns") - rows["start_ns"].min()
        waits = pl.lit(0, pl.Int64)  # for nobody
        alone += _bars(
            rows.with_columns(start_ns=began, wait_ns=waits, critical=pl.lit(value=False))
        )
    merged = prismcalib.merge(paths).nodes
    return _timelines(
        [("slices", alone), ("merged", list(_bars(merged)))],
        "Four slices, in each of which one rank is real and waits for nobody, and the step that "
        "merge makes of them",
    )


def _bars(nodes: pl.DataFrame) -> Iterator[Bar]:
    """Waits and transfers of the ranks, and on top of them what they compute."""
    columns = ("rank", "start_ns", "dur_ns", "wait_ns", "phase", "critical", "seq")
    found = nodes.select(columns).sort("seq", nulls_last=True)
    for rank, start, length, wait, phase, critical, seq in found.iter_rows():
        end = start + length
        if seq is None:
            yield Bar(rank, start, end, Phase(phase), critical)
        else:
            yield Bar(rank, start, start + wait, "wait")
            yield Bar(rank, start + wait, end, "transfer", critical)


def _timelines(parts: list[tuple[str, list[Bar]]], title: str) -> str:
    first = min(bar.start for _, bars in parts for bar in bars)
    scale = (WIDTH - MARGIN - 10) / (max(bar.end for _, bars in parts for bar in bars) - first)
    drawn, top = [], 10
    for name, bars in parts:
        drawn.append(_text(10, top + 12, name, "quiet"))
        top += 20
        rows = sorted({bar.row for bar in bars})
        drawn += [_text(10, top + ROW * row + 16, f"rank {row}") for row in rows]
        for bar in bars:
            left, right = ((time - first) * scale + MARGIN for time in (bar.start, bar.end))
            if right - left < 0.05:
                continue
            box = f'x="{left:.1f}" width="{right - left:.1f}"'
            y = top + ROW * bar.row
            drawn.append(f'<rect {box} y="{y + 2}" height="18" fill="{COLORS[bar.what]}"/>')
            if bar.critical:
                drawn.append(f'<rect {box} y="{y + 21}" height="3" fill="{CRITICAL}"/>')
        top += ROW * (1 + rows[-1]) + 10
    used = {bar.what for _, bars in parts for bar in bars}
    left = MARGIN
    for what, color in COLORS.items():
        if what in used:
            drawn.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{color}"/>')
            drawn.append(_text(left + 18, top + 11, str(what), "quiet"))
            left += 34 + 8 * len(str(what))
    if any(bar.critical for _, bars in parts for bar in bars):
        drawn.append(f'<rect x="{left}" y="{top + 5}" width="12" height="3" fill="{CRITICAL}"/>')
        drawn.append(_text(left + 18, top + 11, "critical path", "quiet"))
    return _svg(top + 24, drawn, title)


# --- SVG ------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{attribute}>{escape(text)}</text>'


def _svg(height: int, parts: list[str], title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
    )
    about = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join([head, about, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, text in diagrams().items():
        (REPO / "docs" / "images" / name).write_text(text, encoding="utf-8")
