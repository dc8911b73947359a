"""Which rows belong to one sync instance, over any number of files.

Rows of one *channel* carry the sequence numbers that tell its operations apart.  A collective's
channel is its process group, that of a send or recv is the triple (group, sender, receiver).
Channel and sequence number are turned into an instance by adding up, without sorting rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Int32Array, Int64Array
from prismcalib.rows import Rows
from prismtrace.schema import TraceHeader

__all__ = ["Channels", "Members", "members_of", "number"]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Members:
    """The m rows of a block that are members of instances.

    Attributes:
        row: int64[m], row in the block.
        channel: int64[m], position of the group, or G + k for pair k of `pairs`.
        pairs: int64[p], ascending keys of the point-to-point channels.
        seq: int64[m].
    """

    row: Int64Array
    channel: Int64Array
    pairs: Int64Array
    seq: Int64Array


def members_of(rows: Rows, header: TraceHeader) -> Members:
    """Channel and sequence number of every member."""
    row = np.flatnonzero(rows.member)
    channel = rows.group[row].astype(np.int64)
    sender, receiver = (ends[row] for ends in rows.p2p_ends)
    paired = np.flatnonzero(sender >= 0)
    pairs = np.empty(0, np.int64)
    if len(paired):
        world = header.world_size
        key = (channel[paired] * world + sender[paired]) * world + receiver[paired]
        pairs, place = np.unique(key, return_inverse=True)
        channel[paired] = len(header.groups) + place.ravel()
    return Members(row, channel, pairs, rows.seq[row])


def number(channel: NDArray[Any], seq: Int64Array, channels: int) -> tuple[Int64Array, int]:
    """Instance of every member, int64[m], and how many numbers are used (some may be free)."""
    first = np.full(channels, _NEVER)
    last = np.full(channels, -1)
    np.minimum.at(first, channel, seq)
    np.maximum.at(last, channel, seq)
    base, count = _bases(first, last)
    if count <= 4 * len(channel) + 1024:
        return base[channel] + seq, count
    # Sequence numbers far apart: number the pairs that occur.
    order = np.lexsort((seq, channel))
    new = np.diff(channel[order], prepend=-1) != 0
    new |= np.diff(seq[order], prepend=-1) != 0
    instance = np.empty(len(channel), np.int64)
    instance[order] = np.cumsum(new) - 1
    return instance, int(new.sum())


def _bases(first: Int64Array, last: Int64Array) -> tuple[Int64Array, int]:
    """What to add to the sequence numbers of a channel, and the sum of all widths."""
    width = np.where(last >= 0, np.maximum(last - first + 1, 1), 0)
    total = float(width.sum(dtype=np.float64))
    begin = np.cumsum(width) - width
    return np.where(last >= 0, begin - first, 0), int(min(total, 2**62))


class Channels:
    """Channels of a whole job, and what their instances expect.

    `place` makes two ranks the same (folded replicas): only the ranks it maps to are expected.
    """

    def __init__(self, header: TraceHeader, place: dict[int, int] | None = None) -> None:
        self.header = header
        self._place = place or {}
        self._pairs: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Number of channels so far."""
        return len(self.header.groups) + len(self._pairs)

    def of(self, members: Members) -> Int32Array:
        """int32[m], the job-wide channel of the members of a block."""
        groups = len(self.header.groups)
        names = np.arange(groups + len(members.pairs), dtype=np.int32)
        for local, key in enumerate(members.pairs.tolist()):
            names[groups + local] = groups + self._pairs.setdefault(key, len(self._pairs))
        return names[members.channel]

    def pair(self, channel: int) -> tuple[int, int, int] | None:
        """Group position, sender and receiver of a point-to-point channel; None of others."""
        if channel < len(self.header.groups):
            return None
        world = self.header.world_size
        key = list(self._pairs)[channel - len(self.header.groups)]
        return key // (world * world), key // world % world, key % world

    def group(self, channel: int) -> int:
        """Position of the channel's group in the header."""
        pair = self.pair(channel)
        return channel if pair is None else pair[0]

    def expected(self, channel: int) -> list[int]:
        """Ranks that have to take part in an instance of the channel."""
        pair = self.pair(channel)
        ranks = self.header.groups[channel].ranks if pair is None else pair[1:]
        return sorted({self._place.get(rank, rank) for rank in ranks})

    def expectations(self) -> tuple[Int32Array, Int64Array]:
        """Of every channel: how many members an instance has, and the sum of their marks."""
        size = np.zeros(self.count, np.int32)
        total = np.zeros(self.count, np.int64)
        groups = len(self.header.groups)
        for channel in range(groups):
            ranks = np.array(self.expected(channel), np.int64)
            size[channel] = len(ranks)
            total[channel] = marks(ranks).sum()
        world = self.header.world_size
        keys = np.array(list(self._pairs), np.int64)
        ends = np.stack([keys // world % world, keys % world])
        if self._place:
            place = np.arange(world)
            place[list(self._place)] = list(self._place.values())
            ends = place[ends]
        size[groups:] = np.where(ends[0] == ends[1], 1, 2)
        total[groups:] = np.where(
            ends[0] == ends[1], marks(ends[0]), marks(ends[0]) + marks(ends[1])
        )
        return size, total


def marks(ranks: NDArray[Any]) -> Int64Array:
    """A well mixed int64 of every rank (splitmix64).

    The sum over the members of an instance tells whether they are the right ones, each once,
    without looking at every pair of them.
    """
    value = ranks.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))).view(np.int64)
