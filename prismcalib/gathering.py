"""Everything that a job's timeline is made from, gathered from its files into one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.assembly import Assembly, Values
from prismcalib.build import node_text
from prismcalib.calibrated import Calibrated, Piece
from prismcalib.campaign import Campaign, Slice
from prismcalib.comm_costs import CommCosts, CostReport, with_kept_doubts
from prismcalib.comm_table import CommTable
from prismcalib.errors import MergeInputError
from prismcalib.graph import Graph
from prismcalib.instances import Channels, Members, members_of
from prismcalib.measuring import SOURCES, Clocks, Execution, ExecutionReport, measure
from prismcalib.propagation import Timing
from prismcalib.rows import ABSENT, Rows, ranks_text, read_rows, runs
from prismcalib.samples import combine, part_of, pool_steps
from prismcalib.slice_options import SliceOptions
from prismcalib.steady import step_views
from prismcalib.structure import renamed, require_same_structure
from prismcalib.waiting import waiting_rows
from prismtrace.group_names import group_labels
from prismtrace.reading import reading
from prismtrace.schema import INDEX_BITS, TraceHeader, TransferSource
from prismtrace.trace import Trace, scan_nodes

__all__ = ["Gathering"]

_RANKS_AT_ONCE = 64
_NONE = SOURCES.index(TransferSource.NONE)


class Gathering:
    """State of one merge while files come in.

    `executions` reads the slices, `add` puts one in place; then come `add_kept`, `add_untimed`
    and `finish_costs`. Afterwards `assembly` is complete.
    """

    def __init__(self, campaign: Campaign, options: SliceOptions, clocks: Clocks) -> None:
        self.campaign = campaign
        self.options = options
        self.clocks = clocks
        self.twins = dict(campaign.twins)
        self.assembly = Assembly(self._counts(), Channels(campaign.header, campaign.place))
        self.pieces: list[Piece] = []
        self.seen: list[ExecutionReport] = []
        self.costs = _comm_costs(campaign.header, options)
        self.cost_report: CostReport | None = None
        self.resized = 0
        self.unmatched = 0
        self._piece_of: dict[int, Piece] = {}

    # Plan -------------------------------------------------------------------------------

    def _counts(self) -> dict[int, int]:
        """Rows of every rank of the result."""
        counts: dict[int, int] = {}
        for part in self.campaign.slices:
            nodes = scan_nodes(part.files[0])
            counts |= _rank_counts(nodes, part.real_ranks, str(part.files[0]))
            if self.campaign.bare is not None and len(part.headers[0].steps) != 1:
                counts |= self._bare_counts(part)
        if self.campaign.base is not None and self.campaign.kept:
            counts |= _rank_counts(
                self.campaign.base.nodes, self.campaign.kept, _place(self.campaign.base)
            )
        if self.campaign.bare is not None and self.campaign.untimed:
            counts |= _rank_counts(
                self.campaign.bare.nodes, self.campaign.untimed, _place(self.campaign.bare)
            )
        return counts | {twin: counts[like] for twin, like in self.twins.items()}

    def _bare_counts(self, part: Slice) -> dict[int, int]:
        """Rows in the bare graph, where a slice may have several steps for its one."""
        bare = self.campaign.bare
        if bare is None or not set(part.real_ranks) <= set(bare.header.ranks):
            return {}
        with reading(bare.paths):
            lone = bare.nodes.select(pl.col("step").max().fill_null(0) == 0).collect().item()
        return _rank_counts(bare.nodes, part.real_ranks, _place(bare)) if lone else {}

    # Reading ----------------------------------------------------------------------------

    def executions(self) -> Iterator[tuple[Slice, list[Execution]]]:
        """All executions of every slice, in order; files ahead are read meanwhile."""
        jobs = self.options.jobs or _cores()
        with ThreadPoolExecutor(jobs) as pool:
            waiting: list[tuple[Slice, list[Future[Execution]]]] = []
            try:
                for part in self.campaign.slices:
                    futures = [
                        pool.submit(
                            measure,
                            path,
                            replace_header(header, self.campaign.header),
                            self.clocks,
                            self.options.warmup,
                        )
                        for path, header in zip(part.files, part.headers, strict=True)
                    ]
                    waiting.append((part, futures))
                    if len(waiting) > jobs:
                        yield _done(*waiting.pop(0))
                while waiting:
                    yield _done(*waiting.pop(0))
            finally:
                for _, futures in waiting:
                    for future in futures:
                        future.cancel()

    def add(self, part: Slice, executions: list[Execution]) -> None:
        """Reduce the executions of a slice, check their structure, put them in place."""
        header = self.campaign.header
        first = executions[0]
        for path, other in zip(part.files[1:], executions[1:], strict=True):
            names = (part.files[0].name, path.name)
            require_same_structure(first.rows, other.rows, names, header, str(path))
        bare = self._bare_rows(part.real_ranks)
        if bare is not None and _one_step_of(bare, first.rows):
            self._add_steps(part, executions, bare)
            return
        if bare is not None:
            names = ("the bare graph", part.files[0].name)
            where = str(part.files[0])
            self.resized += require_same_structure(bare, first.rows, names, header, where)
        samples = [execution.values for execution in executions]
        if self.options.pool_steps:
            values = pool_steps(first.rows, samples, self.options.reduce, self.options.warmup)
        else:
            values = combine(samples, self.options.reduce)
        values = self._place(first.rows, first.members, values)
        self.seen += [execution.report for execution in executions]
        self._note(Piece(part.files[0], scan_nodes(part.files[0]), part.real_ranks))
        self._add_twins(part, first.rows, values)

    def _add_steps(self, part: Slice, executions: list[Execution], bare: Rows) -> None:
        """Several steps of a slice are samples of the one step that the bare graph has."""
        options, header = self.options, self.campaign.header
        names, where = ("the bare graph", part.files[0].name), str(part.files[0])
        samples = []
        for execution in executions:
            views = step_views(execution.rows)
            for chosen, view in views[options.warmup :] or views[-1:]:
                like_bare = replace(view, seq=bare.seq) if len(view) == len(bare) else view
                self.resized += require_same_structure(bare, like_bare, names, header, where)
                samples.append(replace(part_of(execution.values, chosen), release=None))
        values = combine(samples, options.reduce)
        # What comes from the step before is no gap within the step.
        if values.gap is not None:
            roots = np.diff(bare.offsets) == 0
            values = replace(values, gap=np.where(roots, 0, values.gap))
        values = self._place(bare, members_of(bare, header), values)
        self.seen += [execution.report for execution in executions]
        graph = self.campaign.bare
        if graph is None:
            raise AssertionError("steps are folded only onto a bare graph")
        self._note(Piece(_single(graph), graph.nodes, part.real_ranks, observed=False))
        self._add_twins(part, bare, values)

    def _add_twins(self, part: Slice, rows: Rows, values: Values) -> None:
        here = set(part.real_ranks)
        for twin, like in self.twins.items():
            if like in here:
                self._add_twin(twin, like, rows, values, part.files[0])

    def _add_twin(self, twin: int, like: int, rows: Rows, values: Values, path: Path) -> None:
        """Give a rank the durations of another."""
        header, bare = self.campaign.header, self.campaign.bare
        first, last = next((a, b) for rank, a, b in rows.rank_runs if rank == like)
        own = part_of(values, slice(first, last))
        if bare is not None and twin in set(bare.header.ranks):
            mine = read_rows(bare.nodes, header, "the bare graph", ranks=[twin])
            self._note(Piece(_single(bare), bare.nodes, (twin,), observed=False))
        else:
            symmetry = header.symmetry or {}
            mine = renamed(rows.cut(first, last), twin, header, symmetry)
            nodes = scan_nodes(path).filter(pl.col("rank") == like)
            rename = partial(_rename, rows=mine, header=header)
            self._note(Piece(path, nodes, (twin,), rename=rename, observed=False))
        self._place(mine, members_of(mine, header), own)

    def add_kept(self) -> None:
        """Ranks of the base: durations as they were merged then."""
        base = self.campaign.base
        if base is None or not self.campaign.kept:
            return
        header, where = base.header, _place(base)
        with reading(base.paths):
            origin = base.nodes.select(pl.col("start_ns").min()).collect().item()
        for ranks in _some_at_once(self.campaign.kept):
            rows = read_rows(base.nodes, header, where, ranks=ranks)
            members = members_of(rows, header)
            duration = rows.dur.copy()
            known = rows.member & (rows.transfer >= 0)
            duration[known] = rows.transfer[known]
            roots = np.diff(rows.offsets) == 0
            source = np.full(len(rows), ABSENT, np.uint8)
            source[members.row] = np.where(
                rows.source[members.row] == ABSENT, np.uint8(_NONE), rows.source[members.row]
            )
            values = Values(
                duration=duration,
                source=source,
                release=np.where(roots, rows.start - origin, 0),
            )
            self._place(rows, members, values)
        self._note(Piece(_single(base), base.nodes, self.campaign.kept, own=True))

    def add_untimed(self) -> None:
        """Ranks of the bare graph, which take no time."""
        bare = self.campaign.bare
        if bare is None or not self.campaign.untimed:
            return
        for ranks in _some_at_once(self.campaign.untimed):
            rows = read_rows(bare.nodes, bare.header, _place(bare), ranks=ranks)
            members = members_of(rows, bare.header)
            source = np.full(len(rows), ABSENT, np.uint8)
            source[members.row] = _NONE
            nothing = np.zeros(len(rows), np.int64)
            self.assembly.place(rows, members, Values(duration=nothing, source=source))
            self.unmatched += _unmatched(rows)
        piece = Piece(_single(bare), bare.nodes, self.campaign.untimed, observed=False)
        self._note(piece)

    def _place(self, rows: Rows, members: Members, values: Values) -> Values:
        """Put whole ranks in place, with the best known times of transfers; returns these."""
        if self.costs is not None:
            values = self.costs.fill(rows, values)
            self.costs.defer(rows, values, self.assembly.base)
        self.assembly.place(rows, members, values)
        self.unmatched += _unmatched(rows)
        return values

    def finish_costs(self) -> None:
        """Times from the model, which rests on all slices, for transfers that need them.

        What an earlier result says about how far its estimates may be off stays said.
        """
        if self.costs is not None:
            self.cost_report = self.costs.finish(self.assembly)
        if self.campaign.base is not None and self.campaign.kept:
            self.cost_report = with_kept_doubts(
                self.cost_report, self.campaign.base.header, self.assembly
            )

    def _bare_rows(self, ranks: Sequence[int]) -> Rows | None:
        """What the bare graph, or the base, says about some ranks."""
        graph = self.campaign.bare or self.campaign.base
        if graph is None or not set(ranks) <= set(graph.header.ranks):
            return None
        return read_rows(graph.nodes, self.campaign.header, _place(graph), ranks=ranks)

    def _note(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self._piece_of.update(dict.fromkeys(piece.ranks, piece))

    # Results ----------------------------------------------------------------------------

    def label(self, row: int) -> str:
        """Names a row in error texts."""
        rank = self.assembly.rank_of(row)
        index = row - self.assembly.base[rank]
        piece = self._piece_of[rank]
        table = piece.read([rank]).filter((pl.col("rank") == rank) & (pl.col("index") == index))
        names = group_labels(self.campaign.header.groups)
        source = f" ({piece.path.name})" if piece.path else ""
        return node_text(table.row(0, named=True), names) + source

    def result(
        self,
        graph: Graph,
        timing: Timing,
        critical: NDArray[np.bool_],
        late: NDArray[np.int64] | None = None,
    ) -> Calibrated:
        """The table of the job."""
        return Calibrated(
            header=self.campaign.header,
            pieces=tuple(self.pieces),
            assembly=self.assembly,
            graph=graph,
            timing=timing,
            slack=np.zeros(0, np.int64) if late is None else late,
            critical=critical,
            synced=waiting_rows(graph),
            chained=any(report.chained for report in self.seen),
        )


def _comm_costs(header: TraceHeader, options: SliceOptions) -> CommCosts | None:
    table = options.comm_table
    if options.ranks_per_host is None:
        if table is not None:
            raise MergeInputError(
                "a table of communication times says nothing without knowing which ranks share "
                "a host",
                hint="give --ranks-per-host as well, e.g. 8",
            )
        return None
    if table is not None and not isinstance(table, CommTable):
        table = CommTable.open(table)
    return CommCosts(header, options.ranks_per_host, table)


def replace_header(own: TraceHeader, job: TraceHeader) -> TraceHeader:
    """A slice's header with the job's groups object, so that positions agree."""
    return own if own.groups is job.groups else own.model_copy(update={"groups": job.groups})


def _done(part: Slice, futures: list[Future[Execution]]) -> tuple[Slice, list[Execution]]:
    return part, [future.result() for future in futures]


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rank_counts(nodes: pl.LazyFrame, ranks: Sequence[int], where: str) -> dict[int, int]:
    with reading([Path(where)]):
        column = nodes.select("rank").collect()["rank"].to_numpy()
    counts: Counter[int] = Counter()
    for first, last in runs(column):
        counts[int(column[first])] += last - first
    absent = set(ranks) - set(counts)
    if absent:
        raise MergeInputError(
            f"there are no rows of ranks {ranks_text(absent)}",
            where=where,
            hint="the file was cut short; record this slice again",
        )
    return {rank: counts[rank] for rank in ranks}


def _one_step_of(bare: Rows, rows: Rows) -> bool:
    """Whether the bare graph has one step and the slice several."""
    return (
        bare.step.max() <= 0
        and bare.step.min() == bare.step.max()
        and len(np.unique(rows.step[rows.step >= 0])) > 1
    )


def _some_at_once(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    for at in range(0, len(ranks), _RANKS_AT_ONCE):
        yield ranks[at : at + _RANKS_AT_ONCE]


def _unmatched(rows: Rows) -> int:
    return int(((rows.group >= 0) & (rows.seq < 0)).sum())


def _rename(table: pl.DataFrame, *, rows: Rows, header: TraceHeader) -> pl.DataFrame:
    """The node table of a rank with rank, group and peer of another, given as `rows`."""
    ids = np.array([group.id for group in header.groups] + [-1])
    group, peer = pl.Series(ids[rows.group]), pl.Series(rows.peer)
    rank = int(rows.rank[0])
    changed = {
        "rank": pl.lit(rank, pl.Int32),
        "id": (pl.lit(rank, pl.Int64) * (1 << INDEX_BITS)) + pl.col("index").cast(pl.Int64),
        "group": pl.when(group >= 0).then(group).cast(pl.Int32),
        "peer": pl.when(peer >= 0).then(peer).cast(pl.Int32),
    }
    ordered = table.sort("index", maintain_order=True)
    return ordered.with_columns(
        **{name: value for name, value in changed.items() if name in table.columns}
    )


def _single(trace: Trace) -> Path | None:
    return trace.paths[0] if len(trace.paths) == 1 else None


def _place(trace: Trace) -> str:
    return ", ".join(str(path) for path in trace.paths) or f"the {trace.header.kind} trace"
