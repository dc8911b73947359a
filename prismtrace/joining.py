"""Join pieces of one job's trace: blocks of ranks, stretches of steps, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.blocks import INSTANCE_KEY, instance_blocks
from prismtrace.errors import JoinError
from prismtrace.headers import CUT_BEFORE
from prismtrace.output import refuse_inputs
from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.schema import (
    INDEX_BITS,
    ClockDomain,
    ProcessGroup,
    TraceHeader,
    TraceKind,
)
from prismtrace.trace import (
    PathLike,
    Trace,
    instance_columns,
    node_ids,
    open_trace,
    read_headers,
    trace_files,
    write_nodes,
)

__all__ = ["ConcatReport", "concat"]

_COUNTER = ("group", "src_rank", "dst_rank")


@dataclass(frozen=True)
class ConcatReport:
    """What was joined. `linked` counts edges that were added from one piece to the next."""

    output: Path
    pieces: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    nodes: int
    groups: int
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
        joined = _joined_ranks(stretches[0])
        linked = 0
        for later in stretches[1:]:
            joined, added = _followed(joined, _joined_ranks(later))
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


# --- blocks of ranks ----------------------------------------------------------------------


@dataclass
class _Names:
    """Groups, streams and clocks of several headers, each numbered once."""

    groups: dict[tuple[tuple[int, ...], str, int], ProcessGroup] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    clocks: dict[tuple[object, ...], ClockDomain] = field(default_factory=dict)

    def take(self, header: TraceHeader) -> tuple[dict[int, int], dict[int, int]]:
        """Numbers of a header's groups and streams -> those of the result."""
        groups: dict[int, int] = {}
        times: dict[tuple[tuple[int, ...], str], int] = {}
        for group in header.groups:
            same = times[group.ranks, group.name] = times.get((group.ranks, group.name), -1) + 1
            key = (group.ranks, group.name, same)
            if key not in self.groups:
                self.groups[key] = group.model_copy(update={"id": self._free(group.id)})
            groups[group.id] = self.groups[key].id
        labels = header.streams
        streams = {n: self.streams.setdefault(label, self._next(n)) for n, label in labels.items()}
        for domain in header.clock:
            alone = () if domain.host is not None else domain.ranks
            about = (domain.host, domain.source, domain.offset_ns, domain.uncertainty_ns, alone)
            known = self.clocks.get(about)
            ranks = sorted({*domain.ranks, *(known.ranks if known else ())})
            number = known.id if known else len(self.clocks)
            self.clocks[about] = domain.model_copy(update={"id": number, "ranks": tuple(ranks)})
        return groups, streams

    def _free(self, wanted: int) -> int:
        taken = {group.id for group in self.groups.values()}
        return wanted if wanted not in taken else max(taken) + 1

    def _next(self, wanted: int) -> int:
        taken = set(self.streams.values())
        return wanted if wanted not in taken else max(taken) + 1


def _joined_ranks(pieces: list[Trace]) -> Trace:
    """Blocks of ranks as one trace, its rows in order."""
    pieces = sorted(pieces, key=lambda piece: min(piece.header.ranks, default=0))
    names = _Names()
    frames = []
    for piece in pieces:
        groups, streams = names.take(piece.header)
        frames.append(_renamed(piece.nodes, groups, streams))
    headers = [piece.header for piece in pieces]
    apart = all(max(a.ranks, default=0) < min(b.ranks, default=0) for a, b in pairwise(headers))
    return Trace(_header(headers, names), _in_order(frames, apart=apart))


def _renamed(nodes: pl.LazyFrame, groups: dict[int, int], streams: dict[int, int]) -> pl.LazyFrame:
    """Rows with other numbers of groups and streams; those that mean nothing stay."""
    changes = {}
    for name, numbers in (("group", groups), ("stream", streams)):
        if any(old != new for old, new in numbers.items()):
            changes[name] = pl.col(name).replace(numbers)
    return nodes.with_columns(**changes)


