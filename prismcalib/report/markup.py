"""Small pieces of HTML: tables whose cells may be bars, numbers with units, charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from prismcalib.durations import format_ns
from prismcalib.graph import Int64Array
from prismcalib.wording import IDLE_BETWEEN, IDLE_INSIDE

__all__ = [
    "PART_CLASSES",
    "PART_WORDS",
    "Bar",
    "Cell",
    "Name",
    "Number",
    "about_text",
    "bytes_text",
    "legend",
    "ns_text",
    "parts_bar",
    "percent",
    "render_columns",
    "render_lines",
    "render_table",
]

PART_WORDS = {
    "compute": "computing",
    "inner_idle": IDLE_INSIDE,
    "transfer": "transferring",
    "wait": "waiting for other ranks",
    "gap": IDLE_BETWEEN,
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PART_CLASSES = {part: part.replace("_", "-") for part in PART_WORDS}


class Name(str):
    """A cell that may be long and is broken anywhere."""

    __slots__ = ()


class Number(str):
    """A cell that is aligned to the right."""

    __slots__ = ()


@dataclass(frozen=True)
class Bar:
    """A cell that is a bar: pairs of a CSS class and a share of the cell's width."""

    parts: tuple[tuple[str, float], ...]


Cell = str | Bar | None
"""What a table holds; None is shown as a dash."""


def ns_text(ns: float | None) -> Number:
    """A duration for people."""
    return Number("–" if ns is None else format_ns(round(ns)).replace(" us", " µs"))


def percent(share: float | None, *, sign: bool = False) -> Number:
    """A share for people, one decimal."""
    if share is None:
        return Number("–")
    share = round(share, 3) + 0.0  # no negative zero
    text = f"{share:+.1%}" if sign else f"{share:.1%}"
    return Number(text.replace("%", " %"))


