"""Is it the same graph?  Nodes and edges of a slice against the bare graph or a repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from prismcalib.errors import CoverageError, StructureError
from prismcalib.rows import KINDS, Rows, ranks_text, read_rows
from prismtrace.differences import STRUCTURE
from prismtrace.group_names import group_labels
from prismtrace.schema import P2P_KINDS, Kind, TraceHeader
from prismtrace.trace import Trace

__all__ = ["find_representatives", "renamed", "require_same_structure"]

_ALL_TO_ALL = KINDS.index(Kind.ALL_TO_ALL)
_P2P = np.array([kind in P2P_KINDS for kind in KINDS])
_NODE_COLUMNS = tuple(name for name in STRUCTURE if name not in ("deps", "xdeps"))


def require_same_structure(
    expected: Rows, found: Rows, names: tuple[str, str], header: TraceHeader, where: str
) -> int:
    """Compare the same ranks of two sources; `names` are what to call the sources.

    Returns how many all_to_all differ in size, which they may: tokens go where they are sent.

    Raises:
        StructureError: shows the first node that differs, side by side.
    """
    for (rank, first, last), (other, begin, end) in zip(
        expected.rank_runs, found.rank_runs, strict=True
    ):
        common = min(last - first, end - begin)
        one, two = expected.cut(first, last), found.cut(begin, end)
        row = _first_difference(one, two, common)
        if row is None and last - first == end - begin and rank == other:
            continue
        row = common if row is None else row
        sides = [
            f"{name}: {rows.label(row, header) if row < len(rows) else 'no such node'}"
            for name, rows in zip(names, (one, two), strict=True)
        ]
        counts = f"{last - first} and {end - begin} nodes"
        raise StructureError(
            f"rank {rank} is not the same in {names[0]} and {names[1]} ({counts}); "
            f"first difference: {sides[0]} | {sides[1]}",
            where=f"{where} rank={rank} index={row}",
            hint="the slice comes from another job or program version, or was cut short",
        )
    varying = expected.kind == _ALL_TO_ALL
    return int((varying & (expected.bytes != found.bytes)).sum())


def _first_difference(one: Rows, two: Rows, common: int) -> int | None:
    """First of the `common` rows in which two ranks differ."""
    differs = np.zeros(common, np.bool_)
    for name in _NODE_COLUMNS:
        unequal = getattr(one, name)[:common] != getattr(two, name)[:common]
        if name == "bytes":
            unequal &= one.kind[:common] != _ALL_TO_ALL
        differs |= unequal
    counts = [np.diff(rows.offsets)[:common] for rows in (one, two)]
    differs |= counts[0] != counts[1]
    clean = int(differs.argmax()) if differs.any() else common
    # Up to there both have the same number of edges, so their edges lie side by side.
    edges = int(one.offsets[clean])
    crossed = np.flatnonzero(one.distance[:edges] != two.distance[:edges])
    if len(crossed):
        return int(np.searchsorted(one.offsets, crossed[0], side="right")) - 1
    return clean if clean < common else None


def find_representatives(
    bare: Trace, absent: Sequence[int], measured: Sequence[int]
) -> dict[int, int]:
    """For every absent rank the lowest measured one that does exactly the same.

    The same kinds, sizes, dependencies and group sizes in the same order; only who the
    partners are may differ.

    Raises:
        CoverageError: no measured rank is like it.
    """
    known: dict[bytes, int] = {}
    for rank, digest in _digests(bare, measured):
        known.setdefault(digest, rank)
    found = {rank: known.get(digest) for rank, digest in _digests(bare, absent)}
    alone = [rank for rank in absent if found.get(rank) is None]
    if alone:
        raise CoverageError(
            f"ranks {ranks_text(alone)} were measured by no slice, and no measured rank does "
            "the same as they do",
            hint="run slices of these ranks, or take them without times: --missing bare",
        )
    return {rank: like for rank, like in found.items() if like is not None}


_RANKS_AT_ONCE = 64


def _digests(bare: Trace, ranks: Sequence[int]) -> list[tuple[int, bytes]]:
    sizes = np.array([len(group.ranks) for group in bare.header.groups] + [0], np.int64)
    where = ", ".join(str(path) for path in bare.paths) or "the bare graph"
    result = []
    ordered = sorted(set(ranks) & set(bare.header.ranks))
    for at in range(0, len(ordered), _RANKS_AT_ONCE):
        rows = read_rows(bare.nodes, bare.header, where, ranks=ordered[at : at + _RANKS_AT_ONCE])
        payload = np.where(rows.kind == _ALL_TO_ALL, -1, rows.bytes)
        for rank, first, last in rows.rank_runs:
            part = rows.cut(first, last)
            digest = hashlib.blake2b(digest_size=16)
            for column in (
                part.kind, part.dtype, payload[first:last], sizes[part.group],
                part.offsets, part.distance,
            ):  # fmt: skip
                digest.update(np.ascontiguousarray(column).tobytes())
            result.append((rank, digest.digest()))
    return result


def renamed(rows: Rows, rank: int, header: TraceHeader, twins: Mapping[int, int]) -> Rows:
    """The rows of one rank as those of another that does the same in its own groups.

    Groups that contain both ranks stay; the others are paired in the order of their ids.
    `twins` (rank -> representative) tells whom to send to inside a group that contains both:
    the first twin of one rank talks to the first twin of the other, and so on.

    Raises:
        CoverageError: the groups of the two do not correspond.
    """
    old = int(rows.rank[0])
    peers, groups = rows.peer.copy(), rows.group.copy()
    place = _alike(old, twins).index(rank) if twins.get(rank) == old else 0
    for source, target in matching_groups(old, rank, header).items():
        mine = rows.group == source
        groups[mine] = target
        addressed = np.flatnonzero(mine & (rows.peer >= 0))
        if source == target:
            addressed = addressed[_P2P[rows.kind[addressed]]]
            new = {
                peer: (_alike(peer, twins) or [peer])[place:][:1]
                for peer in set(rows.peer[addressed].tolist())
            }
            peers[addressed] = [(new[p] or [p])[0] for p in rows.peer[addressed].tolist()]
            continue
        order = {peer: at for at, peer in enumerate(header.groups[source].ranks)}
        theirs = header.groups[target].ranks
        peers[addressed] = [theirs[order[peer]] for peer in rows.peer[addressed].tolist()]
    return replace(rows, rank=np.full(len(rows), rank, np.int32), group=groups, peer=peers)


def _alike(rank: int, twins: Mapping[int, int]) -> list[int]:
    return sorted(twin for twin, like in twins.items() if like == rank)


def matching_groups(old: int, new: int, header: TraceHeader) -> dict[int, int]:
    """Position of every group of rank `old` -> position of the group that is its like for `new`."""
    mine = [at for at, group in enumerate(header.groups) if old in group.ranks]
    theirs = [at for at, group in enumerate(header.groups) if new in group.ranks]
    shared = set(mine) & set(theirs)
    result = {at: at for at in shared}
    left, right = ([at for at in side if at not in shared] for side in (mine, theirs))
    key = [
        [(header.groups[at].desc, len(header.groups[at].ranks)) for at in side]
        for side in (left, right)
    ]
    if key[0] != key[1]:
        raise CoverageError(
            f"rank {new} cannot stand in rank {old}'s place: their process groups differ",
            where=f"groups of rank {old}: {_names(left, header)}; of rank {new}: "
            f"{_names(right, header)}",
            hint="correct the header's symmetry, or run a slice of this rank",
        )
    return result | dict(zip(left, right, strict=True))


def _names(positions: Sequence[int], header: TraceHeader) -> str:
    labels = group_labels(header.groups)
    return ", ".join(labels[header.groups[at].id] for at in positions) or "none"