def _in_order(frames: list[pl.LazyFrame], *, apart: bool = False) -> pl.LazyFrame:
    """Rows of all frames in the order of their ids; every frame is in order.

    `apart`: those of each frame come after all of the one before.
    """
    if apart:
        return pl.concat(frames, how="diagonal")
    columns = list(dict.fromkeys(name for f in frames for name in f.collect_schema().names()))
    types = {name: t for f in frames for name, t in f.collect_schema().items()}
    whole = [
        frame.with_columns(
            pl.lit(None, types[name]).alias(name)
            for name in columns
            if name not in frame.collect_schema()
        ).select(columns)
        for frame in frames
    ]
    joined = whole[0]
    for frame in whole[1:]:
        joined = joined.merge_sorted(frame, key="id")
    return joined


def _header(headers: Sequence[TraceHeader], names: _Names) -> TraceHeader:
    """What the pieces say together; the first one speaks for what is not joined."""
    policies: dict[str, int] = {}
    for header in headers:
        for name, number in header.policies.items():
            policies[name] = policies.get(name, 0) + number
    symmetry = {r: like for header in headers for r, like in (header.symmetry or {}).items()}
    return headers[0].model_copy(
        update={
            "ranks": tuple(sorted({rank for header in headers for rank in header.ranks})),
            "groups": tuple(sorted(names.groups.values(), key=lambda group: group.id)),
            "streams": {n: label for label, n in sorted(names.streams.items(), key=lambda x: x[1])},
            "clock": tuple(names.clocks.values()),
            "steps": tuple(sorted({step for header in headers for step in header.steps})),
            "symmetry": symmetry or None,
            "sources": tuple(dict.fromkeys(text for h in headers for text in h.sources)),
            "policies": policies,
            "extra": _extra(headers),
        }
    )


def _extra(headers: Sequence[TraceHeader]) -> dict[str, Any]:
    """That of the first, and which steps do not follow the one before them."""
    cut = {step: ahead for h in headers for step, ahead in h.extra.get(CUT_BEFORE, {}).items()}
    for before, after in pairwise(headers):
        if not before.steps or not after.steps or before.steps == after.steps:
            continue
        last, first = before.steps[-1], after.steps[0]
        if cut.get(str(first), first - 1) == last:
            cut.pop(str(first), None)
        else:
            cut.setdefault(str(first), first - 1)
    extra = {name: value for name, value in headers[0].extra.items() if name != CUT_BEFORE}
    return {**extra, CUT_BEFORE: cut} if cut else extra


# --- stretches of steps -------------------------------------------------------------------


def _followed(before: Trace, after: Trace) -> tuple[Trace, int]:
    """Both stretches as one trace, and how many edges lead from one to the other.

    None does where steps are missing between them: how long those took is in no step; nor between
    sampled steps, which were laid out one behind the other.
    """
    names = _Names()
    names.take(before.header)
    groups, streams = names.take(after.header)
    if len(names.clocks) != len(before.header.clock):
        raise JoinError(
            "the steps were recorded by different clocks",
            where=f"steps {format_ranks(before.header.steps)} and "
            f"{format_ranks(after.header.steps)}",
            hint="join what one run recorded on the same hosts",
        )
    last = _by_stream(before.nodes, last=True)
    later = _renamed(after.nodes, groups, streams)
    first = _by_stream(later, last=False)
    _require_later(last, first, after)
    counts = before.nodes.group_by("rank").agg(shift=pl.col("index").max() + 1).collect()
    shift = dict(counts.iter_rows())
    later = _numbered_on(later, before.nodes)
    later = _placed_on(later, shift)
    header = _header([before.header, after.header], names)
    linked = 0
    follows = str(after.header.steps[0]) not in header.extra.get(CUT_BEFORE, {})
    if follows and not header.extra.get("sampled_steps"):
        links = _links(last, first, shift)
        later, linked = _linked(later, links), links.height
    return Trace(header, _in_order([before.nodes, later])), linked


def _by_stream(nodes: pl.LazyFrame, *, last: bool) -> pl.DataFrame:
    """The last (or first) row of every rank and stream, and when the rank ends (or begins)."""
    order = pl.col("index").arg_max() if last else pl.col("index").arg_min()
    return (
        nodes.group_by("rank", "stream")
        .agg(
            pl.col("index", "batch").get(order),
            end=(pl.col("start_ns") + pl.col("dur_ns")).max(),
            begin=pl.col("start_ns").min(),
        )
        .sort("rank", "stream")
        .collect(engine="streaming")
    )


