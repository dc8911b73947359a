"""The operations that have not ended: one per process group, one per direction of p2p."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prismtrace.converters.flight.job import FlightJob
from prismtrace.converters.flight.reading import Entry
from prismtrace.converters.groups import GroupKey
from prismtrace.converters.sequences import OpSequence, make_sequence
from prismtrace.hangs.differing import Difference, first_difference
from prismtrace.hangs.numbering import Numbered, number_collectives
from prismtrace.schema import ROOTED_KINDS, Kind

__all__ = ["GroupState", "Instance", "JobState", "Key", "read_state"]

Key = tuple[GroupKey, int | None, int | None]
"""Group, sender and receiver; the latter null for collectives."""


@dataclass
class Instance:
    """The first operation of a group, or of a sender and a receiver, that has not ended."""

    key: Key
    seq: int | None
    what: str
    position: dict[int, int]
    """Rank -> position of its entry, for those that have enqueued it."""
    absent: tuple[int, ...] = ()
    no_dump: tuple[int, ...] = ()
    difference: Difference | None = None


@dataclass(frozen=True)
class GroupState:
    """How far the collectives of a group have come."""

    key: GroupKey
    enqueued_by_all: int | None
    completed_by_all: int | None
    pending: Instance | None
    harmless: Difference | None = None
    """Members differ in a collective that has ended all the same."""


@dataclass
class JobState:
    """All that has not ended."""

    state: dict[int, list[str]]
    """Rank -> state of each entry."""
    groups: list[GroupState] = field(default_factory=list)
    p2p: list[Instance] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def instances(self) -> list[Instance]:
        """All that is pending."""
        return [*(group.pending for group in self.groups if group.pending), *self.p2p]


def read_state(job: FlightJob) -> JobState:
    """What has ended on which rank, and what has not."""
    result = JobState({rank: _states(job, rank) for rank in job.dumps})
    collectives: dict[GroupKey, dict[int, list[int]]] = {}
    pairs: dict[Key, dict[Kind, list[int]]] = {}
    for rank, assignment in job.assignments.items():
        entries = job.dumps[rank].entries
        for position, (key, peer) in enumerate(zip(assignment.group, assignment.peer, strict=True)):
            kind = entries[position].comm.kind
            if key is None:
                continue
            if not kind.is_p2p:
                collectives.setdefault(key, {}).setdefault(rank, []).append(position)
            elif result.state[rank][position] != "completed":
                sends = kind is Kind.SEND
                pair: Key = (key, rank, peer) if sends else (key, peer, rank)
                pairs.setdefault(pair, {}).setdefault(kind, []).append(position)
    for key in sorted(collectives):
        result.groups.append(_group_state(job, result, key, collectives[key]))
    for pair in sorted(pairs):
        result.p2p.append(_p2p_instance(job, pair, pairs[pair]))
    return result


def _stream(key: GroupKey | None, entry: Entry, rank: int, peer: int | None) -> object:
    """What runs in order on a rank: a group's launches, and those of an unbatched pair."""
    if entry.comm.kind.is_p2p and entry.batch is None:
        return key, frozenset((rank, peer))
    return key


def streams(job: FlightJob, rank: int) -> list[object]:
    """The stream of each entry of a rank."""
    assignment = job.assignments[rank]
    return [
        _stream(key, entry, rank, peer)
        for key, entry, peer in zip(
            assignment.group, job.dumps[rank].entries, assignment.peer, strict=True
        )
    ]


def _states(job: FlightJob, rank: int) -> list[str]:
    """States, corrected: the watchdog may not have noticed an end behind which others began."""
    entries = job.dumps[rank].entries
    found = [entry.state for entry in entries]
    passed: dict[object, int | None] = {}
    places = streams(job, rank)
    for position in range(len(entries) - 1, -1, -1):
        place, entry = places[position], entries[position]
        if place in passed and (entry.batch is None or entry.batch != passed[place]):
            found[position] = "completed"
        elif found[position] != "scheduled":
            passed[place] = entry.batch
    return found


def _group_state(
    job: FlightJob, state: JobState, key: GroupKey, members: Mapping[int, list[int]]
) -> GroupState:
    sequences = {rank: _sequence(job, rank, positions) for rank, positions in members.items()}
    seqs = {rank: [job.comms[rank].seq[p] for p in members[rank]] for rank in members}
    numbered = number_collectives(sequences, seqs)
    if numbered.by_order:
        state.notes.append(
            f"ranks number the collectives of group {key.label} differently; told apart by order"
        )
    place = {
        rank: dict(zip(numbered.numbers[rank], positions, strict=True))
        for rank, positions in members.items()
    }
    _note_gaps(state, key, numbered)
    difference = first_difference(sequences, numbered.numbers)
    head = _head(job, state, place, difference)
    dumped = [rank for rank in key.ranks if rank in job.dumps]
    last = min((max(place[rank]) if rank in place else -1) for rank in dumped)
    ended = _ended_by_all(state, place, dumped)
    pending = None
    if head is not None:
        at_head = difference if difference is not None and difference.number == head else None
        pending = _instance(job, key, numbered, place, head, at_head)
    return GroupState(
        key=key,
        enqueued_by_all=numbered.seq.get(last),
        completed_by_all=None if ended is None else numbered.seq.get(ended),
        pending=pending,
        harmless=difference if difference is not None and difference.number != head else None,
    )


