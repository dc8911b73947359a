"""From a trace to the arrays that propagation reads.

Row i of the graph is row i of the node table in (rank, index) order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from prismcalib.blocks import is_large
from prismcalib.errors import CoverageError, MergeInputError, MissingMemberError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.lists import lists_like, lists_of
from prismcalib.memory import require_memory
from prismcalib.rows import absent_text, groups_lacking, in_order, ranks_text
from prismcalib.waiting import WaitRules, apply_wait_rules, waiting_rows
from prismtrace.group_names import group_labels
from prismtrace.ranks import format_ranks
from prismtrace.schema import P2P_KINDS, TraceHeader, TraceKind
from prismtrace.trace import Trace, instance_columns, node_ids

__all__ = [
    "graph_from_trace",
    "lag_column",
    "node_text",
    "require_all_members",
    "require_all_ranks",
    "require_own_columns",
    "require_rows_of_ranks",
    "require_table_memory",
    "require_timeline",
    "row_labels",
    "sorted_rows",
    "structure_graph",
]

# Columns of our own that are computed with, where a trace has them.
_OWN_COLUMNS = ("x_busy_ns", "x_observed_start_ns", "x_observed_dur_ns", "x_spread_ns")

# A row of a table in memory, and of a graph made from it.
_TABLE_BYTES = 350

_CHECK_HINT = "run `prismtrace validate` on the trace: it lists every rule that is broken"


def graph_from_trace(trace: Trace, *, rules: WaitRules | None = None) -> tuple[Graph, pl.DataFrame]:
    """The graph of a `trace` and its rows in the graph's order.

    A sync member lasts its `transfer_ns`, or its whole `dur_ns` where no transfer is known;
    unknown durations are 0.  Lags are those of the trace; rows that depend on nothing are
    released at their `start_ns`.  Without `rules`, those hold that the trace was merged with.

    Raises:
        MergeInputError: ids, deps or groups of the trace contradict each other, or a
            calibrated trace has rows without times.
        CoverageError: a calibrated trace lacks the rows of ranks that its header lists.
        CalibError: durations or lags are negative.
        TooLargeError: the rows would not fit into memory.
    """
    require_table_memory(trace)
    rows = sorted_rows(trace)
    if trace.header.kind == TraceKind.CALIBRATED:
        require_timeline(rows, trace)
    graph = structure_graph(rows, trace.header)
    graph = apply_wait_rules(
        graph, rows, trace.header, WaitRules.of(trace.header) if rules is None else rules
    )
    synced = pl.Series(waiting_rows(graph))
    duration = rows.select(
        pl.when(synced).then(pl.col("transfer_ns")).fill_null(pl.col("dur_ns")).fill_null(0)
    ).to_series()
    start = rows["start_ns"].fill_null(strategy="zero").to_numpy()
    free = np.diff(graph.dep_offsets) == 0
    first = int(start.min()) if len(start) else 0
    return (
        replace(
            graph,
            duration_ns=duration.to_numpy(),
            dep_lag_ns=_flat_lags(rows, graph),
            release_ns=np.where(free, start, first),
        ),
        rows,
    )


def require_table_memory(trace: Trace, row_bytes: int = _TABLE_BYTES) -> None:
    """Refuse to hold all rows of a trace, and what is made of them, where that would not fit.

    Small traces are not looked at.

    Raises:
        TooLargeError: it would not.
    """
    if is_large(trace):
        rows = int(trace.nodes.select(pl.len()).collect().item())
        require_memory(row_bytes * rows, f"a table of {rows:,} operations and what is made of it")


def sorted_rows(trace: Trace) -> pl.DataFrame:
    """The node table in memory, in (rank, index) order whatever the order of its files.

    Raises:
        MergeInputError: there are no rows, or ids are not `rank << 32 | index` with indices
            that count up by one within each rank, or a column that the toolkit adds is no number.
    """
    require_own_columns(trace)
    rows = trace.collect()
    if not in_order(rows["rank"].to_numpy(), rows["index"].to_numpy()):
        rows = rows.sort("rank", "index", maintain_order=True)
    if not rows.height:
        raise MergeInputError(
            "the trace has no rows",
            where=_paths(trace),
            hint="nothing was recorded, or every event was filtered out when it was converted",
        )
    same_rank = pl.col("rank") == pl.col("rank").shift()
    gap = same_rank & (pl.col("index") != pl.col("index").shift() + 1)
    wrong = pl.col("id") != node_ids(pl.col("rank"), pl.col("index"))
    broken = rows.select("rank", "index", broken=(gap | wrong).fill_null(value=False))
    if broken["broken"].any():
        rank, index, _ = broken.row(int(broken["broken"].arg_max() or 0))
        raise MergeInputError(
            "node ids do not number the rows of each rank one by one",
            where=f"rank={rank} index={index}",
            hint=_CHECK_HINT,
        )
    return rows


def require_own_columns(trace: Trace) -> None:
    """Refuse texts and the like in the columns that the toolkit adds to those of the format.

    Raises:
        MergeInputError: names the column.
    """
    schema = trace.nodes.collect_schema()
    for name in _OWN_COLUMNS:
        if name in schema and not (schema[name].is_integer() or schema[name] == pl.Null):
            raise MergeInputError(
                f"the column {name} holds {schema[name]} instead of integers",
                where=_paths(trace) or "trace",
                hint="the toolkit writes it itself: make the file again, or rename the column",
            )


def structure_graph(rows: pl.DataFrame, header: TraceHeader) -> Graph:
    """Dependencies and sync instances of sorted rows; all durations are 0, no lags.

    Communications without seq (partners outside the recorded window) belong to no instance.
    Instances are numbered by (group, seq, sender, receiver) and expect all ranks of their
    group that are not folded into others, two for send and recv.
    """
    offsets, dep_rows = _dependencies(rows)
    instance, keys = _instances(rows)
    # Folded replicas have no rows: the rank that stands for them waits in their place.
    here = set(header.ranks)
    place = {rank: like for rank, like in (header.symmetry or {}).items() if rank not in here}
    sizes = {
        group.id: len({place.get(rank, rank) for rank in group.ranks}) for group in header.groups
    }
    unknown = keys.filter(~pl.col("group").is_in(list(sizes)))
    if unknown.height:
        group = unknown["group"][0]
        rank, index = rows.filter(pl.col("group") == group).select("rank", "index").row(0)
        raise MergeInputError(
            f"a communication names a group of id {group}, which the header does not list",
            where=f"rank={rank} index={index}",
            hint=_CHECK_HINT,
        )
    expected = keys.select(
        pl.when(pl.col("src_rank") >= 0)
        .then(2)
        .otherwise(pl.col("group").replace_strict(sizes, return_dtype=pl.Int32))
    )
    return Graph(
        duration_ns=np.zeros(rows.height, np.int64),
        dep_offsets=offsets,
        dep_rows=dep_rows,
        instance=instance,
        instance_size=expected.to_series().cast(pl.Int32).to_numpy(),
        labels=row_labels(rows, header),
    )


def row_labels(rows: pl.DataFrame, header: TraceHeader) -> Callable[[int], str]:
    """Names rows in error texts: `rank 3 index 12 all_reduce "name" group=tp_0 seq=5`."""
    names = group_labels(header.groups)
    return lambda row: node_text(rows.row(row, named=True), names)


def node_text(node: dict[str, Any], groups: dict[int, str]) -> str:
    """A node in error texts, from its columns and the labels of all groups by id."""
    text = f"rank {node['rank']} index {node['index']} {node['kind']}"
    if node["name"]:
        text += f' "{node["name"][:60]}"'
    if node["group"] is not None:
        text += f" group={groups.get(node['group'], node['group'])}"
    if node["seq"] is not None:
        text += f" seq={node['seq']}"
    if node["kind"] in P2P_KINDS and node.get("bytes") is not None:
        text += f" bytes={node['bytes']}"
    return text


def require_all_ranks(rows: pl.DataFrame, header: TraceHeader) -> None:
    """Refuse a trace that lacks ranks of its job.

    Raises:
        CoverageError: names the absent ranks and the groups they belong to.
    """
    present = sorted(rows["rank"].unique())
    if len(present) == header.world_size:
        return
    groups = groups_lacking(set(present), header)
    absent = absent_text(present, header.world_size)
    raise CoverageError(
        f"{len(present)} of {header.world_size} ranks present: "
        f"{'rank' if absent.isdecimal() else 'ranks'} {absent} missing"
        + (f" (groups {groups})" if groups else ""),
        where=f"ranks={format_ranks(present)}",
        hint="convert the files of all ranks of the job into one trace; what `slice-out --ranks` "
        "cut apart `prismtrace concat` joins again",
    )


def require_timeline(rows: pl.DataFrame, trace: Trace) -> None:
    """Refuse a calibrated trace that was edited or cut: rows without times, ranks without rows.

    Raises:
        MergeInputError: names the first row without times, or with times that cannot be.
        CoverageError: names the ranks.
    """
    start, dur = rows["start_ns"], rows["dur_ns"]
    problems = {
        "has no start or duration": start.is_null() | dur.is_null(),
        "has a negative duration": dur < 0,
        "ends outside of 64 bits": dur > 2**63 - 1 - start.clip(lower_bound=0),
    }
    for problem, broken in problems.items():
        if not broken.any():
            continue
        rank, index = rows.select("rank", "index").row(int(broken.arg_max() or 0))
        raise MergeInputError(
            f"a row of a calibrated trace {problem}",
            where=f"{_paths(trace) or 'trace'} rank={rank} index={index}",
            hint="merge the recorded run or the slices again",
        )
    require_rows_of_ranks(set(rows["rank"].unique()), trace)


def require_rows_of_ranks(present: set[int], trace: Trace) -> None:
    """Refuse a calibrated trace that lacks the rows of a rank in its header.

    Raises:
        CoverageError: names the ranks.
    """
    absent = sorted(set(trace.header.ranks) - present)
    if absent:
        raise CoverageError(
            f"the trace has no rows of ranks {ranks_text(absent)}, which its header lists",
            where=_paths(trace) or "trace",
            hint="rows were taken out after the merge, or some files were left out: pass the whole "
            "result of `prismcalib merge`",
        )


def require_all_members(graph: Graph, rows: pl.DataFrame, header: TraceHeader) -> None:
    """Refuse sync instances that lack a member or have one rank twice.

    Raises:
        MissingMemberError: names operation, group, seq and the absent ranks.
        MergeInputError: a rank takes part twice.
    """
    members = np.flatnonzero(graph.instance >= 0)
    rank = rows["rank"].to_numpy()[members].astype(np.int64)
    parts = np.sort(graph.instance[members] * np.int64(header.world_size) + rank)
    twice = np.flatnonzero(parts[1:] == parts[:-1])
    if len(twice):
        instance, rank_twice = divmod(int(parts[twice[0]]), header.world_size)
        row = int(np.flatnonzero(graph.instance == instance)[0])
        raise MergeInputError(
            f"rank {rank_twice} takes part twice in one operation: {graph.label(row)}",
            hint=_CHECK_HINT,
        )
    short = np.flatnonzero(graph.members_present < graph.instance_size)
    if not len(short):
        return
    found = np.flatnonzero(graph.instance == short[0])
    node = rows.row(int(found[0]), named=True)
    group = next(group for group in header.groups if group.id == node["group"])
    called = group_labels(header.groups)[group.id]
    pair = node["kind"] in ("send", "recv")
    wanted = {node["rank"], node["peer"]} if pair else set(group.ranks)
    absent = sorted(wanted - set(rows["rank"].gather(found)))
    more = f"; {len(short) - 1} more operations lack members" if len(short) > 1 else ""
    raise MissingMemberError(
        f"{node['kind']} seen on {len(found)} of {graph.instance_size[short[0]]} ranks{more}",
        where=f"group={called} seq={node['seq']} missing ranks={format_ranks(absent)}",
        hint="these ranks were recorded over a shorter window: "
        "record all ranks over the same steps",
        instance=int(short[0]),
        rows=tuple(int(row) for row in found),
    )


def lag_column(graph: Graph, lags: Int64Array, deps: pl.Series) -> pl.Series:
    """Lags of all dependencies, int64[e], as the column `lag_ns`: null where all are 0.

    `deps` is that column of the rows.
    """
    counts = np.diff(graph.dep_offsets)
    lagged = np.zeros(graph.rows, np.bool_)
    lagged[np.repeat(np.arange(graph.rows), counts)[lags != 0]] = True
    same = np.array_equal(deps.list.len().to_numpy(), counts)
    lists = lists_like(deps, lags) if same else lists_of(counts, lags)
    return lists.zip_with(
        pl.Series(lagged), pl.Series([None], dtype=lists.dtype).new_from_index(0, len(lists))
    )


def _dependencies(rows: pl.DataFrame) -> tuple[Int64Array, Int32Array]:
    """Offsets and row numbers of `deps`, then `xdeps`, of every row."""
    row = np.arange(rows.height)
    near = _lengths(rows["deps"])
    distance = _values(rows["deps"])
    dep_rows = np.repeat(row, near) - distance
    owner = np.repeat(row, near)
    rank = rows["rank"].to_numpy()
    outside = (dep_rows < 0) | (distance < 1)
    if not outside.any():
        outside = rank[dep_rows] != rank[owner]
    if outside.any():
        raise _missing_dependency(rows, int(owner[outside.argmax()]))
    far = _lengths(rows["xdeps"])
    if far.any():
        ids = rows["id"].to_numpy()
        wanted = _values(rows["xdeps"])
        position = np.minimum(np.searchsorted(ids, wanted), rows.height - 1)
        far_owner = np.repeat(row, far)
        outside = ids[position] != wanted
        if outside.any():
            raise _missing_dependency(rows, int(far_owner[outside.argmax()]))
        # Stable: within a row the order stays deps, then xdeps, as lag_ns has it.
        order = np.argsort(np.concatenate([owner, far_owner]), kind="stable")
        dep_rows = np.concatenate([dep_rows, position])[order]
    offsets = np.concatenate([[0], np.cumsum(near + far)])
    return offsets, dep_rows.astype(np.int32)


def _instances(rows: pl.DataFrame) -> tuple[Int32Array, pl.DataFrame]:
    """Instance number of every row (-1: none), and the key of every instance."""
    names = ["group", "seq", "src_rank", "dst_rank"]
    members = (
        rows.with_row_index("row")
        .filter(pl.col("seq").is_not_null() & pl.col("group").is_not_null())
        .select("row", *instance_columns())
    )
    keys = members.select(names).unique().sort(names).with_row_index("instance")
    numbered = members.join(keys, on=names, how="left", nulls_equal=True)
    instance = np.full(rows.height, -1, np.int32)
    instance[numbered["row"].to_numpy()] = numbered["instance"].to_numpy()
    return instance, keys


def _flat_lags(rows: pl.DataFrame, graph: Graph) -> Int64Array | None:
    """Lags of all dependencies, or None if no row has any."""
    given = rows["lag_ns"].is_not_null().to_numpy()
    if not given.any():
        return None
    counts = np.diff(graph.dep_offsets)
    if (_lengths(rows["lag_ns"]) != counts)[given].any():
        raise MergeInputError("lag_ns and deps differ in length", hint=_CHECK_HINT)
    lags = np.zeros(len(graph.dep_rows), np.int64)
    lags[np.repeat(given, counts)] = _values(rows["lag_ns"])
    return lags


def _lengths(lists: pl.Series) -> Int64Array:
    return lists.list.len().fill_null(0).cast(pl.Int64).to_numpy()


def _values(lists: pl.Series) -> Int64Array:
    flat = lists.explode(empty_as_null=False, keep_nulls=False)
    return flat.cast(pl.Int64).to_numpy()


def _missing_dependency(rows: pl.DataFrame, row: int) -> MergeInputError:
    rank, index = rows.select("rank", "index").row(row)
    return MergeInputError(
        "a node depends on a node that is not in the trace",
        where=f"rank={rank} index={index}",
        hint=_CHECK_HINT,
    )


def _paths(trace: Trace) -> str | None:
    return ", ".join(str(path) for path in trace.paths) or None
