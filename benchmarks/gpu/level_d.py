"""What level D compares: true runs on several GPUs and emulated ones; the table of it from JSON.

Nothing here needs a GPU. `python benchmarks/gpu/level_d.py level-d.json` prints the table.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.level_d_traces import WARMUP  # noqa: E402

OURS = ("advance", "arrive", "owe", "compensate", "hold", "stamp", "note", "stretch", "nccl")
"""Beginnings of names of kernels that are none of the program's computation."""
MATRIX = ("gemm", "nvjet", "cutlass", "xmma", "flash", "fmha")
"""Parts of names of kernels that nothing but the program launches."""
TIMES = (
    *("job", "ranks", "sandbox", "runs", "true ms", "apart", "predicted ms", "emulated ms"),
    *("error", "late", "host us an operation", "host ms a step", "chain s"),
)
MORE = (
    *("job", "sandbox", "peak bytes, true", "emulated", "memory", "losses apart"),
    *("pieces: durations", "starts", "computation", "left out", "kernels: durations", "starts"),
    *("transfers of NCCL ms", "in the emulation", "step recorded"),
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


# --- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What is known of one: results by the part's name, and of runs, in the order in which they were made."""

    name: str
    ranks: int
    parts: Mapping[str, Any]

    def runs(self, what: str) -> list[Any]:
        """Those that are `true`, or `emulated N`."""
        return [
            self.parts[part]
            for part in sorted(self.parts)
            if part.startswith("run ") and part.split(maxsplit=2)[2] == what
        ]

    @property
    def sizes(self) -> list[int]:
        """Numbers of sandbox ranks; 0 if nothing was emulated."""
        found = {part.split()[-1] for part in self.parts if part.startswith("run ")} - {"true"}
        return sorted(map(int, found)) or [0]

    def times(self, size: int) -> list[str]:
        """A line of the table of step times."""
        runs, truth = self.runs(f"emulated {size}"), self.runs("true")
        true, emulated = steps_of(truth), steps_of(runs)
        ahead = [one["predicted_step_ns"] for one in runs if one["predicted_step_ns"]]
        host = [one for one in map(host_cost, runs) if one]
        return [
            *(self.name, str(self.ranks), str(size or ""), f"{len(truth)} and {len(runs)}"),
            *(_ms(middle(true)), _percent(apart(true), "±")),
            *(_ms(ahead[0] if ahead else None), _ms(middle(emulated))),
            _percent(relative(middle(emulated), middle(true)), "+"),
            _percent(max((one["interference"] for one in runs), default=None)),
            *(f"{statistics.median(column):.1f}" for column in zip(*host, strict=True)),
            *([""] * (0 if host else 2)),
            self.chain_s(runs),
        ]

    def chain_s(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """Collecting, slicing and merging, and one run."""
        before = [self.parts.get(part, {}).get("wall_s") for part in ("collect", "slices")]
        if None in before or not runs:
            return ""
        return f"{sum(before) + statistics.median(one['wall_s'] for one in runs):.0f}"

    def rest(self, size: int) -> list[str]:
        """A line of the table of all else."""
        runs, truth = self.runs(f"emulated {size}"), self.runs("true")
        compared, recorded = self.parts.get("compare", {}), self.parts.get("record", {})
        own = compared.get("pieces", {}).get(str(size), {})
        kernels = self.parts.get("kernels", {}).get("compared", {}) if size == 1 else {}
        return [
            *(self.name, str(size or "")),
            *(_bytes(peaks(truth)), _bytes(peaks(runs)), same_memory(peaks(truth), peaks(runs))),
            _losses(self.parts.get("losses true"), self.parts.get("losses emulated")),
            *(_percent(own.get("durations")), _percent(own.get("starts"))),
            *(_percent(own.get("computation"), "+"), str(own.get("left_out", ""))),
            *(_percent(kernels.get("durations")), _percent(kernels.get("starts"))),
            _sum(compared.get("true_transfers")),
            _sum(compared.get("emulated_transfers")),
            _percent(relative(recorded.get("step_ns"), middle(steps_of(truth))), "+"),
        ]


def steps_of(runs: Iterable[Mapping[str, Any]]) -> list[float]:
    """Their typical steps."""
    return [one["step_ns"] for one in runs if one["step_ns"]]


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def host_cost(run: Mapping[str, Any]) -> tuple[float, float] | None:
    """What issuing took the first rank's host: us an operation, and ms a step. None on CPUs."""
    device = next((one["device"] for one in run.get("ranks", ()) if one.get("device")), None)
    if device is None or not device["operations"]:
        return None
    time_ns = device["issuing_ns"]
    return time_ns / device["operations"] / 1e3, time_ns / max(1, len(run["steps"])) / 1e6


def same_memory(true: set[int], emulated: set[int]) -> str:
    """How emulated peaks compare with true ones, in words."""
    if not true or not emulated:
        return ""
    if true == emulated and len(true) == 1:
        return "equal"
    if emulated <= true:
        return "equal to one of the true ones" if len(emulated) == 1 else "equal to true ones"
    off = max((min((one - each for each in true), key=abs) for one in emulated), key=abs)
    return f"{off:+,} bytes from the nearest"


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


def _losses(true: Sequence[float] | None, emulated: Sequence[float] | None) -> str:
    if not true or not emulated:
        return ""
    pairs = zip(true, emulated, strict=True)
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
    known = [
        Layout(name, settings["ranks"], layouts[name])
        for name in settings["layouts"]
        if layouts[name]
    ]
    for heads, line in ((TIMES, Layout.times), (MORE, Layout.rest)):
        rows = [line(one, size) for one in known for size in one.sizes]
        lines += ["", *as_markdown(heads, [[cell or "–" for cell in row] for row in rows])]
    lines += ["", "–: not measured"]
    if state.get("missing"):
        lines.append(f"No time was left for: {', '.join(state['missing'])}")
    lines.append("")
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