def _sequence(job: FlightJob, rank: int, positions: list[int]) -> OpSequence:
    comms = job.comms[rank]
    return make_sequence(
        rank,
        None,
        positions,
        comms.comm,
        job.assignments[rank].nbytes,
        comms.step,
        comms.start_ns,
        comms.end_ns,
    )


def _note_gaps(state: JobState, key: GroupKey, numbered: Numbered) -> None:
    for rank, numbers in numbered.numbers.items():
        lost = numbers[-1] - numbers[0] + 1 - len(numbers)
        if lost:
            state.notes.append(
                f"rank {rank} has no record of {lost} collectives of group {key.label} between "
                "others that it has; taken as done"
            )


def _head(
    job: FlightJob,
    state: JobState,
    place: Mapping[int, Mapping[int, int]],
    difference: Difference | None,
) -> int | None:
    """Number of the first collective that has not ended; null when all have.

    What has ended on one member has been entered by all (unless it has a root), so that one
    which has ended nowhere is preferred.
    """
    open_on: Counter[int] = Counter()
    ended: set[int] = set()
    for rank, positions in place.items():
        for number, position in positions.items():
            if state.state[rank][position] != "completed":
                open_on[number] += 1
            elif job.dumps[rank].entries[position].comm.kind not in ROOTED_KINDS:
                ended.add(number)
    if not open_on:
        return None
    if difference is not None and open_on[difference.number]:
        return difference.number
    return min(open_on.keys() - ended, default=min(open_on))


def _ended_by_all(
    state: JobState, place: Mapping[int, Mapping[int, int]], dumped: Sequence[int]
) -> int | None:
    ended = [
        max(
            (
                n
                for n, position in place[rank].items()
                if state.state[rank][position] == "completed"
            ),
            default=None,
        )
        if rank in place
        else None
        for rank in dumped
    ]
    return None if None in ended else min(n for n in ended if n is not None)


def _instance(
    job: FlightJob,
    key: GroupKey,
    numbered: Numbered,
    place: Mapping[int, Mapping[int, int]],
    number: int,
    difference: Difference | None,
) -> Instance:
    position = {rank: found[number] for rank, found in place.items() if number in found}
    absent = [
        rank
        for rank in key.ranks
        if rank in job.dumps and rank not in position and _is_behind(place.get(rank), number)
    ]
    usual = [r for r in position if difference is None or r not in difference.ranks]
    first = min(usual or position)
    return Instance(
        key=(key, None, None),
        seq=numbered.seq.get(number),
        what=describe(job, first, position[first]),
        position=position,
        absent=tuple(sorted(absent)),
        no_dump=tuple(sorted(rank for rank in key.ranks if rank not in job.dumps)),
        difference=difference,
    )


def _is_behind(numbers: Mapping[int, int] | None, number: int) -> bool:
    return not numbers or max(numbers) < number


def describe(job: FlightJob, rank: int, position: int) -> str:
    """An entry in words, e.g. ``all_reduce of float32, 4096 bytes``."""
    comm = job.comms[rank].comm[position]
    size = job.assignments[rank].nbytes[position]
    peer = job.assignments[rank].peer[position]
    words = job.dumps[rank].entries[position].name if comm.kind is Kind.OTHER_COMM else comm.kind
    if peer is not None:
        words += f" {'to' if comm.kind is Kind.SEND else 'from'} {peer}"
    words += f" of {comm.dtype}" if comm.dtype is not None else ""
    return words + (f", {size} bytes" if size is not None else "")


def _p2p_instance(job: FlightJob, pair: Key, sides: Mapping[Kind, list[int]]) -> Instance:
    """The first send or receive of a pair that has not ended, and whether both sides came."""
    _, sender, receiver = pair
    ends = dict(_present(sides, sender, receiver))
    missing = [rank for rank in (sender, receiver) if rank is not None and rank not in ends]
    first = min(ends)
    entry = job.dumps[first].entries[ends[first]]
    return Instance(
        key=pair,
        seq=entry.p2p_seq,
        what=describe(job, first, ends[first]),
        position=ends,
        absent=tuple(rank for rank in missing if rank in job.dumps),
        no_dump=tuple(rank for rank in missing if rank not in job.dumps),
        difference=_p2p_difference(job, ends),
    )


def _p2p_difference(job: FlightJob, ends: Mapping[int, int]) -> Difference | None:
    """Whether what is sent is not what is received."""
    sizes = {job.assignments[rank].nbytes[at] for rank, at in ends.items()}
    dtypes = {job.comms[rank].comm[at].dtype for rank, at in ends.items()}
    if len(sizes - {None}) < 2 and len(dtypes - {None}) < 2:
        return None
    what = {rank: describe(job, rank, at) for rank, at in ends.items()}
    return Difference(0, tuple(sorted(ends)), what)


def _present(
    sides: Mapping[Kind, list[int]], sender: int | None, receiver: int | None
) -> Iterator[tuple[int, int]]:
    for kind, rank in ((Kind.SEND, sender), (Kind.RECV, receiver)):
        if kind in sides and rank is not None:
            yield rank, sides[kind][0]
