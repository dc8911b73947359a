"""Cut a piece out of a trace: some ranks, steps, or a window of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from prismtrace.blocks import INSTANCE_KEY, instance_blocks, rank_blocks
from prismtrace.converters.parts import disk_errors, workspace
from prismtrace.errors import StepError, TraceError
from prismtrace.headers import CUT_BEFORE, require_ranks
from prismtrace.output import refuse_inputs
from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.schema import INDEX_BITS, TraceHeader, TraceKind
from prismtrace.trace import (
    PathLike,
    Trace,
    directional_edges,
    instance_columns,
    node_ids,
    write_nodes,
)

__all__ = ["SliceOutReport", "cut_out", "slice_out"]

CUT_DEPENDENCY = "cut-dependency"
CUT_PARTNER = "cut-partner"


@dataclass(frozen=True)
class SliceOutReport:
    """What was cut out of a trace.

    `cut_dependencies` counts edges from nodes that were left out to nodes that were kept;
    `cut_partners` communications that lost a member to the steps or the window: they are kept
    without `seq` and wait for nobody. Those that lost ranks keep it, so that blocks of ranks can
    be joined again; what a merge or a prediction needs of them is in the other blocks.
    """

    output: Path
    """The new trace."""
    ranks: tuple[int, ...]
    """Ranks that have rows in it."""
    steps: tuple[int, ...]
    """Numbers of its steps."""
    nodes: int
    """Its rows."""
    nodes_before: int
    """Rows of the trace that it was cut out of."""
    cut_dependencies: int
    cut_partners: int


def slice_out(
    trace: Trace,
    output: PathLike,
    *,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    window_ns: tuple[int, int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> SliceOutReport:
    """Write the part of a trace that lies in all that is given; block by block.

    Kept nodes are numbered anew from 0 in each rank. What was counted of the whole trace stays as
    it was: slack, the critical path, numbers of groups and of instances (without gaps).

    Args:
        trace: any trace with rows; of a slice only ranks can be cut out.
        output: the file to write.
        ranks: keep these.
        steps: keep these, and nothing that is outside of steps.
        window_ns: keep what lies in it at least partly; begin and end, counted from the first
            start in the trace, or of each clock, where the offset between clocks is not known.
        progress: called with the number of rows written since the last call.

    Raises:
        RankError, StepError: not in the trace.
        TraceError: nothing is left, or a trace without times or of a slice cannot be cut so.
        OutputError: the file cannot be written, or is one of the trace's.
    """
    header, target = trace.header, Path(output)
    refuse_inputs(target, trace.paths)
    with reading(trace.paths), workspace(target) as folder:
        cut = _cut(trace, ranks, steps, window_ns)
        paths: list[Path] = []
        found: set[int] = set()
        here: set[int] = set()
        for number, block in enumerate(cut.blocks()):
            with disk_errors(target):
                paths.append(folder / f"{number}.parquet")
                block.write_parquet(paths[-1], compression="lz4")
            found.update(block["step"].drop_nulls().unique())
            here.update(block["rank"].unique())
            (progress or (lambda _: None))(block.height)
        if not cut.rows:
            raise _nothing_left(trace)
        begun = window_ns is not None and window_ns[0] > 0
        made = _header(header, here, found, cut)
        made = _with_cut_steps(made, header, begun=begun)
        with disk_errors(target):
            write_nodes(made, pl.concat([pl.scan_parquet(p, glob=False) for p in paths]), target)
        before = int(trace.nodes.select(pl.len()).collect().item())
    return SliceOutReport(
        output=target,
        ranks=made.ranks,
        steps=made.steps,
        nodes=cut.rows,
        nodes_before=before,
        cut_dependencies=cut.dependencies,
        cut_partners=cut.partners,
    )


def cut_out(trace: Trace, *, steps: Sequence[int]) -> Trace:
    """Some steps of a trace, as `slice_out` writes them, in memory.

    Raises:
        StepError: not in the trace.
        TraceError: nothing is left, or the trace is a slice.
    """
    with reading(trace.paths):
        cut = _cut(trace, None, steps, None)
        blocks = list(cut.blocks())
    if not cut.rows:
        raise _nothing_left(trace)
    nodes = pl.concat(blocks)
    found = {name: set(nodes[name].drop_nulls().unique()) for name in ("rank", "step")}
    made = _header(trace.header, found["rank"], found["step"], cut)
    return Trace(_with_cut_steps(made, trace.header, begun=False), nodes.lazy(), trace.paths)


def _cut(
    trace: Trace,
    ranks: Sequence[int] | None,
    steps: Sequence[int] | None,
    window_ns: tuple[int, int] | None,
) -> _Cut:
    """What `slice_out` is asked for, ready to be read."""
    header, where = trace.header, _place(trace)
    chosen = _chosen(header, ranks, steps, where)
    if header.kind is TraceKind.SLICE and (steps is not None or window_ns is not None):
        raise TraceError(
            "only ranks can be cut out of a slice: its rows are found by their numbers",
            where=where,
            hint="combine the slices with `prismcalib merge`, then cut",
        )
    return _Cut(
        trace.nodes.filter(pl.col("rank").is_in(list(chosen))),
        _wanted(trace, steps, window_ns, where),
        by_step=steps is not None,
        renumber=header.kind is not TraceKind.SLICE,
    )


def _nothing_left(trace: Trace) -> TraceError:
    return TraceError(
        "no node of the trace lies in what is asked for",
        where=_place(trace),
        hint="`prismtrace info` says which ranks, steps and times there are",
    )


def _place(trace: Trace) -> str | None:
    return ", ".join(map(str, trace.paths)) or None


def _steps_text(steps: Sequence[int]) -> str:
    return format_ranks(steps, strided=False)


def _chosen(
    header: TraceHeader,
    ranks: Sequence[int] | None,
    steps: Sequence[int] | None,
    where: str | None,
) -> tuple[int, ...]:
    """Ranks to keep, ascending; those and the steps have to be there."""
    require_ranks(header, ranks or (), where)
    lacking = sorted(set(steps or ()) - set(header.steps))
    if lacking:
        there = sorted(set(steps or ()) & set(header.steps))
        one = len(lacking) == 1
        raise StepError(
            f"step{'' if one else 's'} {_steps_text(lacking)} {'is' if one else 'are'} not in the "
            "trace",
            where=where,
            hint=f"of those it has {_steps_text(there)}"
            if there
            else f"it has steps {_steps_text(header.steps)}"
            if header.steps
            else "it has no steps marked",
        )
    return tuple(sorted(set(header.ranks if ranks is None else ranks)))


def _wanted(
    trace: Trace, steps: Sequence[int] | None, window_ns: tuple[int, int] | None, where: str | None
) -> pl.Expr | None:
    """Which rows to keep, of those of the chosen ranks; None: all."""
    wanted = []
    if steps is not None:
        wanted.append(pl.col("step").is_in(list(steps)).fill_null(value=False))
    if window_ns is not None:
        begin, end = window_ns
        first = _first_starts(trace.nodes, trace.header)
        if not first:
            raise TraceError(
                "the trace has no times, so no window of it can be cut out",
                where=where,
                hint="cut steps or ranks out",
            )
        start = pl.col("start_ns") - pl.col("rank").replace_strict(
            first, default=None, return_dtype=pl.Int64
        )
        inside = (start < end) & ((start + pl.col("dur_ns") > begin) | (start >= begin))
        wanted.append(inside.fill_null(value=False))
    return pl.all_horizontal(wanted) if wanted else None


def _first_starts(nodes: pl.LazyFrame, header: TraceHeader) -> dict[int, int]:
    """Rank -> what time 0 of the window is in the rank's own clock; empty without times."""
    starts = nodes.group_by("rank").agg(pl.col("start_ns").min()).collect(engine="streaming")
    first = {rank: start for rank, start in starts.iter_rows() if start is not None}
    clocks = {rank: domain for domain in header.clock for rank in domain.ranks}
    # Clocks with known offsets are one; ranks without a clock are taken to share it.
    offset = {rank: (clocks[rank].offset_ns or 0) if rank in clocks else 0 for rank in first}
    shared = {
        rank: -1 if rank not in clocks or clocks[rank].offset_ns is not None else clocks[rank].id
        for rank in first
    }
    zero: dict[int, int] = {}
    for rank, start in first.items():
        common = start + offset[rank]
        zero[shared[rank]] = min(zero.get(shared[rank], common), common)
    return {rank: zero[shared[rank]] - offset[rank] for rank in first}