def _require_later(last: pl.DataFrame, first: pl.DataFrame, after: Trace) -> None:
    """On no stream of a rank may the later steps begin before the earlier ones end."""
    both = last.join(first, on=["rank", "stream"], suffix="_later")
    early = both.filter(pl.col("begin_later") < pl.col("end"))
    if early.height:
        rank, by = early["rank"][0], early["end"][0] - early["begin_later"][0]
        raise JoinError(
            f"steps {format_ranks(after.header.steps)} begin before those ahead of them end: on "
            f"rank {rank} by {by} ns",
            where=_where(after),
            hint="join pieces of one run, whose times go on",
        )


def _numbered_on(later: pl.LazyFrame, before: pl.LazyFrame) -> pl.LazyFrame:
    """Instances counted on, where their numbers do not do so already."""

    def spans(nodes: pl.LazyFrame) -> pl.DataFrame:
        members = nodes.filter(pl.col("seq").is_not_null()).select(*instance_columns())
        return (
            members.group_by(*_COUNTER)
            .agg(low=pl.col("seq").min(), high=pl.col("seq").max())
            .collect(engine="streaming")
        )

    both = spans(before).join(spans(later), on=list(_COUNTER), suffix="_later")
    moved = both.filter(pl.col("low_later") <= pl.col("high")).select(
        *_COUNTER, _shift=pl.col("high") + 1 - pl.col("low_later")
    )
    if moved.is_empty():
        return later
    key = [column for column in instance_columns() if column.meta.output_name() in _COUNTER]
    named = [column.alias(f"_{column.meta.output_name()}") for column in key]
    return (
        later.with_columns(named)
        .join(
            moved.lazy(),
            left_on=[f"_{name}" for name in _COUNTER],
            right_on=list(_COUNTER),
            how="left",
            maintain_order="left",
        )
        .with_columns(seq=pl.col("seq") + pl.col("_shift").fill_null(0))
        .drop("_shift", *(f"_{name}" for name in _COUNTER))
    )


def _placed_on(later: pl.LazyFrame, shift: dict[int, int]) -> pl.LazyFrame:
    """Rows with their indices and ids moved behind those of the earlier steps."""

    def moved(rank: pl.Expr) -> pl.Expr:
        return rank.replace_strict(shift, default=0, return_dtype=pl.Int32)

    rank, source = pl.col("rank"), pl.element() // (1 << INDEX_BITS)
    index = pl.col("index") + moved(rank)
    return later.with_columns(
        index=index,
        id=node_ids(rank, index),
        xdeps=pl.col("xdeps").list.eval(pl.element() + moved(source.cast(pl.Int32)).cast(pl.Int64)),
    )


def _links(last: pl.DataFrame, first: pl.DataFrame, shift: dict[int, int]) -> pl.DataFrame:
    """Columns rank, stream, index, batch, back: first rows and the distance of what is ahead."""
    both = first.join(last, on=["rank", "stream"], suffix="_ahead", maintain_order="left")
    index = pl.col("index") + pl.col("rank").replace_strict(shift, default=0, return_dtype=pl.Int32)
    return both.select("rank", index=index, _back=(index - pl.col("index_ahead")).cast(pl.UInt32))


def _linked(later: pl.LazyFrame, links: pl.DataFrame) -> pl.LazyFrame:
    """Rows with an edge to the row ahead on their stream, for the first of each stream."""
    back = pl.col("_back")
    lags = pl.concat_list(pl.lit([0], dtype=pl.List(pl.Int64)), "lag_ns")
    return (
        later.join(links.lazy(), on=["rank", "index"], how="left", maintain_order="left")
        .with_columns(
            deps=pl.when(back.is_null()).then("deps").otherwise(pl.concat_list(back, "deps")),
            lag_ns=pl.when(back.is_null()).then("lag_ns").otherwise(lags),
        )
        .drop("_back")
    )


# --- checks -------------------------------------------------------------------------------


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
            raise JoinError(
                "the same communication is not the same in all pieces: they are of different "
                "jobs or stretches of time",
                where=f"{', '.join(map(str, paths[:2]))} group={worst['group']} "
                f"seq={worst['seq']} rank={worst['rank']}",
                hint="convert all profiler files in one call: it matches ranks with each other",
            )
