"""Match the communications of different ranks: who took part in which sync instance.

Pure: takes what each rank recorded, returns a number (`seq`) for each communication so that
equal numbers within a group mean the same collective or the same send and recv.

The ladder, best first: ``Comms Id`` (equal on all members), ``Seq`` (if the operations it
pairs agree), and the k-th operation in issue order. Recordings of different ranks may begin
and end at different operations, so the k-th of one rank may be the (k+d)-th of another: the
shift d is the one at which kind, dtype and size agree and the *ends* of the matched operations
differ by the most constant amount. Ends of one collective agree within tens of µs on a common
clock; starts do not, since a collective's duration contains waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prismtrace.converters.groups import GroupBook, GroupKey
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.errors import AlignmentError, GroupError
from prismtrace.ranks import format_ranks
from prismtrace.schema import DType, Kind

__all__ = ["Assignment", "RankComms", "match"]

_MAX_SHIFT = 64
# Matched operations must have run at the same time once clocks are aligned: the last member
# starts before the first one ends. Kernel timestamps and drift within a window stay far below.
_OVERLAP_TOLERANCE_NS = 1_000_000
_MAX_NOT_OVERLAPPING = 0.02

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankComms:
    """The communications of one rank in issue order; parallel sequences."""

    rank: int
    index: Ints
    comm: Sequence[CommOp]
    start_ns: Ints
    end_ns: Ints
    seq: Sequence[int | None]
    comms_id: Sequence[int | None]


@dataclass
class Assignment:
    """What matching found for one rank; parallel to its `RankComms`."""

    group: list[GroupKey | None]
    seq: list[int | None]
    peer: list[int | None]
    nbytes: list[int | None]


@dataclass(frozen=True)
class _Sequence:
    """The operations of one rank in one group (or between one pair of ranks)."""

    rank: int
    positions: list[int]
    kind: Ints
    dtype: Ints
    nbytes: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.positions)


_KIND_CODE = {kind: code for code, kind in enumerate(Kind)}
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(DType)}
_OTHER = _KIND_CODE[Kind.OTHER_COMM]


@dataclass
class _Matcher:
    ranks: Mapping[int, RankComms]
    assignments: dict[int, Assignment]
    keep_unmatched: bool
    counts: Counter[str]
    used: set[GroupKey] = field(default_factory=set)


def match(
    ranks: Sequence[RankComms], book: GroupBook, *, keep_unmatched: bool = False
) -> tuple[dict[int, Assignment], set[GroupKey]]:
    """Assign group, seq and partner to every communication.

    Args:
        ranks: what each recorded rank communicated.
        book: the job's process groups; its `counts` are added to.
        keep_unmatched: keep what cannot be assigned or matched as local spans (`seq` null)
            instead of raising.

    Returns:
        Rank -> assignment, and the groups in use.

    Raises:
        GroupError: a communication fits no or several groups, or a p2p operation does not
            tell its partner.
        AlignmentError: the operations of two ranks do not match.
    """
    by_rank = {comms.rank: comms for comms in ranks}
    matcher = _Matcher(by_rank, {}, keep_unmatched, book.counts)
    collectives: dict[GroupKey, dict[int, list[int]]] = defaultdict(dict)
    pairs: dict[tuple[GroupKey, int, int], dict[Kind, tuple[int, list[int]]]] = defaultdict(dict)
    for rank in sorted(by_rank):
        comms = by_rank[rank]
        assignment = _assign_groups(comms, book, keep_unmatched)
        matcher.assignments[rank] = assignment
        for position, (comm, key) in enumerate(zip(comms.comm, assignment.group, strict=True)):
            if key is None:
                continue
            matcher.used.add(key)
            peer = assignment.peer[position]
            if not comm.kind.is_p2p:
                collectives[key].setdefault(rank, []).append(position)
            elif peer is not None:
                sends = comm.kind is Kind.SEND
                pair = (key, rank, peer) if sends else (key, peer, rank)
                pairs[pair].setdefault(comm.kind, (rank, []))[1].append(position)
    for key in sorted(collectives):
        _match_group(matcher, key, collectives[key])
    for pair in sorted(pairs):
        _match_pair(matcher, pair, pairs[pair])
    return matcher.assignments, matcher.used


def _assign_groups(comms: RankComms, book: GroupBook, keep_unmatched: bool) -> Assignment:
    count = len(comms.comm)
    assignment = Assignment([None] * count, [None] * count, [None] * count, [None] * count)
    for position, comm in enumerate(comms.comm):
        assignment.nbytes[position] = comm.nbytes
        try:
            key = book.assign(comms.rank, comm)
            peer = _peer(comms.rank, comm, key)
        except GroupError:
            if not keep_unmatched:
                raise
            book.counts["kept-without-group"] += 1
            continue
        assignment.group[position] = key
        assignment.peer[position] = peer
        if comm.share and comm.nbytes is not None:
            assignment.nbytes[position] = comm.nbytes * len(key.ranks)
    return assignment


def _peer(rank: int, comm: CommOp, key: GroupKey) -> int | None:
    if not comm.kind.is_p2p:
        return None
    if comm.peer is not None:
        return comm.peer
    if comm.group_peer is not None and comm.group_peer < len(key.ranks):
        return key.ranks[comm.group_peer]
    raise GroupError(
        f"{comm.kind} does not tell its partner",
        where=f"rank {rank}, group {key.name!r}",
        hint="profile with record_shapes=True on torch ≥ 2.5, or keep such operations as local "
        "spans with --unmatched keep",
    )


def _sequence(comms: RankComms, positions: list[int], nbytes: Sequence[int | None]) -> _Sequence:
    chosen = [comms.comm[position] for position in positions]
    # Sizes of all_to_all differ between ranks by nature.
    sizes = [
        -1 if comm.kind is Kind.ALL_TO_ALL or nbytes[p] is None else nbytes[p]
        for comm, p in zip(chosen, positions, strict=True)
    ]

    def array(values: Sequence[int | None]) -> Ints:
        return np.array(values, dtype=np.int64)

    return _Sequence(
        rank=comms.rank,
        positions=positions,
        kind=array([_KIND_CODE[comm.kind] for comm in chosen]),
        dtype=array([-1 if comm.dtype is None else _DTYPE_CODE[comm.dtype] for comm in chosen]),
        nbytes=array(sizes),
        start=comms.start_ns[positions],
        end=comms.end_ns[positions],
    )


def _agree(a: _Sequence, b: _Sequence, at: slice, bt: slice, *, p2p: bool) -> npt.NDArray[np.bool_]:
    """Where two sequences may be the same operation; what is unknown agrees with anything."""

    def same(x: Ints, y: Ints, unknown: int) -> npt.NDArray[np.bool_]:
        result: npt.NDArray[np.bool_] = (x == y) | (x == unknown) | (y == unknown)
        return result

    result = same(a.dtype[at], b.dtype[bt], -1) & same(a.nbytes[at], b.nbytes[bt], -1)
    if not p2p:
        result &= same(a.kind[at], b.kind[bt], _OTHER)
    return result


def _overlap(a: _Sequence, b: _Sequence, shift: int) -> tuple[slice, slice]:
    """Slices of a and b that lie on each other when b[k] is a[k + shift]."""
    first = max(0, shift)
    last = min(len(a), len(b) + shift)
    return slice(first, max(first, last)), slice(first - shift, max(first, last) - shift)


@dataclass(frozen=True)
class _Shift:
    shift: int
    agreeing: int
    overlap: int
    spread_ns: float


def _best_shift(a: _Sequence, b: _Sequence, *, p2p: bool) -> _Shift:
    """The shift at which b continues a best; see the module's description."""
    reach = min(max(len(a), len(b)), _MAX_SHIFT + abs(len(a) - len(b)))
    tried: list[_Shift] = []
    for shift in range(-reach, reach + 1):
        at, bt = _overlap(a, b, shift)
        size = at.stop - at.start
        if size == 0:
            continue
        agreeing = int(_agree(a, b, at, bt, p2p=p2p).sum())
        difference = a.end[at] - b.end[bt]
        spread = float(np.median(np.abs(difference - np.median(difference))))
        tried.append(_Shift(shift, agreeing, size, spread))
    if not tried:
        return _Shift(0, 0, 0, 0.0)
    least = max(1, min(len(a), len(b)) // 2)
    clean = [t for t in tried if t.agreeing == t.overlap and t.overlap >= least]
    if not clean:
        return max(tried, key=lambda t: (t.agreeing, -abs(t.shift)))
    longest = max(t.overlap for t in clean)
    # Dropping operations at the ends makes any spread smaller; a shorter overlap has to be
    # clearly better, not just better.
    return min(clean, key=lambda t: (_penalised(t, longest), abs(t.shift), t.shift))


def _penalised(t: _Shift, longest: int) -> float:
    if t.overlap < 4:
        # A few ends say nothing about a constant difference.
        return float(10**12 * (longest - t.overlap))
    return t.spread_ns + 1000.0 + 20_000.0 * (longest - t.overlap)


def _match_group(matcher: _Matcher, key: GroupKey, members: dict[int, list[int]]) -> None:
    ranks = sorted(members)
    sequences = {
        rank: _sequence(matcher.ranks[rank], members[rank], matcher.assignments[rank].nbytes)
        for rank in ranks
    }
    numbered = _by_id(matcher, members, sequences) or _by_order(matcher, key, sequences)
    if numbered is None:
        return
    _store(matcher, key, sequences, numbered)


Numbers = dict[int, list[int]]
"""Rank -> number of the instance of each of its operations."""


def _by_id(
    matcher: _Matcher, members: dict[int, list[int]], sequences: dict[int, _Sequence]
) -> Numbers | None:
    """Instances by ``Comms Id``, else by ``Seq``; null when they are absent or contradict."""
    for attribute in ("comms_id", "seq"):
        ids: dict[int, list[int | None]] = {}
        for rank, positions in members.items():
            recorded: Sequence[int | None] = getattr(matcher.ranks[rank], attribute)
            ids[rank] = [recorded[position] for position in positions]
        if any(None in entry or len(set(entry)) != len(entry) for entry in ids.values()):
            continue
        order: dict[int | None, int] = {}
        for rank in sorted(ids):
            for value in ids[rank]:
                order.setdefault(value, len(order))
        numbers = {rank: [order[value] for value in entry] for rank, entry in ids.items()}
        if _ids_agree(sequences, numbers):
            matcher.counts[f"matched-by-{attribute.replace('_', '-')}"] += len(order)
            return numbers
        matcher.counts[f"contradicting-{attribute.replace('_', '-')}"] += 1
    return None


def _ids_agree(sequences: dict[int, _Sequence], numbers: Numbers) -> bool:
    """Operations with one number look alike, and each rank meets common numbers in order."""
    reference = min(sequences)
    place = {number: k for k, number in enumerate(numbers[reference])}
    for rank, sequence in sequences.items():
        common = [(place[n], k) for k, n in enumerate(numbers[rank]) if n in place]
        if len(sequences) > 1 and not common:
            return False
        previous = -1
        for a, b in common:
            same = _agree(
                sequences[reference], sequence, slice(a, a + 1), slice(b, b + 1), p2p=False
            )
            if a <= previous or not bool(same[0]):
                return False
            previous = a
    return True


def _by_order(matcher: _Matcher, key: GroupKey, sequences: dict[int, _Sequence]) -> Numbers | None:
    """Instances by position, after shifting each rank to the one that recorded most."""
    reference = max(sequences, key=lambda rank: (len(sequences[rank]), -rank))
    numbers: Numbers = {}
    for rank, sequence in sequences.items():
        best = _best_shift(sequences[reference], sequence, p2p=False)
        if rank != reference and best.agreeing < best.overlap:
            if matcher.keep_unmatched:
                matcher.counts["kept-unmatched"] += sum(map(len, sequences.values()))
                return None
            raise _mismatch(key, sequences[reference], sequence, best)
        shift = 0 if rank == reference else best.shift
        numbers[rank] = [k + shift for k in range(len(sequence))]
    matcher.counts["matched-by-order"] += len(sequences[reference])
    return numbers


def _mismatch(key: GroupKey, a: _Sequence, b: _Sequence, best: _Shift) -> AlignmentError:
    at, bt = _overlap(a, b, best.shift)
    agree = _agree(a, b, at, bt, p2p=False)
    first = int(np.argmin(agree))
    kinds = list(Kind)

    def text(sequence: _Sequence, k: int) -> str:
        size = sequence.nbytes[k]
        return f"{kinds[sequence.kind[k]]}" + (f" of {size} bytes" if size >= 0 else "")

    return AlignmentError(
        f"communications do not match: rank {a.rank} has {len(a)}, rank {b.rank} has {len(b)} "
        f"in group {key.name!r}, and at best {best.agreeing} of {best.overlap} agree; e.g. "
        f"{text(a, at.start + first)} against {text(b, bt.start + first)}",
        where=f"ranks {a.rank} and {b.rank}, group {key.name!r}",
        hint="the traces are of different steps or jobs, or their events were sampled or "
        "dropped; profile the same steps on all ranks with every event kept",
    )


def _store(
    matcher: _Matcher, key: GroupKey, sequences: dict[int, _Sequence], numbers: Numbers
) -> None:
    """Number the instances that every recorded member has; count heads and tails."""
    present = sorted(sequences)
    common = set(numbers[present[0]]).intersection(*(numbers[rank] for rank in present[1:]))
    silent = [rank for rank in key.ranks if rank in matcher.ranks and rank not in sequences]
    if silent:
        common = set()
    order = [n for n in numbers[present[0]] if n in common]
    dense = {number: k for k, number in enumerate(order)}
    _check_overlap(matcher, key, sequences, numbers, dense)
    for rank in present:
        assignment = matcher.assignments[rank]
        known = [n for n in numbers[rank] if n in common]
        head = numbers[rank].index(known[0]) if known else 0
        for k, (position, number) in enumerate(
            zip(sequences[rank].positions, numbers[rank], strict=True)
        ):
            assignment.seq[position] = dense.get(number)
            if number not in common:
                matcher.counts["unmatched-head" if k < head else "unmatched-tail"] += 1
    if silent and not matcher.keep_unmatched:
        raise AlignmentError(
            f"ranks {format_ranks(silent)} recorded no communication in group {key.name!r}, "
            f"ranks {format_ranks(present)} recorded {len(sequences[present[0]])}",
            where=f"group {key.name!r}",
            hint="the traces are of different steps, or communication events were dropped",
        )


def _check_overlap(
    matcher: _Matcher,
    key: GroupKey,
    sequences: dict[int, _Sequence],
    numbers: Numbers,
    dense: dict[int, int],
) -> None:
    """Refuse a matching whose instances could not have happened together."""
    if len(sequences) < 2 or not dense:
        return
    starts, ends = [], []
    for rank in sorted(sequences):
        chosen = [k for k, number in enumerate(numbers[rank]) if number in dense]
        starts.append(sequences[rank].start[chosen])
        ends.append(sequences[rank].end[chosen])
    start, end = np.stack(starts), np.stack(ends)
    offset = np.median(end - end[0], axis=1).astype(np.int64)[:, None]
    late = (start - offset).max(axis=0) - (end - offset).min(axis=0)
    wrong = int((late > _OVERLAP_TOLERANCE_NS).sum())
    if not wrong:
        return
    matcher.counts["not-overlapping"] += wrong
    if wrong > _MAX_NOT_OVERLAPPING * late.size and not matcher.keep_unmatched:
        worst = int(np.argmax(late))
        raise AlignmentError(
            f"{wrong} of {late.size} matched communications of group {key.name!r} did not run at "
            f"the same time on all ranks: number {worst} starts {late[worst] / 1e6:.3f} ms after "
            "another rank had ended it",
            where=f"group {key.name!r}",
            hint="events are missing on some rank (sampled or dropped), or the traces are of "
            "different runs",
        )


def _match_pair(
    matcher: _Matcher,
    pair: tuple[GroupKey, int, int],
    sides: dict[Kind, tuple[int, list[int]]],
) -> None:
    """Number sends and recvs between two ranks: first in, first out."""
    key, sender, receiver = pair
    sequences = {
        kind: _sequence(matcher.ranks[rank], positions, matcher.assignments[rank].nbytes)
        for kind, (rank, positions) in sides.items()
    }
    if sender not in matcher.ranks or receiver not in matcher.ranks:
        # The partner was not recorded: numbered as they come, refused by a merge later.
        for rank, positions in sides.values():
            for k, position in enumerate(positions):
                matcher.assignments[rank].seq[position] = k
        return
    if len(sequences) < 2:
        matcher.counts["unmatched-p2p"] += sum(map(len, sequences.values()))
        return
    sends, recvs = sequences[Kind.SEND], sequences[Kind.RECV]
    best = _best_shift(sends, recvs, p2p=True)
    if best.agreeing < best.overlap:
        if matcher.keep_unmatched:
            matcher.counts["kept-unmatched"] += len(sends) + len(recvs)
            return
        raise _mismatch(key, sends, recvs, best)
    at, bt = _overlap(sends, recvs, best.shift)
    for sequence, chosen in ((sends, at), (recvs, bt)):
        assignment = matcher.assignments[sequence.rank]
        for k, position in enumerate(sequence.positions[chosen]):
            assignment.seq[position] = k
        matcher.counts["unmatched-p2p"] += len(sequence) - (chosen.stop - chosen.start)
    matcher.counts["matched-p2p"] += at.stop - at.start