class _Cut:
    """Kept rows with new numbers, in blocks of whole ranks; counts what was cut.

    Args:
        nodes: the rows of the chosen ranks.
        wanted: which of them to keep; None: all.
        by_step: whether whole steps may be missing between others.
        renumber: count the rows of each rank from 0.
    """

    def __init__(
        self, nodes: pl.LazyFrame, wanted: pl.Expr | None, *, by_step: bool, renumber: bool
    ) -> None:
        self.rows = self.dependencies = self.partners = 0
        self._kept = nodes if wanted is None else nodes.filter(wanted)
        self._lost = None if wanted is None else _incomplete(nodes, wanted)
        self._gaps = _gaps(self._kept) if by_step else None
        self._number = pl.col("index")
        if renumber:
            self._number = pl.int_range(pl.len(), dtype=pl.Int32).over("rank")
        self._far = self._far_places()

    def blocks(self) -> Iterator[pl.DataFrame]:
        """The rows, ranks ascending."""
        for block in rank_blocks(self._kept, self._kept.collect_schema().names()):
            self.rows += block.height
            yield self._placed(self._matched(block))

    def _matched(self, block: pl.DataFrame) -> pl.DataFrame:
        """With instances numbered without gaps, and not at all where a member was left out."""
        if self._lost is None and self._gaps is None:
            return block
        keyed, seq = block.with_columns(_instance_key()), pl.col("seq")
        if self._lost is not None:
            keyed = keyed.join(self._lost, on=_KEY, how="left", maintain_order="left")
            gone = pl.col("_gone").fill_null(value=False)
            self.partners += int(keyed.select(gone.sum()).item())
            seq = pl.when(~gone).then(seq)
        if self._gaps is not None:
            keyed = keyed.join(
                self._gaps, on=[*_COUNTER, "step"], how="left", maintain_order="left"
            )
            seq -= pl.col("_gap").fill_null(0)
        return keyed.with_columns(seq=seq).select(block.columns)

    def _placed(self, block: pl.DataFrame) -> pl.DataFrame:
        """With new ids, and edges between kept rows only."""
        block = block.with_columns(_new=self._number)
        shift = pl.col("index") - pl.col("_new")
        # Where nothing in between was left out distances stay, but the target may be gone.
        same = (shift.max() == shift.min()).over("rank")
        there = pl.col("deps").list.max().fill_null(0) <= pl.col("_new")
        far = pl.col("xdeps").list.len().fill_null(0) > 0
        changing = block.filter(~(same & there) | far)
        if changing.height:
            block = block.update(self._edges(block, changing), on="id", include_nulls=False)
        number = pl.col("_new")
        return block.with_columns(index=number, id=node_ids(pl.col("rank"), number)).drop("_new")

    def _edges(self, block: pl.DataFrame, changing: pl.DataFrame) -> pl.DataFrame:
        """Columns id, deps, xdeps, lag_ns of some rows; null where they have been null."""
        before = directional_edges(changing)
        places = block.select(src="id", _from="_new")
        if self._far is not None:
            places = pl.concat([places, self._far]).unique("src")
        own = block.select(dst="id", _to="_new")
        edges = before.join(places, on="src", maintain_order="left").join(
            own, on="dst", maintain_order="left"
        )
        self.dependencies += before.height - edges.height
        source_rank = pl.col("src") // (1 << INDEX_BITS)
        here = source_rank == pl.col("dst") // (1 << INDEX_BITS)
        # Edges of a row come from its own rank first, as `lag_ns` has them.
        lists = edges.group_by(id="dst", maintain_order=True).agg(
            deps=(pl.col("_to") - pl.col("_from")).filter(here).cast(pl.UInt32),
            xdeps=node_ids(source_rank, pl.col("_from")).filter(~here),
            lag_ns="lag_ns",
        )
        names = ("deps", "xdeps", "lag_ns")
        found = changing.select("id", *names).join(
            lists, on="id", how="left", suffix="_kept", maintain_order="left"
        )
        return found.select(
            "id",
            *(
                pl.when(pl.col(name).is_not_null())
                .then(pl.col(f"{name}_kept").fill_null(pl.lit([], found.schema[name])))
                .alias(name)
                for name in names
            ),
        )

    def _far_places(self) -> pl.DataFrame | None:
        """Columns src, _from: new numbers of rows that edges from other ranks come from."""
        asked = (
            self._kept.select(src=pl.col("xdeps").explode())
            .drop_nulls()
            .unique()
            .collect(engine="streaming")["src"]
        )
        if asked.is_empty():
            return None
        return pl.concat(
            [
                block.select(src="id", _from=self._number.cast(pl.Int32)).filter(
                    pl.col("src").is_in(asked.implode())
                )
                for block in rank_blocks(self._kept, ["id", "rank", "index"])
            ]
        )


