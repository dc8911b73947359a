"""What came of an emulation: times, memory and losses, and what they rest on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from prismcalib.edits import Edit
from prismcalib.paths import CriticalPath, critical_path
from prismcalib.prediction import path_basis, predict
from prismcalib.step_times import typical_ns
from prismcalib.whatif import what_if
from prismreplay.run.marks import CORE_WAIT_BOUND
from prismtrace.schema import Kind, TransferSource
from prismtrace.trace import open_trace

__all__ = ["Findings", "Share", "find", "losses_in"]

_MEASURED = ("computation, measured", "transfer, measured")
_TABLE = "transfer, table"
_MOST_SHARES = 8
_FEW = 0.01


@dataclass(frozen=True)
class Share:
    """A part of the critical path: what it is, its time in ns, and its share."""

    name: str
    time_ns: int
    share: float


@dataclass(frozen=True)
class Findings:
    """What came of an emulation. Times in ns, sizes in bytes.

    Attributes:
        predicted_step_ns: by the calibrated timeline of all ranks, with what was injected.
        uninjected_step_ns: the same without; None if nothing was injected.
        range_ns: between what the step lies as not all transfers were measured, without what was
            injected; None where that is not known or plays no part.
        emulated_step_ns: as the sandbox ranks took it, without what the emulator was late; None
            if they made no step.
        measured_step_ns: the same steps by the program's own clock, what the emulator cost included.
        steps: how many they made; the first does not count.
        peak_memory: sandbox rank -> most that it held; on a GPU, that torch had allocated.
        losses: sandbox rank -> what it printed as such, in order.
        path: where the time goes: parts of the critical path by kind, largest first, in the
            steps that count.
        ranks_on_path: rank -> share of the critical path, largest first.
        basis: shares of the critical path by what is known of them.
        interference: largest share of a step that late answers of the emulator took.
        warnings: what makes the times less sure.
        comparison: of the run with a true one, as `run --compare` tells it.
    """

    predicted_step_ns: int
    uninjected_step_ns: int | None
    range_ns: tuple[int, int] | None
    emulated_step_ns: int | None
    measured_step_ns: int | None
    steps: int
    peak_memory: dict[int, int]
    losses: dict[int, tuple[float, ...]]
    path: tuple[Share, ...]
    ranks_on_path: dict[int, float]
    basis: dict[str, float]
    interference: float
    warnings: tuple[str, ...]
    comparison: dict[str, Any] | None

    @property
    def measured_share(self) -> float:
        """How much of the critical path was measured in the job itself."""
        return sum(self.basis.get(name, 0.0) for name in _MEASURED)

    @property
    def table_share(self) -> float:
        """How much of it are transfers of a table, which were measured apart from the job."""
        return self.basis.get(_TABLE, 0.0)


def find(
    calibrated: Path,
    reports: Mapping[str, Mapping[str, Any]],
    logs: Path,
    sandbox: Sequence[int],
    injected: Sequence[Edit] = (),
) -> Findings:
    """Put together what the stages of an emulation gave.

    Args:
        calibrated: the timeline of all ranks.
        reports: stage -> what its command reported.
        logs: folder of what the sandbox ranks printed.
        sandbox: the ranks that ran.
        injected: what virtual ranks did otherwise than in the timeline.
    """
    prediction = predict(calibrated, draws=0)
    step_ns, whole_path, before_ns = prediction.step_ns, None, None
    if injected:
        scenario = what_if(calibrated, injected).scenarios[0]
        step_ns, whole_path, before_ns = scenario.step_ns, scenario.critical_path, step_ns
    path = _in_steps(whole_path or critical_path(calibrated))
    kinds = [
        Share(kind, busy + gap, share)
        for kind, busy, gap, share in path.shares("kind")
        .select("kind", "busy_ns", "gap_ns", "share")
        .filter(pl.col("share") > 0)
        .head(_MOST_SHARES)
        .iter_rows()
    ]
    run, doubt = reports["run"], prediction.estimates
    return Findings(
        predicted_step_ns=step_ns,
        uninjected_step_ns=before_ns,
        range_ns=(doubt.low_ns, doubt.high_ns) if doubt and doubt.low_ns < doubt.high_ns else None,
        path=tuple(kinds),
        ranks_on_path=dict(path.shares("rank").select("rank", "share").iter_rows()),
        basis=path_basis(path),
        losses={rank: found for rank in sandbox if (found := losses_in(_printed(logs, rank)))},
        warnings=tuple(_warnings(reports, calibrated)),
        comparison=run["comparison"],
        emulated_step_ns=run["step_ns"],
        measured_step_ns=typical_ns([one["measured_ns"] for one in run["steps"]], 1)
        if run["steps"]
        else None,
        steps=len(run["steps"]),
        peak_memory={one["rank"]: _peak_memory(one) for one in run["ranks"]},
        interference=run["interference"],
    )


def _peak_memory(rank: Mapping[str, Any]) -> int:
    on_gpu = rank.get("device") is not None
    return int(rank["peak_allocated_bytes" if on_gpu else "peak_resident_bytes"])


def _in_steps(path: CriticalPath) -> CriticalPath:
    """The part of a path that lies in steps; all of it without steps.

    A run of a single step is mostly spent on getting ready, which is not what was asked; of
    longer ones analyses leave that out by themselves.
    """
    counted = path.segments.drop_nulls("step")
    if counted.is_empty():
        return path
    gap, busy, inner = (int(counted[name].sum()) for name in ("gap_ns", "busy_ns", "inner_idle_ns"))
    return replace(
        path,
        segments=counted,
        length_ns=gap + busy,
        lead_in_ns=0,
        gap_ns=gap,
        inner_idle_ns=inner,
    )


def _unknown_kinds(calibrated: Path) -> dict[str, int]:
    """Kinds of the transfers that nobody knows, and how many, most first."""
    unknown = pl.col("transfer_source").cast(pl.String) == TransferSource.NONE.value
    kinds = open_trace(calibrated).nodes.filter(unknown).group_by("kind").len()
    return dict(kinds.sort("len", "kind", descending=[True, False]).collect().iter_rows())


def losses_in(text: str) -> tuple[float, ...]:
    """Losses that a program printed, in order: the number after the word, once a line.

    Finds `step 3  loss 2.31`, `loss: 2.31`, `train_loss=2.31`, `lm loss: 2.31E+00`.
    """
    found = (_LOSS.search(line) for line in text.splitlines())
    return tuple(float(match[1]) for match in found if match)


_LOSS = re.compile(
    r"loss['\"]?\s*[:=]?\s*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))", re.IGNORECASE
)


def _warnings(reports: Mapping[str, Mapping[str, Any]], calibrated: Path) -> Iterator[str]:
    slices, run = reports["slice"], reports["run"]
    if not slices["timing_true"]:
        yield (
            "slices shared cores with each other or with the emulator: times are longer than on "
            "the real machine; losses, memory and the graph are not touched by that"
        )
    waited = max((one.get("core_wait", 0.0) for one in slices.get("outcomes", ())), default=0.0)
    waited = max(waited, run.get("core_wait", 0.0))
    if waited > CORE_WAIT_BOUND:
        yield (
            f"ranks waited for a core, which others had, for up to {waited:.0%} of the time in which "
            "they could compute: another try gives other times, and configurations are not to be "
            "compared by these; `prismreplay doctor` says how busy the machine is"
        )
    merged = reports["merge"]
    all_known = sum(merged["sources"].values())
    if merged["unknown_transfers"] > _FEW * all_known:
        yield from _unknown_warnings(_unknown_kinds(calibrated), all_known)
    if slices["rounds"] and not slices["rounds"][-1]["settled"]:
        yield "durations have not settled: refine more, or repeat slices"
    if run["disturbed"]:
        yield f"answers of the emulator came late, by up to {run['interference']:.0%} of a step"
    mirrored = sum(one["device"]["mirrored"] for one in run["ranks"] if one.get("device"))
    if mirrored:
        yield (
            f"{mirrored:,} operations gave the sandbox what it gave itself, as larger ones than "
            "--record-below are not recorded: losses are not the job's"
        )
    if run["repeated_operations"]:
        yield (
            "the run made more steps than were collected; what virtual ranks sent in those was "
            "that of the last one, and losses are not the job's"
        )


def _unknown_warnings(kinds: dict[str, int], transfers: int) -> Iterator[str]:
    """`kinds`: how many of all `transfers` nobody knows. No model tells barriers."""
    barriers = kinds.pop(Kind.BARRIER.value, 0)
    unknown = sum(kinds.values())
    if unknown > _FEW * transfers:
        listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        yield (
            f"{unknown:,} of {transfers:,} transfers are not known and count as nothing ({listed}): "
            "no slice had their whole group. More --devices, or a table of their times "
            "(--comm-table), help"
        )
    if barriers > _FEW * transfers:
        yield (
            f"{barriers:,} of {transfers:,} transfers are barriers of larger groups than were measured, "
            "and take no time beyond the waiting for the last rank"
        )


def _printed(logs: Path, rank: int) -> str:
    for path in logs.glob(f"rank-*{rank}.log"):
        if int(path.stem.partition("-")[2]) == rank:
            return path.read_text(encoding="utf-8", errors="replace")
    return ""
