"""Tables of what `fidelity_cpu.py` has measured, as Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["WARMUP", "tables"]

WARMUP = 3
"""Steps that do not count. The second is unlike the others, too: DDP cuts its buckets anew before it."""


def typical(times: Sequence[float]) -> float:
    """Median after the warm-up, in ms. The first interval begins with the end of step 0."""
    return statistics.median(times[WARMUP - 1 :]) / 1e6


def emulated_ms(run: dict[str, Any]) -> float:
    """The emulated step time, of the same steps, without what the emulator was late."""
    steps = run["report"]["report"]["steps"]
    return statistics.median(one["emulated_ns"] for one in steps[WARMUP:]) / 1e6


def late_share(run: dict[str, Any]) -> float:
    """What the emulator was late, as a share of a typical step."""
    steps = run["report"]["report"]["steps"][WARMUP:]
    return statistics.median(one["late_ns"] / one["emulated_ns"] for one in steps)


def seen_ms(calibration: dict[str, Any]) -> float:
    """The longest step that any slice shows by itself."""
    outcomes = calibration["slice"]["report"]["outcomes"]
    return max(statistics.median(one["step_ns"][WARMUP:]) for one in outcomes) / 1e6


def predicted_ms(calibration: dict[str, Any], *, resampled: bool = False) -> float:
    """The merged graph's step; or the p50 of steps that are drawn anew."""
    predict = calibration["predict"]["report"]
    spread = predict.get("spread") if resampled else None
    return float(spread["p50"]["step_ns"] if spread else predict["step_ns"]) / 1e6


@dataclass(frozen=True)
class Times:
    """Step times in ms that were found again and again."""

    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """What counts."""
        return statistics.mean(self.each)

    @property
    def apart(self) -> float:
        """Half of their range, as a share."""
        return (max(self.each) - min(self.each)) / self.mean / 2

    def __str__(self) -> str:
        return f"{self.mean:.1f} ±{self.apart:.1%}" if len(self.each) > 1 else f"{self.mean:.1f}"


@dataclass(frozen=True)
class Shape:
    """A shape's step times."""

    real: Times
    seen: Times
    predicted: Times
    resampled: Times
    emulated: Times

    @classmethod
    def of(cls, found: dict[str, Any]) -> Shape:
        """Those of a shape's results."""
        made = found["calibrations"]
        return cls(
            Times(tuple(map(typical, found["true_ns"]))),
            Times(tuple(map(seen_ms, made))),
            Times(tuple(map(predicted_ms, made))),
            Times(tuple(predicted_ms(one, resampled=True) for one in made)),
            Times(tuple(map(emulated_ms, found["emulated"]))),
        )

    def error(self, what: str) -> float:
        """Of a time, as a share of the true one."""
        value: Times = getattr(self, what)
        return value.mean / self.real.mean - 1


