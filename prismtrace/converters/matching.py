"""Match the communications of different ranks: who took part in which sync instance.

Pure: takes what each rank recorded, returns a number (`seq`) for each communication so that
equal numbers within a group mean the same collective or the same send and recv.

The ladder, best first: ``Comms Id`` (equal on all members), ``Seq`` (if the operations it
pairs look alike), and the k-th operation in issue order, after laying the ranks' sequences on
each other (`sequences`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prismtrace.converters.groups import GroupBook, GroupKey
from prismtrace.converters.placing import Assignment, RankComms, assign_groups
from prismtrace.converters.sequences import (
    OpSequence,
    Overlay,
    agree,
    best_overlay,
    make_sequence,
    violations,
)
from prismtrace.errors import AlignmentError
from prismtrace.ranks import name_ranks
from prismtrace.schema import Kind

__all__ = ["match"]

# Share of a group's operations that may contradict the clocks before the matching is refused.
_MAX_IMPOSSIBLE = 0.02


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
        assignment = assign_groups(comms, book, keep_unmatched)
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


def _sequence(matcher: _Matcher, rank: int, positions: list[int]) -> OpSequence:
    comms = matcher.ranks[rank]
    return make_sequence(
        rank,
        comms.host,
        positions,
        comms.comm,
        matcher.assignments[rank].nbytes,
        comms.step,
        comms.start_ns,
        comms.end_ns,
        comms.tag,
    )


def _match_group(matcher: _Matcher, key: GroupKey, members: dict[int, list[int]]) -> None:
    ranks = sorted(members)
    sequences = {rank: _sequence(matcher, rank, members[rank]) for rank in ranks}
    way, numbered = _by_id(matcher, members, sequences)
    if numbered is None:
        way, numbered = "by-order", _by_order(matcher, key, sequences)
    if numbered is not None:
        # One recorded member has met nobody, however well it is numbered.
        way = way if len(sequences) > 1 else "alone"
        matcher.counts[f"matched-{way}"] += _store(matcher, key, sequences, numbered)


Numbers = dict[int, list[int]]
"""Rank -> number of the instance of each of its operations."""


def _by_id(
    matcher: _Matcher, members: dict[int, list[int]], sequences: dict[int, OpSequence]
) -> tuple[str, Numbers | None]:
    """Instances by ``Comms Id``, else by ``Seq``; null when they are absent or contradict."""
    for attribute in ("comms_id", "seq"):
        name = attribute.replace("_", "-")
        recorded: dict[int, Sequence[int | None]] = {
            rank: getattr(matcher.ranks[rank], attribute) for rank in members
        }
        if any(recorded[rank][at] is None for rank, places in members.items() for at in places):
            continue
        ids: dict[int, list[tuple[int | None, int]]] = {}
        for rank, positions in members.items():
            # Operations of a coalesced launch share a number and are told apart by their order.
            seen: Counter[int | None] = Counter()
            ids[rank] = []
            for position in positions:
                value = recorded[rank][position]
                ids[rank].append((value, seen[value]))
                seen[value] += 1
        order: dict[tuple[int | None, int], int] = {}
        for rank in sorted(ids):
            for entry in ids[rank]:
                order.setdefault(entry, len(order))
        numbers = {rank: [order[entry] for entry in entries] for rank, entries in ids.items()}
        if _ids_agree(sequences, numbers) and not _order_is_better(sequences, numbers):
            return f"by-{name}", numbers
        matcher.counts[f"contradicting-{name}"] += 1
    return "", None


def _order_is_better(sequences: dict[int, OpSequence], numbers: Numbers) -> bool:
    """Whether numbers leave operations alone that fit each other perfectly by position.

    Some versions count differently on different ranks.
    """
    reference, *others = sorted(sequences)
    if all(set(numbers[rank]) == set(numbers[reference]) for rank in others):
        return False
    a = sequences[reference]
    return all(
        len(b) == len(a)
        and (overlay := best_overlay(a, b)).shift == 0
        and overlay.agreeing == len(a)
        and not overlay.violations
        for b in (sequences[rank] for rank in others)
    )


def _ids_agree(sequences: dict[int, OpSequence], numbers: Numbers) -> bool:
    """Operations with one number look alike, and each rank meets common numbers in order."""
    reference = min(sequences)
    a = sequences[reference].without_steps()
    place = {number: k for k, number in enumerate(numbers[reference])}
    for rank, sequence in sequences.items():
        common = [(place[n], k) for k, n in enumerate(numbers[rank]) if n in place]
        if not common:
            return False
        at, bt = np.array(common, dtype=np.int64).T
        if (np.diff(at) <= 0).any():
            return False
        if not agree(a, sequence, at, bt, p2p=False).all():
            return False
    return True


def _by_order(matcher: _Matcher, key: GroupKey, sequences: dict[int, OpSequence]) -> Numbers | None:
    """Instances by position, after shifting each rank to the one that recorded most."""
    reference = max(sequences, key=lambda rank: (len(sequences[rank]), -rank))
    numbers: Numbers = {}
    for rank, sequence in sequences.items():
        best = best_overlay(sequences[reference], sequence)
        if best.agreeing < best.overlap:
            # Ranks may count their steps differently.
            plain = best_overlay(sequences[reference].without_steps(), sequence)
            if plain.agreeing == plain.overlap and not plain.violations:
                matcher.counts["steps-differ"] += 1
                best = plain
        if best.agreeing < best.overlap:
            if matcher.keep_unmatched:
                matcher.counts["kept-unmatched"] += sum(map(len, sequences.values()))
                return None
            raise _mismatch(matcher, key, sequences[reference], sequence, best)
        matcher.counts["ambiguous-window"] += best.ambiguous
        shift = 0 if rank == reference else best.shift
        numbers[rank] = [k + shift for k in range(len(sequence))]
    return numbers


def _hint(matcher: _Matcher, text: str) -> str:
    """`text`, and what else may be meant where flight recorders take part."""
    if matcher.counts["group-from-flight-recorder"]:
        text += "; or the flight-recorder dumps, which tell groups here, are of another job"
    return (
        f"{text}; --unmatched keep takes them as they are; of a job that stands still `prismtrace "
        "hang DUMPS` tells who is waited for"
    )


def _mismatch(
    matcher: _Matcher,
    key: GroupKey,
    a: OpSequence,
    b: OpSequence,
    best: Overlay,
    *,
    p2p: bool = False,
) -> AlignmentError:
    at, bt = best.slices(a, b)
    first = int(np.argmin(agree(a, b, at, bt, p2p=p2p)))
    return AlignmentError(
        f"communications do not match: rank {a.rank} has {len(a)}, rank {b.rank} has {len(b)} "
        f"in group {key.label}, and at best {best.agreeing} of {best.overlap} agree; e.g. "
        f"{a.describe(at.start + first)} against {b.describe(bt.start + first)}",
        where=f"ranks {a.rank} and {b.rank}, group {key.label}",
        hint=_hint(
            matcher,
            "the traces are of different steps or jobs, or their events were sampled or "
            "dropped; profile the same steps on all ranks with every event kept",
        ),
    )


def _store(
    matcher: _Matcher, key: GroupKey, sequences: dict[int, OpSequence], numbers: Numbers
) -> int:
    """Number the instances that every recorded member has; count what is left over.

    Returns:
        How many there are.

    Raises:
        AlignmentError: they cannot have happened, or too many operations are missing.
    """
    present = sorted(sequences)
    silent = [rank for rank in key.ranks if rank in matcher.ranks and rank not in sequences]
    if silent and not matcher.keep_unmatched:
        raise AlignmentError(
            f"{name_ranks(silent)} recorded no communication in group {key.label}, "
            f"{name_ranks(present)} recorded {len(sequences[present[0]])}",
            where=f"group {key.label}",
            hint=_hint(
                matcher, "the traces are of different steps, or communication events were dropped"
            ),
        )
    common = set(numbers[present[0]]).intersection(*(numbers[rank] for rank in present[1:]))
    if silent:
        common = set()
    dense = {n: k for k, n in enumerate(n for n in numbers[present[0]] if n in common)}
    _check_times(matcher, key, sequences, numbers, dense)
    for rank in present:
        assignment = matcher.assignments[rank]
        known = [k for k, number in enumerate(numbers[rank]) if number in common]
        first, last = (known[0], known[-1]) if known else (0, -1)
        inside = last - first + 1 - len(known)
        matcher.counts["unmatched-head"] += first
        matcher.counts["unmatched-inside"] += inside
        matcher.counts["unmatched-tail"] += len(numbers[rank]) - 1 - last
        if inside > _MAX_IMPOSSIBLE * len(known) and not matcher.keep_unmatched:
            raise AlignmentError(
                f"{inside} communications of rank {rank} in group {key.label} are missing on "
                f"other ranks, between {len(known)} that are not",
                where=f"rank {rank}, group {key.label}",
                hint=_hint(
                    matcher, "events were sampled or dropped; profile with every event kept"
                ),
            )
        for position, number in zip(sequences[rank].positions, numbers[rank], strict=True):
            assignment.seq[position] = dense.get(number)
    return len(dense)


def _check_times(
    matcher: _Matcher,
    key: GroupKey,
    sequences: dict[int, OpSequence],
    numbers: Numbers,
    dense: dict[int, int],
) -> None:
    """Refuse a matching whose instances could not have happened together."""
    reference, *others = sorted(sequences)
    chosen = {
        rank: np.array([k for k, number in enumerate(numbers[rank]) if number in dense], np.int64)
        for rank in sequences
    }
    for rank in others:
        a, b = sequences[reference], sequences[rank]
        wrong = violations(a, b, chosen[reference], chosen[rank])
        matcher.counts["impossible-times"] += wrong
        if wrong > _MAX_IMPOSSIBLE * len(dense) and not matcher.keep_unmatched:
            raise AlignmentError(
                f"{wrong} of {len(dense)} matched communications of group {key.label} cannot "
                f"have happened together on ranks {reference} and {rank}: one had ended before "
                "the other started"
                + (
                    ", and no clock offset explains it"
                    if a.host is None or a.host != b.host
                    else ""
                ),
                where=f"group {key.label}",
                hint="events are missing on some rank (sampled or dropped), or the traces are of "
                "different steps or runs",
            )


def _match_pair(
    matcher: _Matcher,
    pair: tuple[GroupKey, int, int],
    sides: dict[Kind, tuple[int, list[int]]],
) -> None:
    """Number sends and recvs between two ranks: first in, first out, each tag for itself."""
    key, sender, receiver = pair
    for rank, positions in sides.values():
        tag = matcher.ranks[rank].tag
        if tag is not None:
            positions.sort(key=tag.__getitem__)
    sequences = {
        kind: _sequence(matcher, rank, positions) for kind, (rank, positions) in sides.items()
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
    best = best_overlay(sends, recvs, p2p=True)
    if best.agreeing < best.overlap:
        if matcher.keep_unmatched:
            matcher.counts["kept-unmatched"] += len(sends) + len(recvs)
            return
        raise _mismatch(matcher, key, sends, recvs, best, p2p=True)
    matcher.counts["ambiguous-window"] += best.ambiguous
    at, bt = best.slices(sends, recvs)
    for sequence, chosen in ((sends, at), (recvs, bt)):
        assignment = matcher.assignments[sequence.rank]
        for k, position in enumerate(sequence.positions[chosen]):
            assignment.seq[position] = k
        matcher.counts["unmatched-p2p"] += len(sequence) - (chosen.stop - chosen.start)
    matcher.counts["matched-p2p"] += at.stop - at.start
