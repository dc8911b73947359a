"""What came of a run: how long steps took, and how far that can be trusted."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from prismcalib.step_times import step_durations, typical_ns
from prismcalib.wording import doubts
from prismreplay.run.hybrid import GroupUse
from prismreplay.run.marks import DeviceSummary, StepMark, core_wait
from prismreplay.run.running import RunOutcome
from prismreplay.run.small_groups import MovedSummary
from prismreplay.tensors.prefetching import PrefetchReport
from prismtrace.schema import TransferSource
from prismtrace.trace import Trace, open_trace

__all__ = [
    "Comparison",
    "GroupResult",
    "RankResult",
    "RunReport",
    "StepResult",
    "report_of",
    "step_times",
]

INTERFERENCE_BOUND = 0.05
"""Share of a step that late answers may take before the run is flagged."""


@dataclass(frozen=True)
class StepResult:
    """One step of the sandbox ranks, in ns.

    `emulated_ns` is what it took in the virtual world, `measured_ns` what it took here, with what
    the emulator cost; `late_ns` of that is answers after their time. `predicted_ns` is what the
    calibrated trace says, null for steps that it does not have.
    """

    step: int
    emulated_ns: int
    measured_ns: int
    late_ns: int
    predicted_ns: int | None


@dataclass(frozen=True)
class RankResult:
    """A sandbox rank: times in ns, sizes in bytes, the most at the end of any step or in it.

    `hold_*_ns` say by how much ends of operations were missed that lay ahead; `late_answers`
    came after their time, `late_ns` altogether; `handing_ns` went into handing tensors over. `spun`
    ranges of the program had another pace. For `contended_ns` communication took the program's
    processor. `device` tells of a rank that computed on a GPU (see
    `prismreplay.run.marks.DeviceSummary`); then peaks are those of torch's
    allocator for it, since the program last reset them: resident is what it reserved.
    """

    rank: int
    holds: int = 0
    hold_median_ns: int = 0
    hold_p99_ns: int = 0
    hold_worst_ns: int = 0
    late_answers: int = 0
    late_ns: int = 0
    handing_ns: int = 0
    spun: int = 0
    contended_ns: int = 0
    peak_resident_bytes: int = 0
    peak_allocated_bytes: int = 0
    device: dict[str, int] | None = None


@dataclass(frozen=True)
class MemoryResult:
    """Memory of a rank in a step, in bytes.

    Of a rank on a GPU, what torch's allocator has reserved, the most that it had reserved, and the
    most that was allocated, since the program last reset its peaks.
    """

    rank: int
    step: int
    resident_bytes: int
    peak_resident_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class GroupResult:
    """A process group with sandbox members, and how it communicated.

    `transport` is `real` (torch's own backend), `local` (through the hub, with timed ends), or
    `reduced` (a real group with an assistant). Of the latter, `reduced_transfer_ns` is how long the
    small group's operations took (the median), and `assistant_late_ns` by how much the assistant
    usually came too late. In a checking run, `compared` of its all_reduces were put beside the
    exact results; `largest_difference` counts in the least that the type can tell apart.
    """

    name: str
    desc: str
    size: int
    sandbox: tuple[int, ...]
    transport: str
    operations: int
    nbytes: int
    reduced_transfer_ns: int | None = None
    assistant_late_ns: int | None = None
    compared: int = 0
    largest_difference: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """The run against a recorded true one, on the sandbox ranks. Times in ns.

    `steps` has (step, real, emulated, error), `kinds` (kind, real, emulated, error), errors as
    shares of the real one; `kinds` sum over steps that both have. `doubts` are reasons not to take
    the true run's times for those of the job.
    """

    real: str
    step_error: float
    worst_step_error: float
    steps: tuple[tuple[int, int, int, float], ...]
    kinds: tuple[tuple[str, int, int, float], ...]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunReport:
    """What was run and written. Times in ns or s, as their names say.

    `step_ns` is the median of the steps after the first; null without steps. `interference` is
    the largest share that late answers took of a step after the first; above `interference_bound`
    the run is `disturbed`: its times are the machine's, not the job's. `repeated_operations` belong
    to steps beyond the graph, whose recorded tensors are those of its last step;
    `unplanned_operations` of them its last step lacks: virtual ranks did not keep them waiting.
    `missing_operations` of the graph were not made; `resized_operations` carried other numbers of
    bytes. `transfer_sources` says, of the operations with virtual members, from where their
    transfer times are known. Of the time in which ranks could compute they waited for a core for
    the share `core_wait`.
    """

    output: Path
    world_size: int
    sandbox: tuple[int, ...]
    steps: tuple[StepResult, ...]
    step_ns: int | None
    measured_step_ns: int | None
    predicted_step_ns: int | None
    interference: float
    interference_bound: float
    disturbed: bool
    ranks: tuple[RankResult, ...]
    memory: tuple[MemoryResult, ...]
    groups: tuple[GroupResult, ...]
    bypassed_groups: int
    transfer_sources: dict[str, int]
    repeated_operations: int
    missing_operations: int
    resized_operations: int
    supplied: int
    prefetched: PrefetchReport
    nodes: int
    start_s: float
    wall_s: float
    log_dir: Path
    timed: bool
    checked: bool
    comparison: Comparison | None = None
    policies: dict[str, int] = field(default_factory=dict)
    core_wait: float = 0.0
    unplanned_operations: int = 0


def report_of(
    outcome: RunOutcome,
    graph: Trace,
    *,
    timed: bool,
    checked: bool = False,
    real: Path | None = None,
) -> RunReport:
    """Put together what came of a run.

    Args:
        outcome: of it.
        graph: that it followed; predicts when it is calibrated.
        timed: whether virtual ranks arrived as planned.
        checked: whether inputs were compared with the recording, which costs time.
        real: a recorded true run to compare with.
    """
    sandbox = outcome.coordinator.sandbox
    emulated = step_times(open_trace(outcome.output), sandbox)
    predicted = step_times(graph, sandbox) if timed else {}
    steps = _steps(outcome, emulated, predicted)
    interference = _interference(outcome, steps, sum(emulated.values()))
    followers = outcome.world.followers.values()
    uses = outcome.coordinator.uses
    moved = defaultdict(list)
    for one in outcome.moved:
        moved[one.key].append(one)
    return RunReport(
        output=outcome.output,
        world_size=graph.header.world_size,
        sandbox=sandbox,
        steps=steps,
        step_ns=_typical([one.emulated_ns for one in steps]),
        measured_step_ns=_typical([one.measured_ns for one in steps]),
        predicted_step_ns=_typical(list(predicted.values())),
        interference=interference,
        interference_bound=INTERFERENCE_BOUND,
        disturbed=timed and interference > INTERFERENCE_BOUND,
        ranks=_ranks(outcome),
        memory=tuple(
            MemoryResult(
                mark.rank,
                mark.step,
                mark.resident_bytes,
                mark.peak_resident_bytes,
                mark.allocated_bytes,
            )
            for mark in outcome.marks
        ),
        groups=tuple(_group(use, sandbox, moved[key]) for key, use in uses.items()),
        bypassed_groups=sum(set(sandbox).isdisjoint(group.ranks) for group in graph.header.groups),
        transfer_sources=_transfer_sources(uses, sandbox, moved),
        repeated_operations=sum(one.repeated for one in followers),
        missing_operations=sum(one.missing for one in followers),
        resized_operations=sum(one.resized for one in followers),
        supplied=outcome.coordinator.counts.supplied,
        prefetched=outcome.prefetched,
        nodes=outcome.made.nodes,
        start_s=outcome.start_s,
        wall_s=outcome.wall_s,
        log_dir=outcome.log_dir,
        timed=timed,
        checked=checked,
        comparison=None if real is None else _compare(real, outcome, sandbox),
        policies=dict(outcome.made.policies),
        core_wait=core_wait(outcome.marks),
        unplanned_operations=sum(one.unplanned for one in followers),
    )


def _interference(outcome: RunOutcome, steps: Sequence[StepResult], whole_ns: int) -> float:
    """See `RunReport`; of ranks on GPUs, as a share of all steps."""
    counted = steps[1:] or steps
    late = [one.late_ns / max(1, one.emulated_ns) for one in counted]
    late += [
        max(one.late_ns, one.fetching_ns) / (whole_ns or 1) for one in outcome.devices.values()
    ]
    return max(late, default=0.0)


def _transfer_sources(
    uses: Mapping[str, GroupUse], sandbox: Sequence[int], moved: Mapping[str, list[MovedSummary]]
) -> dict[str, int]:
    sources: Counter[str] = Counter()
    for key, use in uses.items():
        if set(use.ranks) - set(sandbox):
            # What nobody knows is measured in the small group, if there is one.
            unknown = TransferSource.REDUCED if moved.get(key) else TransferSource.NONE
            for source, count in use.transfer_sources.items():
                sources[unknown if source == TransferSource.NONE else source] += count
    return dict(sources)


def _typical(times: Sequence[int]) -> int | None:
    """The median of the steps after the first, which starts the program up."""
    return typical_ns(times, 1) if times else None


def _median(times: Sequence[int]) -> int | None:
    return round(statistics.median(times)) if times else None


def _of_ranks(trace: Trace, ranks: Sequence[int]) -> pl.LazyFrame:
    return trace.nodes.filter(pl.col("rank").is_in(list(ranks))).with_columns(
        end_ns=pl.col("start_ns") + pl.col("dur_ns")
    )


def step_times(trace: Trace, ranks: Sequence[int]) -> dict[int, int]:
    """Step -> ns, over some ranks, by the one rule of the toolkit."""
    rows = _of_ranks(trace, ranks)
    ends = (
        rows.drop_nulls("step").group_by("step").agg(pl.col("end_ns").max()).sort("step").collect()
    )
    begin = rows.select(pl.col("start_ns").min()).collect().item()
    if begin is None or not ends.height:
        return {}
    times = step_durations(begin, ends["end_ns"].to_numpy())
    return dict(zip(ends["step"].to_list(), times.tolist(), strict=True))


def _steps(
    outcome: RunOutcome, emulated: Mapping[int, int], predicted: Mapping[int, int]
) -> tuple[StepResult, ...]:
    debts: dict[int, int] = {}
    lates: dict[int, dict[int, int]] = {}
    for mark in outcome.marks:
        debts[mark.step] = max(debts.get(mark.step, 0), mark.debt_ns)
        lates.setdefault(mark.rank, {})[mark.step] = mark.late_ns
    found: list[StepResult] = []
    debt = 0
    for step, time_ns in emulated.items():
        now = debts.get(step, debt)
        late = max((_grown(of_rank, step) for of_rank in lates.values()), default=0)
        found.append(StepResult(step, time_ns, time_ns + now - debt, late, predicted.get(step)))
        debt = now
    return tuple(found)


def _grown(values: Mapping[int, int], step: int) -> int:
    """By how much a total grew in a step."""
    if step not in values:
        return 0
    before = max((one for one in values if one < step), default=None)
    return values[step] - (0 if before is None else values[before])


def _ranks(outcome: RunOutcome) -> tuple[RankResult, ...]:
    found = []
    for rank in outcome.coordinator.sandbox:
        marks = [mark for mark in outcome.marks if mark.rank == rank]
        told = outcome.summaries.get(rank)
        known: dict[str, Any] = {} if told is None else told._asdict()
        known.pop("debt_ns", None)
        known["rank"] = rank
        device = outcome.devices.get(rank)
        if device is not None:
            marks = [*marks, _last_memory(device)]
        found.append(
            RankResult(
                **known,
                peak_resident_bytes=max((one.peak_resident_bytes for one in marks), default=0),
                peak_allocated_bytes=max((one.allocated_bytes for one in marks), default=0),
                device=None if device is None else device._asdict(),
            )
        )
    return tuple(found)


def _last_memory(device: DeviceSummary) -> StepMark:
    """At the rank's end, which is after its last step."""
    reserved, allocated = device.peak_reserved_bytes, device.peak_allocated_bytes
    return StepMark(device.rank, -1, 0, 0, 0, 0, reserved, reserved, allocated)


def _group(use: GroupUse, sandbox: Sequence[int], moved: Sequence[MovedSummary]) -> GroupResult:
    transport = "reduced" if moved else "real" if use.real_operations else "local"
    return GroupResult(
        name=use.name,
        desc=use.desc,
        size=len(use.ranks),
        sandbox=tuple(rank for rank in sandbox if rank in use.ranks),
        transport=transport,
        operations=use.operations,
        nbytes=use.nbytes,
        compared=sum(one.compared for one in moved),
        largest_difference=max((one.largest_difference for one in moved), default=0.0),
        reduced_transfer_ns=_median([one.transfer_ns for one in moved]),
        assistant_late_ns=_median([one.late_ns for one in moved]),
    )


def _compare(path: Path, outcome: RunOutcome, sandbox: Sequence[int]) -> Comparison:
    real, run = open_trace(path), open_trace(outcome.output)
    theirs, ours = step_times(real, sandbox), step_times(run, sandbox)
    both = [step for step in theirs if step in ours]
    steps = tuple(
        (step, theirs[step], ours[step], _error(theirs[step], ours[step])) for step in both
    )
    kinds = [
        dict(
            _of_ranks(trace, sandbox)
            .filter(pl.col("step").is_in(both))
            .group_by(pl.col("kind").cast(pl.String))
            .agg(pl.col("dur_ns").sum())
            .sort("dur_ns", descending=True)
            .collect()
            .iter_rows()
        )
        for trace in (real, run)
    ]
    typical = [
        _typical(times) or 0 for times in ([one[1] for one in steps], [one[2] for one in steps])
    ]
    return Comparison(
        real=str(path),
        step_error=_error(*typical),
        worst_step_error=float(max((abs(one[3]) for one in steps[1:]), default=0.0)),
        steps=steps,
        kinds=tuple(
            (kind, time_ns, kinds[1].get(kind, 0), _error(time_ns, kinds[1].get(kind, 0)))
            for kind, time_ns in kinds[0].items()
        ),
        doubts=doubts(real.header),
    )


def _error(real: int, emulated: int) -> float:
    return float(np.divide(emulated - real, real)) if real else 0.0