def row(found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    one = Shape.of(found)
    late = [late_share(run) for run in found["emulated"]]
    names = ("seen", "predicted", "resampled", "emulated")
    return [
        found["shape"],
        f"{found['ranks']}",
        f"{one.real}",
        *(f"{getattr(one, name)} ({one.error(name):+.1%})" for name in names),
        f"{min(late):.1%} to {max(late):.1%}",
        f"{found['wall_s']:.0f}",
    ]


def means(all_found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Average and worst errors over all shapes."""
    shapes = [Shape.of(found) for found in all_found]
    for what in ("seen", "predicted", "resampled", "emulated"):
        sizes = [abs(one.error(what)) for one in shapes]
        if sizes:
            yield f"{what}: {statistics.mean(sizes):.1%} on average, {max(sizes):.1%} at worst"


def phase_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """Where a sandbox rank's step goes; communication beside computation counts in both."""
    for what, times in sorted(found.get("phases_ms", {}).items()):
        cells = [f"{times[one]:.2f}" if one in times else "-" for one in ("true", "emulated")]
        yield [found["shape"], what, *cells]


def transfer_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """How long communications are under way once all members are there."""
    for what, times in sorted(found.get("transfers_ms", {}).items()):
        cells = [f"{times[one]:.2f}" if one in times else "-" for one in ("true", "merged")]
        yield [found["shape"], what, f"{times['count']:.0f}", *cells]


def explained_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """What a merged graph's step becomes with the computation, then the transfers, of a true run."""
    explained = found.get("explained_ms")
    if explained is None:
        return
    true, graphs = explained["recorded"], explained["graphs"]
    cells = [Times(tuple(one[name] for one in graphs)) for name in graphs[0]]
    yield [found["shape"], f"{true:.1f}", *(f"{one} ({one.mean / true - 1:+.1%})" for one in cells)]


def spent_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """What a typical step takes of a rank: least and most of the ranks of all runs."""
    sources = {
        "true": found.get("true_spent", []),
        "slices": [one.get("spent", {}) for one in found["calibrations"]],
        "emulated": [one.get("spent", {}) for one in found["emulated"]],
    }
    for title, runs in sources.items():
        ranks = [values for one in runs for values in one.values()]
        if ranks:
            cells = (
                f"{min(values):.1f} to {max(values):.1f}" for values in zip(*ranks, strict=True)
            )
            yield [found["shape"], title, *cells]


def injected_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """By how much a slow virtual rank shifts the step, truly and emulated; of each, all runs.

    Shifts are from runs without a slow rank that were made in turn with these.
    """
    runs: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for one in found.get("injected", []):
        runs.setdefault((one["rank"], one["factor"]), []).append(one)
    normal: tuple[float, ...] = ()
    for (rank, factor), several in sorted(runs.items()):
        true = Times(tuple(typical(one["true_ns"]) for one in several))
        emulated = Times(tuple(emulated_ms(one["emulated"]) for one in several))
        means, shifts = (true.mean, emulated.mean), ["", ""]
        if factor == 1:
            normal = means
        elif normal:
            shifts = [
                f" ({now / before - 1:+.1%})" for now, before in zip(means, normal, strict=True)
            ]
        yield [
            found["shape"],
            f"rank {rank} x {factor}" if factor != 1 else "none",
            f"{len(several)}",
            f"{true}{shifts[0]}",
            f"{emulated}{shifts[1]}",
            f"{emulated.mean / true.mean - 1:+.1%}",
        ]


def machine_lines(output: Path) -> Iterator[str]:
    """What was found out about the machine before anything was measured on it."""
    path = output / "machine" / "machine.json"
    if not path.is_file():
        return
    found = json.loads(path.read_text())
    yield ", ".join(f"{name}: {value}" for name, value in found.items())
    yield ""


def policy_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """How gloo's threads were scheduled, and what a true step took with that and with others."""
    tried = found.get("tried_ms", {})
    cells = (f"{policy or 'as usual'} {ms:.0f}" for policy, ms in tried.items())
    yield [found["shape"], found.get("policy") or "as usual", ", ".join(cells)]


def results(output: Path) -> list[dict[str, Any]]:
    """Of all shapes, also of those that are not finished, if there is enough of them."""
    found = [json.loads(path.read_text()) for path in sorted(output.glob("*.json"))]
    parts = [json.loads(path.read_text()) for path in sorted(output.glob("*.part"))]
    return found + [part for part in parts if part["emulated"] and part["true_ns"]]


def tables(output: Path) -> str:
    """What is in the results folder."""
    all_found = results(output)
    heads = (
        "job", "ranks", "true step ms", "slices alone ms", "predicted ms", "resampled ms",
        "emulated ms", "emulator late", "all took s",
    )  # fmt: skip
    lines = [*machine_lines(output), *markdown(heads, [row(found) for found in all_found])]
    lines += ["", *means(all_found)]
    more = (
        (("job", "gloo's threads are scheduled", "true step ms"), policy_rows),
        (("job", "slowed down", "runs", "true step ms", "emulated ms", "error"), injected_rows),
        (("job", "kind and phase", "true ms", "emulated ms"), phase_rows),
        (
            ("job", "recorded step ms", "merged ms", "its computation", "and its transfers"),
            explained_rows,
        ),
        (("job", "transfer, bytes", "operations", "true ms", "merged ms"), transfer_rows),
        (
            (
                "job", "a step of a rank", "program ms", "other threads ms", "kept waiting ms",
                "page faults", "switches",
            ),
            spent_rows,
        ),
    )  # fmt: skip
    for titles, rows_of in more:
        rows = [cells for found in all_found for cells in rows_of(found)]
        if rows:
            lines += ["", *markdown(titles, rows)]
    return "\n".join(lines)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
