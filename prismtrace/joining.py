"""Join pieces of one job's trace: blocks of ranks, stretches of steps, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import polars as pl

from prismtrace.blocks import INSTANCE_KEY, instance_blocks
from prismtrace.errors import JoinError
from prismtrace.group_names import group_labels
from prismtrace.output import refuse_inputs
from prismtrace.rank_blocks import joined_ranks
from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.step_stretches import followed
from prismtrace.trace import PathLike, Trace, open_trace, read_headers, trace_files, write_nodes

__all__ = ["ConcatReport", "concat"]


@dataclass(frozen=True)
class ConcatReport:
    """What was joined. `linked` counts edges that were added from one piece to the next."""

    output: Path
    """The trace."""
    pieces: int
    """Traces that were joined."""
    ranks: tuple[int, ...]
    """Ranks that have rows."""
    steps: tuple[int, ...]
    """Numbers of the steps in the trace."""
    nodes: int
    """Rows of the trace."""
    groups: int
    """How many process groups it lists."""
    linked: int


def concat(traces: Sequence[Trace | PathLike], output: PathLike) -> ConcatReport:
    """Write one trace of several pieces of one job's.

    Pieces with the same steps are blocks of ranks. Stretches of steps follow one another on all
    ranks: nodes and instances of the later ones are numbered on, and the first node of each
    stream waits for the last one before, unless steps are missing between them or all were
    sampled.

    Args:
        traces: the pieces, in any order; a folder or pattern stands for those in it.
        output: the file to write.

    Raises:
        JoinError: the pieces are of different jobs, overlap, leave ranks out in some steps, or
            the same communication is not the same in all of them.
        OutputError: the file cannot be written, or is one of the pieces.
    """
    opened = [piece for t in traces for piece in ([t] if isinstance(t, Trace) else _pieces(t))]
    if not opened:
        raise JoinError("no trace was given", hint="name at least two")
    paths = [path for trace in opened for path in trace.paths]
    refuse_inputs(output, paths)
    stretches = _stretches(opened)
    with reading(paths):
        joined = joined_ranks(stretches[0])
        linked = 0
        for later in stretches[1:]:
            joined, added = followed(joined, joined_ranks(later))
            linked += added
        _require_agreement(joined, paths)
        write_nodes(joined.header, joined.nodes, output)
        rows = int(joined.nodes.select(pl.len()).collect(engine="streaming").item())
    return ConcatReport(
        output=Path(output),
        pieces=len(opened),
        ranks=joined.header.ranks,
        steps=joined.header.steps,
        nodes=rows,
        groups=len(joined.header.groups),
        linked=linked,
    )


def _pieces(source: PathLike) -> list[Trace]:
    """The traces that a path, folder or pattern names; files with the same header are one."""
    files = trace_files(source)
    alike: list[tuple[TraceHeader, list[Path]]] = []
    for path, header in zip(files, read_headers(files), strict=True):
        same = next((paths for known, paths in alike if known == header), None)
        if same is None:
            alike.append((header, [path]))
        else:
            same.append(path)
    return [open_trace(paths) for _, paths in alike]


def _where(*traces: Trace) -> str:
    return " and ".join(str(trace.paths[0]) if trace.paths else "a trace" for trace in traces)


def _stretches(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Pieces with the same steps together, in the order of their steps.

    Raises:
        JoinError: see `concat`.
    """
    first = traces[0]
    for other in traces[1:]:
        for name, what in (
            ("kind", "kind of trace"),
            ("world_size", "world size"),
            ("axes", "sizes of the parallel axes"),
            ("fold_order", "order of reductions"),
        ):
            one, two = getattr(first.header, name), getattr(other.header, name)
            if one != two:
                raise JoinError(
                    f"the traces are of different jobs: {what} {one} and {two}",
                    where=_where(first, other),
                    hint="join pieces of one job only",
                )
    if first.header.kind is TraceKind.SLICE and len(traces) > 1:
        raise JoinError(
            "slices are not pieces but executions of their own",
            where=_where(*traces[:2]),
            hint="combine them with `prismcalib merge`",
        )
    by_steps: dict[tuple[int, ...], list[Trace]] = {}
    for trace in traces:
        by_steps.setdefault(trace.header.steps, []).append(trace)
    ordered = [by_steps[steps] for steps in sorted(by_steps)]
    _require_fit(ordered)
    return ordered


def _require_fit(stretches: list[list[Trace]]) -> None:
    """Ranks of a stretch are disjoint; all have the same ranks; their steps follow each other."""
    everybody: set[int] = set()
    for number, pieces in enumerate(stretches):
        owner: dict[int, Trace] = {}
        for piece in pieces:
            twice = sorted(rank for rank in piece.header.ranks if rank in owner)
            if twice:
                raise JoinError(
                    f"ranks {format_ranks(twice)} are in two pieces with the same steps",
                    where=_where(owner[twice[0]], piece),
                    hint="each rank and step may be in one piece only: cut with `slice-out`",
                )
            owner |= dict.fromkeys(piece.header.ranks, piece)
        if number == 0:
            everybody = set(owner)
        elif set(owner) != everybody:
            raise JoinError(
                f"ranks {format_ranks(sorted(everybody ^ set(owner)))} are in some steps only",
                where=_where(stretches[0][0], pieces[0]),
                hint="give all pieces, or cut the same ranks out of each with `slice-out`",
            )
    for before, after in pairwise(stretches):
        steps = before[0].header.steps, after[0].header.steps
        if not all(steps) or steps[0][-1] >= steps[1][0]:
            shown = [format_ranks(some) or "none" for some in steps]
            raise JoinError(
                f"the steps do not follow one another: {shown[0]} and {shown[1]}",
                where=_where(before[0], after[0]),
                hint="cut overlapping steps away with `slice-out --steps`",
            )


def _require_agreement(joined: Trace, paths: Sequence[Path]) -> None:
    """Members of an instance have to be of one kind, and each rank takes part once.

    Raises:
        JoinError: numbers of the pieces mean different operations.
    """
    for members in instance_blocks(joined.nodes, ["rank", "kind"]):
        p2p = pl.col("src_rank") >= 0
        wrong = members.group_by(*INSTANCE_KEY).agg(
            kinds=pl.col("kind").n_unique(),
            twice=pl.col("rank").n_unique() != pl.len(),
            rank=pl.col("rank").min(),
        )
        wrong = wrong.filter(pl.col("twice") | (~p2p & (pl.col("kinds") > 1)))
        if wrong.height:
            worst = wrong.sort(*INSTANCE_KEY).row(0, named=True)
            group = group_labels(joined.header.groups).get(worst["group"], worst["group"])
            raise JoinError(
                "the same communication is not the same in all pieces: they are of different "
                "jobs or stretches of time",
                where=f"{', '.join(map(str, paths[:2]))} group={group} "
                f"seq={worst['seq']} rank={worst['rank']}",
                hint="convert all profiler files in one call: it matches ranks with each other",
            )
