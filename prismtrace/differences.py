"""Two traces side by side: is it the same graph, and where do the times differ?

The graph is compared row by row in the order of each rank's program, times per class of
operations. Both stream: blocks of ranks are in memory, never a whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from prismtrace.blocks import BLOCK_ROWS
from prismtrace.group_names import group_labels
from prismtrace.reading import reading
from prismtrace.schema import Kind, TraceHeader
from prismtrace.trace import Trace

__all__ = ["STRUCTURE", "ClassDifference", "Difference", "RankDifference", "diff"]

STRUCTURE = ("kind", "group", "seq", "peer", "bytes", "dtype", "deps", "xdeps")
"""Columns that two runs of one program have in common; the others tell where, when and how long."""

_OPTIONAL = ("bytes", "dtype")


@dataclass(frozen=True)
class RankDifference:
    """A rank whose graph differs: where first, and what either trace has there (null: nothing)."""

    rank: int
    """Its number."""
    nodes_a: int
    """Rows of the rank in the first trace, `a`."""
    nodes_b: int
    """Rows of the rank in the second one, `b`."""
    index: int
    """Of the first row that differs."""
    a: str | None
    """That row of the first trace, in words."""
    b: str | None
    """That of the second one."""


@dataclass(frozen=True)
class ClassDifference:
    """Operations of one kind, phase, group or rank in both traces; null times: none recorded.

    Times add up all ranks and streams.

    Attributes:
        name: of the kind, phase or group; of a rank its number.
        nodes_a, nodes_b: how many either trace has.
        time_a_ns, time_b_ns: how long they take in either.
    """

    name: str
    nodes_a: int
    nodes_b: int
    time_a_ns: int | None
    time_b_ns: int | None

    @property
    def change_ns(self) -> int | None:
        """Time of b minus that of a; null where one has no times."""
        if self.time_a_ns is None or self.time_b_ns is None:
            return None
        return self.time_b_ns - self.time_a_ns


@dataclass(frozen=True)
class GroupDifference:
    """A process group that two jobs of different size both have, with other ranks."""

    name: str
    """What both call it."""
    ranks_a: tuple[int, ...]
    """Its ranks in the first job."""
    ranks_b: tuple[int, ...]
    """Its ranks in the second one."""


@dataclass(frozen=True)
class Difference:
    """What `diff` found.

    Attributes:
        world_a, world_b: ranks of either job.
        axes_a, axes_b: sizes of its parallel axes, where known.
        ranks_a, ranks_b: ranks that only one of the traces has.
        groups_a, groups_b: labels of process groups whose ranks only one of the traces has.
        regrouped: groups of both that have other ranks, of jobs of different size; these count as
            the same group where rows are compared.
        ranks: ranks of both whose graphs differ, ascending.
        resized: all_to_all that differ in size; they may, tokens go where they are sent.
        kinds, phases, groups: nodes and times by class, of ranks that both have; those that changed
            most first.
        by_rank: of every rank.
    """

    world_a: int
    world_b: int
    axes_a: dict[str, int]
    axes_b: dict[str, int]
    ranks_a: tuple[int, ...]
    ranks_b: tuple[int, ...]
    groups_a: tuple[str, ...]
    groups_b: tuple[str, ...]
    regrouped: tuple[GroupDifference, ...]
    ranks: tuple[RankDifference, ...]
    resized: int
    kinds: tuple[ClassDifference, ...]
    phases: tuple[ClassDifference, ...]
    groups: tuple[ClassDifference, ...]
    by_rank: tuple[ClassDifference, ...]

    @property
    def same(self) -> bool:
        """Whether both are the same graph, whatever their times."""
        apart = (self.ranks_a, self.ranks_b, self.groups_a, self.groups_b, self.ranks)
        return self.world_a == self.world_b and not any(apart)


def diff(a: Trace, b: Trace, *, progress: Callable[[int], None] | None = None) -> Difference:
    """Compare the graphs and times of two traces; either may lack times.

    Process groups are the same if their ranks are, in order; names and numbers do not matter. In
    jobs of different size those of the same name and description are taken for the same, too. A
    size or data type that one of the traces does not know is no difference.

    Args:
        a, b: the traces.
        progress: called with the number of rows of both compared since the last call.
    """
    groups = _Groups(a.header, b.header)
    common = sorted(set(a.header.ranks) & set(b.header.ranks))
    only = [
        tuple(sorted(set(one.header.ranks) - set(other.header.ranks)))
        for one, other in ((a, b), (b, a))
    ]
    found: list[RankDifference] = []
    resized = 0
    with reading([*a.paths, *b.paths]):
        for ranks in _blocks(a, b, common):
            sides = [groups.unified(_rows(trace, ranks), side) for side, trace in enumerate((a, b))]
            differing, count = _compare(sides[0], sides[1], groups)
            found += differing
            resized += count
            (progress or (lambda _: None))(sides[0].height + sides[1].height)
        totals = _totals(a, b, groups)
    # Times of ranks that only one has are no change.
    shared = [one.filter(pl.col("rank").is_in(list(map(str, common)))) for one in totals]
    return Difference(
        world_a=a.header.world_size,
        world_b=b.header.world_size,
        axes_a=a.header.axes,
        axes_b=b.header.axes,
        ranks_a=only[0],
        ranks_b=only[1],
        groups_a=groups.only(0),
        groups_b=groups.only(1),
        regrouped=tuple(groups.regrouped),
        ranks=tuple(found),
        resized=resized,
        kinds=_by_class(shared, "kind"),
        phases=_by_class(shared, "phase"),
        groups=_by_class(shared, "group_name"),
        by_rank=_by_class(totals, "rank"),
    )


# --- process groups -----------------------------------------------------------------------


class _Groups:
    """One numbering of the groups of two traces: the same ranks are the same group.

    Several groups of the same ranks are told apart by name, else by their order.
    """

    def __init__(self, a: TraceHeader, b: TraceHeader) -> None:
        self.names: list[str] = []
        self.numbers: tuple[dict[int, int], dict[int, int]] = ({}, {})
        free: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        labels = [group_labels(header.groups) for header in (a, b)]
        for group in a.groups:
            number = self._new(labels[0][group.id])
            self.numbers[0][group.id] = number
            free.setdefault(group.ranks, []).append((group.name, number))
        named = {group.name for group in b.groups}
        for group in sorted(b.groups, key=lambda g: (g.ranks, g.name) not in self._keys(a)):
            left = free.get(group.ranks, [])
            same = [one for one in left if one[0] == group.name]
            other = [one for one in left if one[0] not in named] or left
            if chosen := (same or other)[:1]:
                left.remove(chosen[0])
                self.numbers[1][group.id] = chosen[0][1]
            else:
                self.numbers[1][group.id] = self._new(labels[1][group.id])
        self.regrouped: list[GroupDifference] = []
        if a.world_size != b.world_size:
            self._pair_by_name(a, b)

    def _pair_by_name(self, a: TraceHeader, b: TraceHeader) -> None:
        """Groups that only one has: the same if name and description are."""
        taken = [set(numbers.values()) for numbers in self.numbers]
        left = {
            (group.name, group.desc): group
            for group in a.groups
            if self.numbers[0][group.id] not in taken[1]
        }
        for group in b.groups:
            number = self.numbers[1][group.id]
            if number in taken[0] or (group.name, group.desc) not in left:
                continue
            other = left.pop((group.name, group.desc))
            paired = self.numbers[0][other.id]
            called = self.names[paired]
            if called != self.names[number]:  # they tell the ranks
                says = group.desc not in ("", "undefined")
                called = f"{group.desc} ({group.name})" if says else group.name
            self.names[paired] = called
            self.numbers[1][group.id] = paired
            self.regrouped.append(GroupDifference(called, other.ranks, group.ranks))

    @staticmethod
    def _keys(header: TraceHeader) -> set[tuple[tuple[int, ...], str]]:
        return {(group.ranks, group.name) for group in header.groups}

    def _new(self, label: str) -> int:
        self.names.append(label)
        return len(self.names) - 1

    def only(self, side: int) -> tuple[str, ...]:
        """Labels of the groups that only one of the traces has."""
        others = set(self.numbers[1 - side].values())
        return tuple(self.names[n] for n in self.numbers[side].values() if n not in others)

    def unified(self, rows: pl.DataFrame, side: int) -> pl.DataFrame:
        """Rows with the common numbers of groups; one that no header knows is −1."""
        return rows.with_columns(self.number(side))

    def number(self, side: int) -> pl.Expr:
        """Column `group` with the common numbers."""
        known = pl.col("group").replace_strict(
            self.numbers[side], default=-1, return_dtype=pl.Int32
        )
        return pl.when(pl.col("group").is_not_null()).then(known).alias("group")


# --- the graph ----------------------------------------------------------------------------


def _blocks(a: Trace, b: Trace, ranks: list[int]) -> Iterator[tuple[int, ...]]:
    """The ranks in runs that have about `BLOCK_ROWS` rows together, or one rank."""
    counts: dict[int, int] = dict.fromkeys(ranks, 0)
    for trace in (a, b):
        lengths = trace.nodes.group_by("rank").len().collect(engine="streaming")
        for rank, length in lengths.iter_rows():
            if rank in counts:
                counts[rank] += length
    block: list[int] = []
    rows = 0
    for rank, length in counts.items():
        if block and rows + length > BLOCK_ROWS:
            yield tuple(block)
            block, rows = [], 0
        block.append(rank)
        rows += length
    if block:
        yield tuple(block)


def _rows(trace: Trace, ranks: tuple[int, ...]) -> pl.DataFrame:
    # A range as well, on which Parquet statistics prune.
    within = pl.col("rank").is_between(ranks[0], ranks[-1]) & pl.col("rank").is_in(list(ranks))
    columns = ("rank", "index", "name", *STRUCTURE)
    # By position: numbers of virtual ranks' rows in slices have gaps, and so may foreign ones.
    at = pl.int_range(pl.len(), dtype=pl.Int64).over("rank")
    # What a node waits for is a set: files list it in one order or another.
    sets = pl.col("deps", "xdeps").list.sort()
    return trace.nodes.filter(within).select(columns).collect().with_columns(sets, at=at)


def _compare(a: pl.DataFrame, b: pl.DataFrame, groups: _Groups) -> tuple[list[RankDifference], int]:
    """Ranks that differ, and how many all_to_all do in size."""
    both = a.join(b, on=["rank", "at"], how="full", suffix="_b", coalesce=True)
    moved = (pl.col("kind") == Kind.ALL_TO_ALL.value) & pl.col("bytes").ne_missing(
        pl.col("bytes_b")
    )
    differs = pl.any_horizontal(
        pl.col("kind").is_null(), pl.col("kind_b").is_null(), *(map(_unequal, STRUCTURE))
    )
    shared = pl.col("kind").is_not_null() & pl.col("kind_b").is_not_null()
    resized = int(both.select((moved & shared).sum()).item())
    first = both.filter(differs).sort("rank", "at").group_by("rank", maintain_order=True).first()
    lengths = [dict(side.group_by("rank").len().iter_rows()) for side in (a, b)]
    return [
        RankDifference(
            rank=row["rank"],
            nodes_a=lengths[0].get(row["rank"], 0),
            nodes_b=lengths[1].get(row["rank"], 0),
            index=row["index"] if row["index"] is not None else row["index_b"],
            a=_label(row, "", groups),
            b=_label(row, "_b", groups),
        )
        for row in first.iter_rows(named=True)
    ], resized


def _unequal(name: str) -> pl.Expr:
    """Whether a column of the one differs from that of the other."""
    one, other = pl.col(name), pl.col(f"{name}_b")
    if name == "xdeps":
        none = pl.lit([], dtype=pl.List(pl.Int64))
        return one.fill_null(none).ne_missing(other.fill_null(none))
    unequal = one.ne_missing(other)
    if name in _OPTIONAL:
        unequal &= one.is_not_null() & other.is_not_null()
    if name == "bytes":
        unequal &= pl.col("kind") != Kind.ALL_TO_ALL.value
    return unequal


def _label(row: dict[str, Any], suffix: str, groups: _Groups) -> str | None:
    """A row as a person reads it: `all_reduce group=tp_0 seq=5 bytes=64 deps=[1]`."""
    if row[f"kind{suffix}"] is None:
        return None
    words = [row[f"kind{suffix}"]]
    if row[f"name{suffix}"] is not None:
        words.append(repr(row[f"name{suffix}"]))
    for name in STRUCTURE[1:]:
        value = row[f"{name}{suffix}"]
        if value is None or value == []:
            continue
        if name == "group":
            value = groups.names[value] if value >= 0 else "unknown"
        words.append(f"{name}={value}")
    return " ".join(words)


# --- times --------------------------------------------------------------------------------


def _totals(a: Trace, b: Trace, groups: _Groups) -> list[pl.DataFrame]:
    """Per trace: kind, phase, group_name, rank, nodes, time (null without times)."""
    names = dict(enumerate(groups.names)) | {-1: "unknown"}
    frames = []
    for side, trace in enumerate((a, b)):
        # Plain sums stream; conditions and renumbering inside would hold all rows in memory.
        found = (
            trace.nodes.group_by("kind", "phase", "group", "rank")
            .agg(nodes=pl.len(), time=pl.col("dur_ns").sum(), timed=pl.col("dur_ns").count())
            .collect(engine="streaming")
        )
        frames.append(
            groups.unified(found, side).with_columns(
                pl.when(pl.col("timed") > 0).then("time").alias("time"),
                pl.col("kind", "phase", "rank").cast(pl.String),
                group_name=pl.col("group").replace_strict(
                    names, default=None, return_dtype=pl.String
                ),
            )
        )
    return frames


def _by_class(totals: list[pl.DataFrame], name: str) -> tuple[ClassDifference, ...]:
    """Nodes and times by one property, largest change first; rows without it are left out."""
    sums = []
    for found in totals:
        time = pl.when(pl.col("time").is_not_null().any()).then(pl.col("time").sum())
        sums.append(found.drop_nulls(name).group_by(name).agg(pl.col("nodes").sum(), time=time))
    both = sums[0].join(sums[1], on=name, how="full", suffix="_b", coalesce=True)
    classes = [
        ClassDifference(str(key), nodes or 0, nodes_b or 0, time, time_b)
        for key, nodes, time, nodes_b, time_b in both.iter_rows()
    ]
    return tuple(
        sorted(
            classes,
            key=lambda c: (-abs(c.change_ns or 0), -abs(c.nodes_b - c.nodes_a), _natural(c.name)),
        )
    )


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (-1, name)
