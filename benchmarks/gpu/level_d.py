"""What level D compares: true runs on several GPUs and emulated ones; the table of it from JSON.

Nothing here needs a GPU. `python benchmarks/gpu/level_d.py level-d.json` prints the table.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = ("advance", "arrive", "owe", "compensate", "hold", "stamp", "note", "stretch", "nccl")
"""Beginnings of names of kernels that are none of the program's computation."""
MATRIX = ("gemm", "nvjet", "cutlass", "xmma", "flash", "fmha")
"""Parts of names of kernels that nothing but the program launches."""
WARMUP = 2
"""Steps that are unlike the others: DDP cuts its buckets anew before the second."""
HEADS = (
    *("job", "ranks", "sandbox", "true ms", "apart", "predicted ms", "emulated ms", "error"),
    *("late", "peak bytes, true", "emulated", "losses apart", "pieces: durations", "starts"),
    *("kernels: durations", "starts", "transfers of NCCL ms", "in the emulation", "chain s"),
)


def typical(steps: Sequence[float]) -> float | None:
    """Median of the steps after the first ones; None without any."""
    counted = steps[WARMUP:] or steps
    return statistics.median(counted) if counted else None


def apart(values: Sequence[float]) -> float | None:
    """Half the range of some values, over their middle; None of fewer than two."""
    if len(values) < 2:
        return None
    return (max(values) - min(values)) / 2 / statistics.median(values)


def relative(value: float | None, true: float | None) -> float | None:
    """By which share a value is above the true one."""
    return value / true - 1 if value is not None and true else None


# --- kernels -----------------------------------------------------------------------------------


def compare_kernels(true: Mapping[str, Any], emulated: Mapping[str, Any]) -> dict[str, Any]:
    """Kernels of one rank in a step of two runs, as `timed_rank.kernels_of` notes them.

    `durations` is the sum of differences between kernels of a name, by their median, over the sum of
    durations; `starts` the median difference of when matrix products start, over the step's length;
    None if the two runs do not launch as many. Names that have unlike numbers are counted.
    """
    one, other = _last_step(true), _last_step(emulated)
    ours, theirs = _by_name(one), _by_name(other)
    alike = [name for name, found in ours.items() if len(theirs.get(name, ())) == len(found)]
    total = sum(sum(ours[name]) for name in alike)
    off = sum(
        abs(statistics.median(theirs[name]) - statistics.median(ours[name])) * len(ours[name])
        for name in alike
    )
    begins = [[start for name, start, _ in rows if _is_matrix(name)] for rows in (one, other)]
    starts = None
    if len(begins[0]) == len(begins[1]) > 1:
        length = begins[0][-1] - begins[0][0]
        differences = [
            abs((right - begins[1][0]) - (left - begins[0][0]))
            for left, right in zip(*begins, strict=True)
        ]
        starts = statistics.median(differences) / max(1, length)
    return {
        "kernels": sum(map(len, ours.values())),
        "names": len(ours),
        "unlike_names": sorted(set(ours) ^ set(theirs) | (set(ours) & set(theirs)) - set(alike)),
        "durations": off / total if total else None,
        "true_ns": total,
        "emulated_ns": sum(sum(theirs[name]) for name in alike),
        "starts": starts,
    }