_COUNTER = ("_group", "_src_rank", "_dst_rank")
_KEY = (*_COUNTER, "_seq")


def _instance_key() -> list[pl.Expr]:
    """Columns `_KEY`; for rows that are in no instance it means nothing."""
    return [
        column.fill_null(-1).alias(f"_{name}")
        for column, name in zip(instance_columns(), INSTANCE_KEY, strict=True)
    ]


def _incomplete(nodes: pl.LazyFrame, wanted: pl.Expr) -> pl.DataFrame | None:
    """Columns `_KEY`, _gone (true): instances of which only some of the members are kept."""
    found = []
    for block in instance_blocks(nodes.with_columns(_kept=wanted), ["_kept"]):
        some = block.group_by(*INSTANCE_KEY).agg(pl.col("_kept").any(), _all=pl.col("_kept").all())
        found.append(some.filter(pl.col("_kept") & ~pl.col("_all")))
    if not any(part.height for part in found):
        return None
    return pl.concat(found).select(
        *(pl.col(name).fill_null(-1).alias(f"_{name}") for name in INSTANCE_KEY),
        _gone=pl.lit(value=True),
    )


def _gaps(kept: pl.LazyFrame) -> pl.DataFrame | None:
    """Columns `_COUNTER`, step, _gap: how many numbers are missing before a step's."""
    spans = (
        kept.filter(pl.col("seq").is_not_null())
        .select("step", *_instance_key())
        .group_by(*_COUNTER, "step")
        .agg(low=pl.col("_seq").min(), high=pl.col("_seq").max())
        .sort(*_COUNTER, "low")
        .collect(engine="streaming")
    )
    ahead = pl.col("high").cum_max().shift(1).over(_COUNTER)
    missing = (pl.col("low") - ahead - 1).clip(0).fill_null(0)
    gaps = spans.with_columns(_gap=missing.cum_sum().over(_COUNTER))
    if not (gaps["_gap"] > 0).any():
        return None
    return gaps.select(*_COUNTER, "step", "_gap")


