"""Dependencies of a log's operations: what each row of a rank had to wait for.

A rank issues its operations in six chains, which become its streams: computations,
collectives, and sends and receives of activations and of gradients.  Within a chain each row
waits for the row before it.  Between the chains:

* *pipeline*: the k-th receive of a phase feeds the k-th computation that needs one, and the
  k-th computation that has somebody to send to feeds the k-th send;
* *issue*: a collective, and a receive that is launched on its own, wait for the computation
  that had ended when they started; a receive that is coalesced with a send does not;
* *parameters*: the first forward of a chunk waits for the chunk's gathered parameters;
* *update*: computations of the optimizer wait for the collectives before them.

With these rules the longest path through the public straggler data set without launch delays
is the one that its publisher reports (see the page on fidelity).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismtrace.converters.ops.grid import Int64Array
from prismtrace.converters.ops.reading import Operations
from prismtrace.errors import AlignmentError
from prismtrace.schema import Kind, Phase

__all__ = ["P2P_STREAM", "STREAMS", "Links", "link_operations", "stream_of_rows"]

STREAMS = (
    "compute",
    "collectives",
    "send activations",
    "receive activations",
    "send gradients",
    "receive gradients",
)
_COMPUTE, _COLLECTIVE = 0, 1
P2P_STREAM = {
    (Kind.SEND, Phase.FORWARD): 2,
    (Kind.RECV, Phase.FORWARD): 3,
    (Kind.SEND, Phase.BACKWARD): 4,
    (Kind.RECV, Phase.BACKWARD): 5,
}

_TOLERANCE_NS = 50_000
"""Spans that touch may overlap this much: float32 seconds and host clocks are no finer."""

_MOST_DEPS = 3


@dataclass(frozen=True, eq=False)
class Links:
    """Dependencies within ranks.

    Attributes:
        stream: uint8[n], number in `STREAMS`.
        deps: uint32[n, 3], distances back; the first `dep_count` of a row count.
        dep_count: uint8[n].
        batch: int32[n], number of the coalesced launch among the `batches`, or -1.
        counts: edges by rule, and what was assumed.
    """

    stream: NDArray[np.uint8]
    deps: NDArray[np.uint32]
    dep_count: NDArray[np.uint8]
    batch: NDArray[np.int32]
    batches: int
    counts: Counter[str]


@dataclass(frozen=True, eq=False)
class _Chains:
    """Rows of every stream, ascending; and uint32[n] how far back a row's neighbour is, or 0."""

    rows: list[Int64Array]
    back: NDArray[np.uint32]


def stream_of_rows(operations: Operations) -> NDArray[np.uint8]:
    """uint8[n], number in `STREAMS` of every row's stream."""
    table = np.array(
        [
            P2P_STREAM[rule.kind, rule.phase]
            if rule.kind.is_p2p
            else _COLLECTIVE
            if rule.kind.is_communication and not rule.blocking
            else _COMPUTE
            for rule in operations.rules
        ],
        np.uint8,
    )
    return table[operations.operation]


def link_operations(operations: Operations) -> Links:
    """Find the dependencies of all rows.

    Raises:
        AlignmentError: sends or receives do not fit the computations of their rank.
    """
    stream = stream_of_rows(operations)
    rows = [np.flatnonzero(stream == number) for number in range(len(STREAMS))]
    counts: Counter[str] = Counter()
    deps = [np.zeros(operations.rows, np.uint32) for _ in range(_MOST_DEPS)]
    chains = _Chains(rows, deps[0])

    def link(slot: int, source: Int64Array, target: Int64Array) -> int:
        kept = source >= 0
        if not kept.all():
            source, target = source[kept], target[kept]
        deps[slot][target] = target - source
        return len(target)

    for chain in rows:
        counts["edge-chain"] += link(0, *_neighbours(operations, chain, counts))
    batch, batches = _coalesced(operations, stream)
    coalesced = batch >= 0

    for number in (3, 5, _COLLECTIVE):
        launched = rows[number][~coalesced[rows[number]]]
        source = _ended(operations, chains, launched, rows[_COMPUTE])
        counts["edge-issue"] += link(1, source, launched)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for source, target in _pipeline(operations, chains, phase):
            counts["edge-pipeline"] += link(1, source, target)
    counts["edge-parameters"] = link(2, *_parameters(operations, chains))
    counts["edge-update"] = link(2, *_updates(operations, chains))
    table, dep_count = _compacted(deps)
    return Links(stream, table, dep_count, batch, batches, counts)


def _neighbours(
    operations: Operations, chain: Int64Array, counts: Counter[str]
) -> tuple[Int64Array, Int64Array]:
    """(source, target): rows of a stream that follow each other on one rank."""
    turn = operations.turn_of(chain)
    same = turn[1:] == turn[:-1]
    late = operations.end_ns[chain[:-1]] > operations.start_ns[chain[1:]] + _TOLERANCE_NS
    counts["operations-overlap"] += int((late & same).sum())
    return chain[:-1][same], chain[1:][same]


def _ended(
    operations: Operations, chains: _Chains, rows: Int64Array, chain: Int64Array
) -> Int64Array:
    """For each row the last one of a chain before it that had ended when it started; or -1."""
    found = np.full(len(rows), -1)
    if not len(chain):
        return found
    place = np.searchsorted(chain, rows) - 1
    found = np.where(place >= 0, chain[place], -1)
    found[operations.turn_of(found) != operations.turn_of(rows)] = -1
    limit = operations.start_ns[rows] + _TOLERANCE_NS
    while True:
        early = np.flatnonzero((found >= 0) & (operations.end_ns[found] > limit))
        if not len(early):
            return found
        back = chains.back[found[early]]
        found[early] = np.where(back > 0, found[early] - back, -1)