def bytes_text(count: float | None) -> Number:
    """A size in binary units."""
    if count is None:
        return Number("–")
    power = min((max(int(count), 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    value = count / 1024**power
    return Number(f"{value:,.0f} B" if not power else f"{value:,.1f} {_UNITS[power]}")


def parts_bar(times: Sequence[float], whole: float) -> Bar:
    """A bar of computing, idle inside, transferring, waiting (and the rest is the background)."""
    classes = list(PART_CLASSES.values())
    return Bar(
        tuple(
            (name, time / max(whole, 1)) for name, time in zip(classes, times, strict=False) if time
        )
    )


def render_table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    empty: str = "none",
) -> str:
    """A table; columns that hold numbers are aligned by their cells' class."""
    body = [list(row) for row in rows]
    if not body:
        return f'<h3>{escape(caption)}</h3><p class="empty">{escape(empty)}</p>'
    right = [any(isinstance(row[i], Number) for row in body) for i in range(len(heads))]
    head = "".join(
        f'<th scope="col"{" class=number" if number else ""}>{escape(text)}</th>'
        for text, number in zip(heads, right, strict=True)
    )
    lines = "\n".join(
        f"<tr>{''.join(_cell(cell, number) for cell, number in zip(row, right, strict=True))}</tr>"
        for row in body
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def _cell(cell: Cell, number: bool) -> str:
    if isinstance(cell, Bar):
        return f'<td class="wide">{_bar(cell)}</td>'
    kind = ' class="number"' if number else ' class="name"' if isinstance(cell, Name) else ""
    return f"<td{kind}>{escape(cell) if cell is not None else '–'}</td>"


def _bar(bar: Bar) -> str:
    pieces = "".join(
        f'<i class="{name}" style="width:{min(max(share, 0), 1) * 100:.2f}%"></i>'
        for name, share in bar.parts
    )
    return f'<div class="bar" aria-hidden="true">{pieces}</div>'


def render_columns(label: str, stacks: Sequence[tuple[str, Sequence[float]]]) -> str:
    """A chart of stacked columns.

    Args:
        label: what it shows.
        stacks: of each column its name and the shares of `PART_CLASSES`, first at the bottom.
    """
    width, height, left, bottom = 1000, 190, 40, 18
    each = (width - left) / max(len(stacks), 1)
    inner = height - bottom - 8
    pieces = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = 8 + inner * (1 - share)
        pieces.append(f'<line x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    every = max(1, -(-len(stacks) // 16))
    for place, (name, shares) in enumerate(stacks):
        x = left + place * each
        y = 8.0 + inner
        words = [
            f"{word} {percent(share)}"
            for word, share in zip(PART_WORDS.values(), shares, strict=True)
        ]
        pieces.append(f"<g><title>{escape(name)}: {escape(', '.join(words))}</title>")
        for part, share in zip(PART_CLASSES.values(), shares, strict=True):
            tall = inner * share
            y -= tall
            if tall > 0:
                pieces.append(
                    f'<rect class="{part}" x="{x + each * 0.06:.2f}" y="{y:.2f}" '
                    f'width="{each * 0.88:.2f}" height="{tall:.2f}"/>'
                )
        pieces.append("</g>")
        if place % every == 0:
            pieces.append(
                f'<text x="{x + each / 2:.1f}" y="{height - 4}" text-anchor="middle">'
                f"{escape(name.removeprefix('rank ').removeprefix('ranks '))}</text>"
            )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(pieces)}</svg>"
    )


def render_lines(label: str, names: Sequence[str], levels: Int64Array, window_ns: int) -> str:
    """A chart of bytes over time; each line is named where it ends.

    Args:
        label: what it shows.
        names: of the lines.
        levels: int64[lines, bins] over the window.
        window_ns: its length.
    """
    width, height, left, right, bottom = 1000, 220, 70, 110, 20
    top = float(levels.max(initial=1)) * 1.05
    inner = height - bottom - 8
    pieces = []
    for share in (0.0, 0.5, 1.0):
        y = 8 + inner * (1 - share)
        pieces.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        pieces.append(
            f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{bytes_text(top * share)}</text>'
        )
    for share in (0.0, 0.5, 1.0):
        x = left + (width - left - right) * share
        pieces.append(
            f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{ns_text(window_ns * share)}</text>'
        )
    xs = left + (width - left - right) * (np.arange(levels.shape[1]) + 0.5) / levels.shape[1]
    ends = 8 + inner * (1 - levels[:, -1] / top)
    places = _apart(ends, 13, 14, height - bottom)
    for number, (name, line) in enumerate(zip(names, levels, strict=True)):
        ys = 8 + inner * (1 - line / top)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        # Lines differ by dashes, not by colour, and are named at their ends.
        dash = ("none", "7 3", "2 3", "9 3 2 3")[number % 4]
        pieces.append(
            f"<g><title>{escape(name)}: at most {bytes_text(int(line.max()))}</title>"
            f'<polyline stroke-dasharray="{dash}" points="{points}"/>'
            f'<text x="{width - right + 8}" y="{places[number] + 4:.1f}">{escape(name)}</text></g>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(pieces)}</svg>"
    )


def _apart(
    wanted: np.ndarray[tuple[int], np.dtype[np.float64]], least: float, low: float, high: float
) -> list[float]:
    """Heights near the wanted ones, but `least` apart, as far as there is room."""
    order = np.argsort(wanted, kind="stable")
    least = min(least, (high - low) / max(len(wanted) - 1, 1))
    result = wanted.astype(float).copy()
    before = low - least
    for place in order:
        result[place] = before = max(result[place], before + least)
    after = high + least
    for place in order[::-1]:
        result[place] = after = min(result[place], after - least)
    return result.tolist()


def legend() -> str:
    """What the colours mean."""
    items = [
        f'<li><i class="{name}"></i>{PART_WORDS[part]}</li>' for part, name in PART_CLASSES.items()
    ]
    items.append('<li><i class="path"></i>critical path</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def about_text(text: str) -> str:
    """A line in small print that says how to read what follows."""
    return f'<p class="about">{escape(text)}</p>'