def _with_cut_steps(made: TraceHeader, header: TraceHeader, *, begun: bool) -> TraceHeader:
    """`made` with the steps noted that no longer follow the one before them.

    `begun`: what lies before a window was cut, the beginning of its first step perhaps.
    """
    ahead = dict(zip(header.steps[1:], header.steps, strict=False))
    known = header.extra.get(CUT_BEFORE, {})
    kept = set(made.steps)
    cut = {str(step): known[str(step)] for step in made.steps if str(step) in known}
    for step in made.steps:
        if step in ahead and ahead[step] not in kept:
            cut.setdefault(str(step), ahead[step])
    if begun and made.steps:
        cut.setdefault(str(made.steps[0]), None)
    extra = {name: value for name, value in header.extra.items() if name != CUT_BEFORE}
    return made.model_copy(update={"extra": {**extra, CUT_BEFORE: cut} if cut else extra})


def _header(header: TraceHeader, here: set[int], steps: set[int], cut: _Cut) -> TraceHeader:
    """The header of what was cut out."""
    clocks = (
        domain.model_copy(update={"ranks": tuple(r for r in domain.ranks if r in here)})
        for domain in header.clock
    )
    counts = {CUT_DEPENDENCY: cut.dependencies, CUT_PARTNER: cut.partners}
    policies = dict(header.policies)
    for name, number in counts.items():
        if number:
            policies[name] = policies.get(name, 0) + number
    symmetry = header.symmetry and {
        rank: like for rank, like in header.symmetry.items() if like in here
    }
    return header.model_copy(
        update={
            "ranks": tuple(rank for rank in header.ranks if rank in here),
            "steps": tuple(step for step in header.steps if step in steps),
            "clock": tuple(domain for domain in clocks if domain.ranks),
            "symmetry": symmetry or None,
            "policies": policies,
        }
    )