def _last_step(noted: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(name, start, duration) of the second of the two steps: from its first matrix product on."""
    names = noted["names"]
    rows = [(names[number], start, length) for number, _, start, length in noted["rows"]]
    begins = [start for name, start, _ in rows if _is_matrix(name)]
    after = begins[len(begins) // 2] if begins else 0
    return [row for row in rows if row[1] >= after]


def _is_matrix(name: str) -> bool:
    lowered = name.lower()
    return any(part in lowered for part in MATRIX)


def _by_name(rows: Iterable[tuple[str, int, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for name, _, length in rows:
        if not name.startswith(OURS):
            found[name].append(length)
    return dict(found)


# --- traces ------------------------------------------------------------------------------------


def compare_pieces(true: Path, emulated: Path, rank: int) -> dict[str, Any]:
    """Pieces of computation of a rank in two traces, step by step.

    `durations` and `starts` are medians of absolute differences: of durations over the true step's
    computation, times the pieces in it; of starts, since the step's first one, over its length.
    """
    ours, theirs = _pieces(true, rank), _pieces(emulated, rank)
    durations, starts, unlike = [], [], 0
    for step in sorted(set(ours) & set(theirs)):
        if step < WARMUP:
            continue
        if len(ours[step]) != len(theirs[step]):
            unlike += 1
            continue
        pairs = list(zip(ours[step], theirs[step], strict=True))
        first, second = pairs[0][0][0], pairs[0][1][0]
        length = max(1, ours[step][-1][0] + ours[step][-1][1] - first)
        busy = max(1, sum(one[1] for one in ours[step]))
        durations.append(sum(abs(one[1] - other[1]) for one, other in pairs) / busy)
        starts += [abs((other[0] - second) - (one[0] - first)) / length for one, other in pairs]
    return {
        "steps": len(durations),
        "unlike_steps": unlike,
        "durations": statistics.median(durations) if durations else None,
        "starts": statistics.median(starts) if starts else None,
    }


def _pieces(path: Path, rank: int) -> dict[int, list[tuple[int, int]]]:
    """(start, duration) of a rank's computation by step, in order."""
    import polars as pl

    frame = (
        pl.scan_parquet(path)
        .filter(
            (pl.col("rank") == rank)
            & (pl.col("kind").cast(pl.String) == "compute")
            & pl.col("step").is_not_null()
        )
        .select("step", "start_ns", "dur_ns")
        .sort("start_ns")
        .collect()
    )
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for step, start, length in frame.iter_rows():
        found[step].append((start, length))
    return dict(found)


def transfers(path: Path, rank: int) -> dict[str, float]:
    """Ms that a rank's communications transfer in a typical step, by kind, in a merged trace."""
    import polars as pl

    frame = (
        pl.scan_parquet(path)
        .filter(
            (pl.col("rank") == rank)
            & pl.col("transfer_ns").is_not_null()
            & (pl.col("step") >= WARMUP)
        )
        .group_by("step", pl.col("kind").cast(pl.String))
        .agg(pl.col("transfer_ns").sum())
        .collect()
    )
    steps: dict[str, list[int]] = defaultdict(list)
    for _, kind, time_ns in frame.iter_rows():
        steps[kind].append(time_ns)
    return {kind: statistics.median(found) / 1e6 for kind, found in sorted(steps.items())}


# --- the table ---------------------------------------------------------------------------------


def rows_of(name: str, parts: Mapping[str, Any], ranks: int) -> list[list[str]]:
    """Lines about one layout: one for each number of sandbox ranks. `parts` are its results."""
    turns = {part.split()[-1]: [] for part in sorted(parts) if part.startswith("run ")}
    for part, found in sorted(parts.items()):
        if part.startswith("run "):
            turns[part.split()[-1]].append(found)
    truth = turns.pop("true", [])
    true = [one["step_ns"] for one in truth]
    middle = statistics.median(true) if true else None
    compared = parts.get("compare", {})
    lines = []
    for size in sorted(map(int, turns)) or [0]:
        runs = turns.get(str(size), [])
        steps = [one["step_ns"] for one in runs if one["step_ns"]]
        emulated = statistics.median(steps) if steps else None
        ahead = [one["predicted_step_ns"] for one in runs if one["predicted_step_ns"]]
        own = compared.get("pieces", {}).get(str(size), {})
        kernels = parts.get("kernels", {}).get("compared", {}) if size == 1 else {}
        lines.append(
            [
                *(name, str(ranks), str(size or "")),
                *(_ms(middle), _percent(apart(true), "±")),
                *(_ms(ahead[0] if ahead else None), _ms(emulated)),
                _percent(relative(emulated, middle), "+"),
                _percent(max((one["interference"] for one in runs), default=None)),
                _bytes(peaks(truth)),
                _bytes(peaks(runs)),
                _losses(parts.get("losses")),
                *(_percent(own.get("durations")), _percent(own.get("starts"))),
                *(_percent(kernels.get("durations")), _percent(kernels.get("starts"))),
                _sum(compared.get("true_transfers")),
                _sum(compared.get("emulated_transfers")),
                _seconds(parts.get("chain")),
            ]
        )
    return lines


def peaks(runs: Iterable[Mapping[str, Any]]) -> set[int]:
    """Peaks of the first rank that were seen."""
    return {one["peak_bytes"] for one in runs if one.get("peak_bytes")}


def _ms(time_ns: float | None) -> str:
    return "" if time_ns is None else f"{time_ns / 1e6:.3f}"


def _percent(share: float | None, sign: str = "") -> str:
    if share is None:
        return ""
    return f"±{share:.2%}" if sign == "±" else f"{share:{sign}.2%}"


def _bytes(found: set[int]) -> str:
    return " / ".join(f"{one:,}" for one in sorted(found))


def _sum(kinds: Mapping[str, float] | None) -> str:
    return "" if not kinds else f"{sum(kinds.values()):.3f}"


def _seconds(chain: Mapping[str, Any] | None) -> str:
    return "" if not chain else f"{sum(chain['wall'].values()):.0f}"


def _losses(found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    pairs = zip(found["true"], found["emulated"], strict=True)
    return f"{max((abs(other / one - 1) for one, other in pairs), default=0.0):.1e}"


def as_markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    shown = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return shown + ["| " + " | ".join(line) + " |" for line in lines]


def report(state: Mapping[str, Any]) -> str:
    """All that there is so far, as text: what it ran on, the tables, what failed or is missing."""
    settings, done = state["settings"], state["parts"]
    layouts: dict[str, dict[str, Any]] = defaultdict(dict)
    others: dict[str, Any] = {}
    for name, part in done.items():
        layout, _, what = name.partition("/")
        if part["state"] != "done":
            continue
        if layout in settings["layouts"]:
            layouts[layout][what] = part["result"]
        else:
            others[name] = part["result"]
    lines = [f"{key}: {value}" for key, value in state["machine"].items()]
    if settings["meaningless"]:
        lines += ["", f"**TIMES MEAN NOTHING: {settings['meaningless']}**"]
    found = [
        row
        for name in settings["layouts"]
        for row in rows_of(name, layouts[name], settings["ranks"])
        if layouts[name]
    ]
    lines += ["", *as_markdown(HEADS, found), ""]
    for name in ("peers", "vanilla"):
        if others.get(name):
            lines += [name, "", *_plain_table(others[name]), ""]
    for name, result in others.items():
        if name.startswith("kineto/"):
            lines.append(f"{name}: {result['bytes']:,} bytes")
            lines += [_converted(*one) for one in result["converted"].items()]
    states = Counter(part["state"] for part in done.values())
    lines.append(", ".join(f"{count} parts {state}" for state, count in sorted(states.items())))
    for name, part in done.items():
        if part["state"] == "failed":
            end = " | ".join(part["error"].strip().splitlines()[-3:])
            lines.append(f"{name} failed: {end[-400:]}")
    return "\n".join(lines) + "\n"


def _converted(variant: str, told: Mapping[str, Any]) -> str:
    """What the converter made of profiles, in short."""
    made, merged = told["convert"], told["merge"]
    spread = merged["clock"]["end_spread_after"]
    return (
        f"- {variant}: {made['nodes']} nodes of {made['events']} events, matched {made['matched']}, "
        f"edges {made['edges']}, repairs {made['repairs']}; ends apart {spread['median_ns']} ns, "
        f"at most {spread['max_ns']}; recorded {merged['recorded_ns']}, propagated "
        f"{merged['propagated_ns']} ns"
    )


def _plain_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(head, "") for head in heads] for row in rows]
    shown = [[f"{one:.4g}" if isinstance(one, float) else str(one) for one in row] for row in cells]
    return as_markdown(heads, shown)


if __name__ == "__main__":
    print(report(json.loads(Path(sys.argv[1]).read_text())))