def _coalesced(operations: Operations, stream: NDArray[np.uint8]) -> tuple[NDArray[np.int32], int]:
    """int32[n], which launch made a send or receive along with others, or -1; and how many did.

    What one launch made has the same start and the same end.
    """
    batch = np.full(operations.rows, -1, np.int32)
    p2p = np.flatnonzero(stream > _COLLECTIVE)
    start, end, segment = (
        values[p2p] for values in (operations.start_ns, operations.end_ns, operations.segment)
    )
    together = (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (segment[1:] == segment[:-1])
    several = np.zeros(len(p2p), np.bool_)
    several[1:] |= together
    several[:-1] |= together
    # A launch begins where a row is not together with the one before it.
    begins = several.copy()
    begins[1:] &= ~together
    batch[p2p[several]] = np.cumsum(begins[several], dtype=np.int32) - np.int32(1)
    return batch, int(begins.sum())


def _pipeline(
    operations: Operations, chains: _Chains, phase: Phase
) -> list[tuple[Int64Array, Int64Array]]:
    """(source rows, target rows) of receives into computations and of these into sends."""
    sends, receives = (chains.rows[P2P_STREAM[kind, phase]] for kind in (Kind.SEND, Kind.RECV))
    if not len(sends) and not len(receives):
        return []
    computing = np.array(
        [rule.kind is Kind.COMPUTE and rule.phase is phase for rule in operations.rules]
    )
    compute = chains.rows[_COMPUTE]
    compute = compute[computing[operations.operation[compute]]]
    stage = operations.grid.stage[operations.rank_of(compute)]
    chunk = operations.chunk[compute]
    first = (stage == 0) & (chunk == 0)
    last = (stage == operations.grid.pp_size - 1) & (chunk == chunk.max(initial=0))
    if phase is Phase.BACKWARD:
        first, last = last, first
    fed, feeding = compute[~first], compute[~last]
    _require_pairs(operations, receives, fed, f"{phase} receives")
    _require_pairs(operations, sends, feeding, f"{phase} sends")
    _require_order(operations, receives, fed)
    _require_order(operations, feeding, sends)
    return [(receives, fed), (feeding, sends)]


def _require_pairs(
    operations: Operations, messages: Int64Array, computations: Int64Array, what: str
) -> None:
    counts = [operations.counts(rows) for rows in (messages, computations)]
    differ = np.flatnonzero(counts[0] != counts[1])
    if len(differ):
        raise AlignmentError(
            f"{counts[0][differ[0]]} {what} do not fit {counts[1][differ[0]]} computations "
            "that need one",
            where=operations.place_of_segment(int(differ[0])),
            hint="the log lacks rows, or stages and chunks are mapped wrongly; the first stage "
            "receives no activations, the last one no gradients",
        )


def _require_order(operations: Operations, earlier: Int64Array, later: Int64Array) -> None:
    wrong = np.flatnonzero(earlier >= later)
    if len(wrong):
        raise AlignmentError(
            "an operation started before the one that feeds it",
            where=f"{operations.place(int(later[wrong[0]]))}, "
            f"fed by {operations.place(int(earlier[wrong[0]]))}",
            hint="check which columns hold stage, microbatch and chunk",
        )


def _parameters(operations: Operations, chains: _Chains) -> tuple[Int64Array, Int64Array]:
    """(source, target): gathers of a chunk's parameters, first forward computation of it."""
    rules = operations.rules
    gathers = np.array(
        [rule.kind.is_communication and rule.phase is Phase.FORWARD for rule in rules]
    )
    computes = np.array(
        [rule.kind is Kind.COMPUTE and rule.phase is Phase.FORWARD for rule in rules]
    )
    comms, compute = chains.rows[_COLLECTIVE], chains.rows[_COMPUTE]
    comms = comms[gathers[operations.operation[comms]]]
    compute = compute[computes[operations.operation[compute]]]
    chunks = int(operations.chunk.max()) + 1
    last_gather = np.full(operations.segments * chunks, -1, np.int64)
    last_gather[operations.segment_of(comms) * chunks + operations.chunk[comms]] = comms
    key = operations.segment_of(compute) * chunks + operations.chunk[compute]
    first = np.full(operations.segments * chunks, -1, np.int64)
    first[key[::-1]] = compute[::-1]
    known = (first >= 0) & (last_gather >= 0)
    source, target = last_gather[known], first[known]
    in_time = (source < target) & (
        operations.end_ns[source] <= operations.start_ns[target] + _TOLERANCE_NS
    )
    return source[in_time], target[in_time]


def _updates(operations: Operations, chains: _Chains) -> tuple[Int64Array, Int64Array]:
    """(source, target): the collective that ended before, computations of the optimizer."""
    updates = np.array(
        [rule.kind is Kind.COMPUTE and rule.phase is Phase.OPTIMIZER for rule in operations.rules]
    )
    rows = chains.rows[_COMPUTE]
    rows = rows[updates[operations.operation[rows]]]
    return _ended(operations, chains, rows, chains.rows[_COLLECTIVE]), rows


def _compacted(
    deps: list[NDArray[np.uint32]],
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """uint32[n, 3] distances, each once and the existing ones first; and how many there are."""
    first, second, third = deps
    second[second == first] = 0
    third[(third == first) | (third == second)] = 0
    for near, far in ((second, third), (first, second), (second, third)):
        gap = np.flatnonzero((near == 0) & (far != 0))
        near[gap] = far[gap]
        far[gap] = 0
    count = (first != 0).view(np.uint8) + (second != 0) + (third != 0)
    return np.stack(deps, axis=1), count
