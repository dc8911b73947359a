"""What the numbers of a run mean, in a sentence a person can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from prismcalib.paths import CriticalPath
from prismcalib.report.markup import bytes_text
from prismcalib.report.scan import LOCAL
from prismcalib.report.tables import Pipeline
from prismcalib.wording import RankNames, doubts, percent_text, start_text
from prismtrace.group_names import group_family, group_labels
from prismtrace.schema import TraceHeader

__all__ = ["Conclusion", "conclude", "peaks_note"]

# Below these shares of the critical path something is no headline.
_MUCH_IDLE = 0.25
_MUCH_TRANSFER = 0.3
_MUCH_UNKNOWN = 0.3
# Share of the window before the path starts above which it says little about the run.
_LATE = 0.5
# How much longer than its peers a rank or stage computes before it is called slow.
_SLOW = 0.05


@dataclass(frozen=True)
class Conclusion:
    """One sentence, the `headline`, and a few more, the `notes`."""

    headline: str
    notes: tuple[str, ...]


def conclude(
    path: CriticalPath,
    ranks: pl.DataFrame,
    pipeline: Pipeline | None,
    traffic: pl.DataFrame,
    header: TraceHeader,
) -> Conclusion:
    """Say what the run waits for.

    Args:
        path: its critical path.
        ranks: as `RunSummary.ranks`.
        pipeline: its stages, if it has any.
        traffic: as `RunSummary.traffic`.
        header: of the trace; names its groups.
    """
    length = max(path.length_ns, 1)
    idle = (path.inner_idle_ns + path.gap_ns) / length
    if path.unmatched_ns / length >= _MUCH_UNKNOWN:
        headline = (
            f"{percent_text(path.unmatched_ns / length)} of the critical path is communication whose "
            "partners were not recorded: record all ranks over the same steps to learn more."
        )
    elif path.lead_in_ns / length >= _LATE:
        headline = (
            f"{percent_text(path.lead_in_ns / length)} of the window lies before the critical path "
            "starts: nothing recorded leads from one step to the next, so the path shows only "
            "the last; the section on stragglers judges all steps."
        )
    elif start := start_text(path.start_share()):
        headline = f"{start}."
    elif idle >= _MUCH_IDLE:
        headline = _idle_sentence(path, idle, pipeline, RankNames.of(header))
    elif path.transfer_ns / length >= _MUCH_TRANSFER:
        headline = _transfer_sentence(path, header)
    else:
        headline = _compute_sentence(path, ranks, pipeline, RankNames.of(header))
    notes = _notes(ranks, pipeline, traffic, path.length_ns) + _reservations(path)
    notes += [f"{text[0].upper()}{text[1:]}." for text in doubts(header)]
    return Conclusion(headline, tuple(notes))


def peaks_note(peaks: pl.DataFrame, names: RankNames) -> tuple[str, ...]:
    """That memory peaks in what was left out, if it does; `peaks`: `RunSummary.peaks_left_out`."""
    if peaks.is_empty():
        return ()
    rank, most, shown = peaks.row(0)
    where = f"rank {names.text(rank)}"
    if peaks.height > 1:
        where = f"{peaks.height} ranks, most of all rank {names.text(rank)}"
    here = "" if shown is None else f", {bytes_text(shown)} in the steps shown"
    return (f"Memory peaks in what is left out on {where}: {bytes_text(most)}{here}.",)


def _idle_sentence(
    path: CriticalPath, share: float, pipeline: Pipeline | None, names: RankNames
) -> str:
    times = path.segments.group_by("rank").agg(
        time=pl.col("inner_idle_ns").sum() + pl.col("gap_ns").sum()
    )
    where = _where(times, pipeline, names)
    most = f", most of it{where}" if where.startswith(" on ") else where
    return (
        f"{percent_text(share)} of the critical path is idle time of the devices{most}: "
        "the host launches too slowly."
    )


def _transfer_sentence(path: CriticalPath, header: TraceHeader) -> str:
    labels = group_labels(header.groups)
    families = {labels[group.id]: group_family(group) for group in header.groups}
    family = pl.col("group").replace_strict(families, default=None, return_dtype=pl.String)
    moved = (
        path.segments.filter(~pl.col("kind").is_in(LOCAL))
        .group_by(family, "kind")
        .agg(pl.col("busy_ns").sum())
        .sort("busy_ns", "kind", descending=[True, False])
    )
    group, kind, time = moved.row(0)
    of = f"{kind} of {group}" if group else kind
    return (
        f"{percent_text(path.transfer_ns / max(path.length_ns, 1))} of the critical path is "
        f"communication, most of it {of} ({percent_text(time / max(path.length_ns, 1))}): "
        "transfers that are faster, smaller or hidden behind computation shorten the step."
    )


def _compute_sentence(
    path: CriticalPath, ranks: pl.DataFrame, pipeline: Pipeline | None, names: RankNames
) -> str:
    share = percent_text((path.compute_ns - path.inner_idle_ns) / max(path.length_ns, 1))
    top = ranks.sort("path_share", "rank", descending=[True, False]).row(0, named=True)
    ordinary = 1 / max(ranks.height, 1)
    slow = top["excess"] is not None and top["excess"] >= _SLOW
    if slow and top["path_share"] >= 1.5 * ordinary + 0.1:
        peers = "the other ranks of its stage" if pipeline else "the other ranks"
        return (
            f"Rank {names.text(top['rank'])} computes {percent_text(top['excess'])} longer than {peers} and holds "
            f"{percent_text(top['path_share'])} of the critical path: the others wait for it."
        )
    if pipeline is not None and pipeline.stage_table.height > 1:
        stages = pipeline.stage_table
        typical = float(stages["compute_ns"].median() or 1)  # type: ignore[arg-type]
        slow = stages.sort("compute_ns", descending=True).row(0, named=True)
        excess = slow["compute_ns"] / max(typical, 1) - 1
        if excess >= _SLOW and slow["path_share"] >= 1.2 / stages.height:
            return (
                f"Stage {slow['stage']} of the pipeline computes {percent_text(excess)} longer than "
                f"the median stage and holds {percent_text(slow['path_share'])} of the critical path: "
                "move layers or other work away from it."
            )
    times = path.segments.group_by("rank").agg(time=pl.col("busy_ns").sum())
    return (
        f"{share} of the critical path is computation{_where(times, pipeline, names)}, and no rank "
        "stands out: only faster or less computation shortens the step."
    )


def _notes(
    ranks: pl.DataFrame, pipeline: Pipeline | None, traffic: pl.DataFrame, window_ns: int
) -> list[str]:
    whole = max(window_ns * ranks.height, 1)
    part = {
        name: float(ranks[f"{name}_ns"].sum()) / whole
        for name in ("compute", "inner_idle", "transfer", "wait", "gap")
    }
    notes = [
        (
            f"Of its time an average rank computes {percent_text(part['compute'])}, transfers "
            f"{percent_text(part['transfer'])} without computing, waits for other ranks "
            f"{percent_text(part['wait'])} and is idle {percent_text(part['inner_idle'] + part['gap'])}."
        )
    ]
    if pipeline is not None:
        text = f"Pipeline bubbles (waiting or nothing to do) take {percent_text(pipeline.bubble)}"
        least = pipeline.least_bubble
        if least is not None:
            text += (
                f"; {pipeline.stages} stages and {pipeline.microbatches} microbatches"
                + (f" in {pipeline.chunks} chunks" if (pipeline.chunks or 1) > 1 else "")
                + f" waste {percent_text(least)} even when all is even"
            )
        notes.append(text + ".")
    if traffic.height and traffic["wait_share"][0] >= 0.02:
        family, kind, share = traffic.select("family", "kind", "wait_share").row(0)
        notes.append(
            f"Most waiting is in {kind} of {family}: {percent_text(share)} of its ranks' time, also "
            "beside their own computation."
        )
    return notes


def _reservations(path: CriticalPath) -> list[str]:
    """What of the path was not measured, when that is more than a trifle."""
    source = pl.col("transfer_source")
    supposed = path.segments.filter(source.is_not_null() & (source != "measured"))
    share = int(supposed["busy_ns"].sum()) / max(path.length_ns, 1)
    if share < 0.01:
        return []
    sources = ", ".join(sorted(supposed["transfer_source"].unique()))
    return [f"{percent_text(share)} of the critical path are transfers not measured: {sources}."]


def _where(times: pl.DataFrame, pipeline: Pipeline | None, names: RankNames) -> str:
    """` on ranks 0 and 6`: the fewest places that hold 80 % of a time; columns rank, time."""
    few = _fewest(times)
    if not few:
        return ""
    if len(few) <= 4:
        return f" on {_listed('rank', [names.text(rank) for rank in few])}"
    if pipeline is not None:
        by_stage = (
            times.with_columns(rank=pl.col("rank").replace_strict(pipeline.stage_of, default=None))
            .drop_nulls("rank")
            .group_by("rank")
            .agg(pl.col("time").sum())
        )
        stages = _fewest(by_stage)
        if stages and len(stages) <= max(1, pipeline.stages // 3):
            return f" on {_listed('stage', list(map(str, stages)))}"
    return f", spread over {times.filter(pl.col('time') > 0).height} ranks"


def _fewest(times: pl.DataFrame) -> list[int]:
    ordered = times.sort("time", "rank", descending=[True, False])
    before = pl.col("time").cum_sum() - pl.col("time")
    enough = ordered.filter(before < 0.8 * pl.col("time").sum())
    return sorted(enough["rank"].to_list())


def _listed(noun: str, numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    return f"{noun}s {', '.join(numbers[:-1])} and {numbers[-1]}"
