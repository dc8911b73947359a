"""Recorded runs, cut into slices at random and merged again: how far from the recording?

    python benchmarks/fidelity_cuts.py -o cuts.json                  102 cuts of every recording
    python benchmarks/fidelity_cuts.py -o cuts.json --only megatron    measured anew, the rest kept
    python benchmarks/fidelity_cuts.py -o cuts.json --table          the table of what is there

Each recording of several ranks (tests/data/h200 and PRISM_TEST_DATA, default ../shared/data) is
merged; this is the truth. A cut deals its ranks to slices of any number and size. Each slice is
propagated by itself, with virtual ranks that are always early or absent, so that all waits for
ranks of other slices are gone; then its times are read off clocks with origins of their own: in
turn one clock for a slice, one for every 1, 2 or 4 ranks, or either, up to 100 ppm too fast or
slow. Nothing else differs, so this checks the arithmetic and predicts nothing (level C).

The table shows the worst cut. *Step*: error of the length of any step, of that length.
*Communications*: how far from the truth the last member of any communication arrives, counted from
the first start of the run. *Seen*: the step of the slice that saw the longest, without merging.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import prismtrace as pt
from prismcalib import synth
from prismcalib.errors import CalibError
from prismcalib.merging import merge

REPO = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("PRISM_TEST_DATA") or REPO.parent / "shared" / "data")
H200 = REPO / "tests" / "data" / "h200"
RECORDINGS = {
    "Megatron, TP 8, 8 × A100": SHARED / "kineto/megatron-tp8",
    "DLRM, 8 × V100": SHARED / "kineto/dlrm8",
    "Nsight Systems, 2 × H100": SHARED / "nsys/mfu_2gpu_before.sqlite",
    **{f"h200/{path.name}": path for path in sorted(H200.iterdir())},
    "operation log ST": SHARED / "ops/straggler/trace-ST.parquet",
    "operation log SE, 8 steps": SHARED / "ops/straggler/trace-SE.parquet",
}
FIRST_STEPS = {"operation log SE, 8 steps": 8}
CLOCKS = ("one", "several", "drifting")
DRIFT_PPM = 100.0


@dataclass(frozen=True)
class Cut:
    """How a run is cut."""

    slices: tuple[tuple[int, ...], ...]
    clocks: str
    ranks_per_clock: int | None
    drift_ppm: float
    virtual: str
    transfers: str
    seed: int


@dataclass(frozen=True)
class Errors:
    """What a cut that was merged shows, against the run; 0 is exact."""

    seen: float
    """Longest step that any slice shows by itself, as a part of the true one."""
    run: float
    step: float
    communication_ns: int
    start_ns: int
    duration: float
    """Of any row, with respect to its duration."""


@dataclass(frozen=True)
class Truth:
    """A merged recording."""

    trace: pt.Trace
    nodes: pl.DataFrame
    step_ns: int


def random_cut(ranks: tuple[int, ...], random: np.random.Generator, clocks: str) -> Cut:
    """Any partition, as likely into few slices as into many."""
    order = random.permutation(ranks)
    ends = random.choice(len(ranks) - 1, random.integers(0, len(ranks)), replace=False) + 1
    parts = np.split(order, np.sort(ends))
    several = clocks == "several" or (clocks == "drifting" and random.integers(2) == 1)
    return Cut(
        slices=tuple(tuple(part.tolist()) for part in parts),
        clocks=clocks,
        ranks_per_clock=int(random.choice([1, 2, 4])) if several else None,
        drift_ppm=DRIFT_PPM if clocks == "drifting" else 0.0,
        virtual=("early", "none")[random.integers(2)],
        transfers=("observed", "given")[random.integers(2)],
        seed=int(random.integers(2**31)),
    )


def measured(truth: Truth, cut: Cut, folder: Path) -> Errors:
    """Cut, merge in any order of files, compare."""
    paths = synth.cut_into_slices(
        truth.trace,
        folder,
        cut.slices,
        seed=cut.seed,
        drift_ppm=cut.drift_ppm,
        ranks_per_clock=cut.ranks_per_clock,
        virtual=cut.virtual,
        transfers=cut.transfers,
    )
    np.random.default_rng(cut.seed).shuffle(paths)
    result = merge(paths)
    nodes = result.nodes
    true, found = truth.nodes["start_ns"].to_numpy(), nodes["start_ns"].to_numpy()
    if not truth.nodes["id"].equals(nodes["id"]):
        sys.exit("other rows came back")
    starts = (found - found.min()) - (true - true.min())
    durations = truth.nodes["dur_ns"].to_numpy()
    wrong = np.abs(nodes["dur_ns"].to_numpy() - durations)
    true_ready, ready = last_arrivals(truth.nodes), last_arrivals(nodes)
    true_steps, steps = step_ends(truth.nodes), step_ends(nodes)
    lengths = np.diff(true_steps, prepend=0)
    length = int(true_steps.max())
    return Errors(
        seen=result.report.before_ns / truth.step_ns,
        run=abs(int(steps.max()) - length) / length,
        step=float((np.abs(np.diff(steps, prepend=0) - lengths) / np.maximum(lengths, 1)).max()),
        communication_ns=int(np.abs(ready - true_ready).max()),
        start_ns=int(np.abs(starts).max()),
        duration=float((wrong / np.maximum(durations, 1)).max()),
    )


def last_arrivals(nodes: pl.DataFrame) -> np.ndarray:
    """The last start of every communication, from the first start of the run."""
    return (
        nodes.with_columns(pl.col("start_ns") - pl.col("start_ns").min())
        .filter(pl.col("seq").is_not_null())
        .group_by("group", "seq")
        .agg(pl.col("start_ns").max())
        .sort("group", "seq")["start_ns"]
        .to_numpy()
    )


def step_ends(nodes: pl.DataFrame) -> np.ndarray:
    """The last end of every step, from the first start of the run."""
    end = pl.col("start_ns") + pl.col("dur_ns") - nodes["start_ns"].min()
    return (
        nodes.select(pl.col("step").forward_fill().backward_fill().fill_null(0), end=end)
        .group_by("step")
        .agg(pl.col("end").max())
        .sort("step")["end"]
        .cum_max()
        .to_numpy()
    )


def truth_of(name: str, source: Path, folder: Path) -> Truth:
    path = folder / "run.parquet"
    pt.convert(source, path)
    if name in FIRST_STEPS:
        run = pt.open(path)
        path = folder / "begin.parquet"
        pt.slice_out(run, path, steps=run.header.steps[: FIRST_STEPS[name]])
    whole = merge(path)
    whole.write(folder / "whole.parquet")
    trace = pt.open(folder / "whole.parquet")
    uncut = synth.cut_into_slices(trace, folder / "uncut", [trace.header.ranks])
    return Truth(trace, trace.collect(), merge(uncut).report.before_ns)


def cuts_of(name: str, source: Path, count: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(list(name.encode()))
    with tempfile.TemporaryDirectory() as folder:
        truth = truth_of(name, source, Path(folder))
        for number in range(count):
            cut = random_cut(truth.trace.header.ranks, random, CLOCKS[number % len(CLOCKS)])
            with tempfile.TemporaryDirectory(dir=folder) as pieces:
                try:
                    found = asdict(measured(truth, cut, Path(pieces)))
                except CalibError as error:
                    found = {"refused": str(error)}
            yield {
                "recording": name,
                "ranks": len(truth.trace.header.ranks),
                **asdict(cut),
                **found,
            }


def table(cuts: list[dict[str, Any]]) -> str:
    clocks = {
        "one": "one clock a slice",
        "several": "several clocks",
        "drifting": "clocks that drift",
    }
    heads = [f"{text}: step | communications, µs" for text in clocks.values()]
    lines = [
        f"| recording | ranks | cuts | seen | {' | '.join(heads)} |",
        "|" + "---|" * (4 + 2 * len(heads)),
    ]
    for name in (name for name in RECORDINGS if any(cut["recording"] == name for cut in cuts)):
        mine = [cut for cut in cuts if cut["recording"] == name]
        merged = [cut for cut in mine if "refused" not in cut]
        cells = [name, str(mine[0]["ranks"]), str(len(mine))]
        if len(merged) < len(mine):
            cells[-1] += f", {len(mine) - len(merged)} refused"
        seen = [cut["seen"] - 1 for cut in merged if len(cut["slices"]) > 1] or [0.0]
        # Adding zero makes -0.0 positive.
        low, high = (round(part, 3) + 0.0 for part in (min(seen), max(seen)))
        shown = [f"{part * 100:.1f} %" for part in (low, high)]
        cells.append(" to ".join(dict.fromkeys(shown)).replace("-", "−"))
        for kind in clocks:
            some = [cut for cut in merged if cut["clocks"] == kind]
            step = max((cut["step"] for cut in some), default=0)
            late = max((cut["communication_ns"] for cut in some), default=0)
            cells += [f"{step * 100:.4f} %" if step else "0", f"{late / 1e3:.3f}" if late else "0"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cuts", type=int, default=102)
    parser.add_argument("--only", default="", help="recordings whose names hold this")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        measure_all(options.output, options.cuts, options.only)
    print(table(json.loads(options.output.read_text(encoding="utf-8"))["cuts"]))


def measure_all(output: Path, count: int, only: str) -> None:
    cuts = json.loads(output.read_text(encoding="utf-8"))["cuts"] if output.exists() else []
    for name, source in RECORDINGS.items():
        if only.casefold() not in name.casefold():
            continue
        if not source.exists():
            print(f"{name}: left out, {source} is absent", file=sys.stderr)
            continue
        started = time.perf_counter()
        kept = [cut for cut in cuts if cut["recording"] != name]
        cuts = [*kept, *cuts_of(name, source, count)]
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "date": datetime.now(UTC).date().isoformat(),
            "cuts": cuts,
        }
        output.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
