from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismtrace.converters.groups import GroupBook, GroupKey, NamedGroup
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.matching import match
from prismtrace.converters.placing import Assignment, RankComms
from prismtrace.errors import AlignmentError, GroupError
from prismtrace.schema import DType, Kind

MS = 1_000_000


class Op:
    """One operation of a rank: what it says, and when it ran (ms)."""

    def __init__(
        self,
        start: float,
        end: float,
        *,
        seq: int | None = None,
        comms_id: int | None = None,
        step: int | None = None,
        kind: Kind = Kind.ALL_REDUCE,
        **says: Any,
    ) -> None:
        self.start, self.end = round(start * MS), round(end * MS)
        self.seq, self.comms_id, self.step = seq, comms_id, step
        says = {"nbytes": 1024, "dtype": DType.BFLOAT16, "group_name": "0", **says}
        self.comm = CommOp(kind, **says)


def rank_comms(
    rank: int, ops: Sequence[Op], *, host: str | None = None, clock: int = 0
) -> RankComms:
    return RankComms(
        rank=rank,
        index=np.arange(len(ops)),
        comm=[op.comm for op in ops],
        start_ns=np.array([op.start + clock for op in ops], dtype=np.int64),
        end_ns=np.array([op.end + clock for op in ops], dtype=np.int64),
        seq=[op.seq for op in ops],
        comms_id=[op.comms_id for op in ops],
        step=[op.step for op in ops],
        host=host,
    )


def run(
    *ranks: RankComms,
    groups: dict[str, tuple[int, ...]] | None = None,
    world_size: int = 0,
    keep: bool = False,
) -> tuple[dict[int, Assignment], Counter[str]]:
    world_size = world_size or max(comms.rank for comms in ranks) + 1
    counts: Counter[str] = Counter()
    groups = {"0": tuple(range(world_size))} if groups is None else groups
    listed = {
        comms.rank: [
            NamedGroup(name, "", members)
            for name, members in groups.items()
            if comms.rank in members
        ]
        for comms in ranks
    }
    book = GroupBook.build(world_size, listed, {}, counts)
    assignments, _ = match(ranks, book, keep_unmatched=keep)
    return assignments, +counts


def history(count: int, *, seed: int = 1, **says: Any) -> list[list[Op]]:
    """The same operations on two ranks: late by up to 2 ms, ending together up to 20 µs."""
    chance = Random(seed)
    both: list[list[Op]] = [[], []]
    end = 0.0
    for _ in range(count):
        end += 5 + 10 * chance.random()
        for ops in both:
            start = end - 0.5 - 2 * chance.random()
            ops.append(Op(start, end + 0.02 * chance.random(), **says))
    return both


def seqs(assignments: dict[int, Assignment]) -> dict[int, list[int | None]]:
    return {rank: assignment.seq for rank, assignment in assignments.items()}


# --- in order ---------------------------------------------------------------------------------


def test_equal_sequences_match_one_to_one() -> None:
    a, b = history(5)
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert seqs(found) == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}
    assert counts == {"matched-by-order": 5}
    assert found[0].group == [GroupKey((0, 1), "0")] * 5
    assert found[0].peer == [None] * 5
    assert found[0].nbytes == [1024] * 5


@pytest.mark.parametrize("host", [None, "one"])
@pytest.mark.parametrize(("head", "tail"), [(1, 0), (0, 3), (4, 2)])
def test_windows_that_begin_and_end_at_different_operations(
    host: str | None, head: int, tail: int
) -> None:
    a, b = history(40)
    found, counts = run(rank_comms(0, a, host=host), rank_comms(1, b[head : 40 - tail], host=host))
    inner = list(range(40 - head - tail))
    assert found[0].seq == [None] * head + inner + [None] * tail
    assert found[1].seq == inner
    assert counts["unmatched-head"] == head
    assert counts["unmatched-tail"] == tail
    assert counts["matched-by-order"] == len(inner)


def test_windows_that_overlap_in_the_middle_on_different_clocks() -> None:
    a, b = history(60)
    found, counts = run(rank_comms(0, a[:50]), rank_comms(1, b[7:], clock=3_500 * MS))
    assert found[0].seq == [None] * 7 + list(range(43))
    assert found[1].seq == list(range(43)) + [None] * 10
    assert (counts["unmatched-head"], counts["unmatched-tail"]) == (7, 10)


def test_constant_periods_are_told_by_a_common_clock_or_counted() -> None:
    whole = [[Op(10 * k, 10 * k + 5) for k in range(40)] for _ in range(2)]
    a, b = whole[0], whole[1][3:]
    found, counts = run(rank_comms(0, a, host="one"), rank_comms(1, b, host="one"))
    assert found[0].seq == [None] * 3 + list(range(37))
    assert counts["ambiguous-window"] == 0
    _, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert counts["ambiguous-window"] == 1


def test_step_numbers_tell_windows_that_differ_by_whole_steps() -> None:
    # Strictly periodic, clocks unknown: only the numbers of the steps tell.
    whole = [[Op(10 * k, 10 * k + 5, step=k // 100) for k in range(400)] for _ in range(2)]
    found, counts = run(rank_comms(0, whole[0][:300]), rank_comms(1, whole[1][100:], clock=MS))
    assert found[0].seq == [None] * 100 + list(range(200))
    assert found[1].seq == list(range(200)) + [None] * 100
    assert counts["matched-by-order"] == 200


def test_ranks_that_count_steps_differently() -> None:
    a, b = history(6)
    for k, (one, two) in enumerate(zip(a, b, strict=True)):
        one.step, two.step = k // 3, 7 + k // 3
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == list(range(6))
    assert counts == {"matched-by-order": 6, "steps-differ": 1}


@pytest.mark.parametrize("offset_s", [-7, 3, 86_400])
def test_clocks_of_hosts_that_differ(offset_s: int) -> None:
    a, b = history(20)
    found, _ = run(
        rank_comms(0, a, host="a"), rank_comms(1, b, host="b", clock=offset_s * 1000 * MS)
    )
    assert seqs(found) == {0: list(range(20)), 1: list(range(20))}


def test_clocks_that_drift() -> None:
    a, b = history(3000)
    for op in b:
        op.start += op.start // 40_000
        op.end += op.end // 40_000
    found, counts = run(rank_comms(0, a, host="a"), rank_comms(1, b, host="b"))
    assert found[1].seq == list(range(3000))
    assert counts == {"matched-by-order": 3000}


def test_unknown_properties_agree_with_anything() -> None:
    a, b = history(6)
    blind = [
        Op(op.start / MS, op.end / MS, nbytes=None, dtype=None, kind=Kind.OTHER_COMM) for op in b
    ]
    found, _ = run(rank_comms(0, a), rank_comms(1, blind))
    assert found[1].seq == list(range(6))


def test_sizes_of_all_to_all_may_differ() -> None:
    a = [Op(0, 5, kind=Kind.ALL_TO_ALL, nbytes=100), Op(10, 15, nbytes=8)]
    b = [Op(1, 5, kind=Kind.ALL_TO_ALL, nbytes=700), Op(11, 15, nbytes=8)]
    found, _ = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == [0, 1]
    assert (found[0].nbytes[0], found[1].nbytes[0]) == (100, 700)


def test_different_operations_are_refused() -> None:
    a = [Op(10 * k, 10 * k + 5) for k in range(8)]
    b = [Op(10 * k, 10 * k + 5, nbytes=2048 if k % 2 else 1024) for k in range(8)]
    with pytest.raises(AlignmentError) as caught:
        run(rank_comms(0, a), rank_comms(1, b))
    message = str(caught.value)
    assert "ranks 0 and 1" in message
    assert "1024 bytes" in message
    assert "2048 bytes" in message
    found, counts = run(rank_comms(0, a), rank_comms(1, b), keep=True)
    assert seqs(found) == {0: [None] * 8, 1: [None] * 8}
    assert counts["kept-unmatched"] == 16


@pytest.mark.parametrize("host", [None, "one"])
def test_a_lost_operation_is_noticed_by_the_clocks(host: str | None) -> None:
    a, b = history(100)
    with pytest.raises(AlignmentError, match="cannot have happened together"):
        run(rank_comms(0, a, host=host), rank_comms(1, b[:50] + b[51:], host=host))


def test_sampled_operations_are_refused() -> None:
    a, b = history(200)
    keep = [k for k in range(200) if Random(k).random() < 0.5]
    other = [k for k in range(200) if Random(-k - 1).random() < 0.5]
    with pytest.raises(AlignmentError):
        run(rank_comms(0, [a[k] for k in keep]), rank_comms(1, [b[k] for k in other]))


def test_a_rank_without_any_operation_is_refused() -> None:
    a, _ = history(4)
    with pytest.raises(AlignmentError, match="rank 1 recorded no communication"):
        run(rank_comms(0, a), rank_comms(1, []))
    found, _ = run(rank_comms(0, a), rank_comms(1, []), keep=True)
    assert found[0].seq == [None] * 4


def test_ranks_that_were_not_recorded_are_not_missed() -> None:
    a, b = history(4)
    found, _ = run(rank_comms(0, a), rank_comms(3, b), world_size=8)
    assert seqs(found) == {0: [0, 1, 2, 3], 3: [0, 1, 2, 3]}


# --- by number --------------------------------------------------------------------------------


def numbered(attribute: str, numbers: Sequence[int | None], **more: Any) -> list[Op]:
    return [
        Op(10 * k, 10 * k + 5, **{attribute: number}, **more) for k, number in enumerate(numbers)
    ]


@pytest.mark.parametrize("attribute", ["seq", "comms_id"])
def test_numbers_tell_the_instance(attribute: str) -> None:
    a = numbered(attribute, [7, 8, 9, 2**64 - 1])
    b = numbered(attribute, [8, 9, 2**64 - 1])
    found, counts = run(rank_comms(0, a), rank_comms(1, b, clock=99 * MS))
    assert seqs(found) == {0: [None, 0, 1, 2], 1: [0, 1, 2]}
    assert counts["unmatched-head"] == 1
    assert counts[f"matched-by-{attribute.replace('_', '-')}"] == 3


def test_comms_id_comes_before_seq() -> None:
    a = [Op(10 * k, 10 * k + 5, seq=k, comms_id=100 + k) for k in range(3)]
    b = [Op(10 * k, 10 * k + 5, seq=k + 1, comms_id=100 + k) for k in range(3)]
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == [0, 1, 2]
    assert counts == {"matched-by-comms-id": 3}


def test_numbers_that_contradict_fall_back_to_order() -> None:
    a = [Op(10 * k, 10 * k + 5, seq=k, nbytes=100 + k) for k in range(4)]
    b = [Op(10 * k, 10 * k + 5, seq=k + 1, nbytes=100 + k) for k in range(4)]
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == [0, 1, 2, 3]
    assert counts == {"matched-by-order": 4, "contradicting-seq": 1}


def test_numbers_that_descend_fall_back_to_order() -> None:
    a, b = numbered("seq", [1, 2, 3]), numbered("seq", [1, 3, 2])
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == [0, 1, 2]
    assert counts["contradicting-seq"] == 1


def test_numbers_missing_on_one_rank_fall_back_to_order() -> None:
    a, b = numbered("seq", [1, 2, 3]), numbered("seq", [1, None, 3])
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == [0, 1, 2]
    assert counts == {"matched-by-order": 3}


def test_operations_of_a_coalesced_launch_share_a_number() -> None:
    a, b = numbered("seq", [4, 4, 4, 5]), numbered("seq", [4, 4, 4, 5])
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[1].seq == [0, 1, 2, 3]
    assert counts == {"matched-by-seq": 4}


def test_numbers_survive_a_lost_operation_but_not_sampling() -> None:
    a = numbered("seq", range(100))
    b = [op for k, op in enumerate(numbered("seq", range(100))) if k != 40]
    found, counts = run(rank_comms(0, a), rank_comms(1, b))
    assert found[0].seq[39:42] == [39, None, 40]
    assert found[1].seq == list(range(99))
    assert counts["unmatched-inside"] == 1
    half = [op for k, op in enumerate(numbered("seq", range(100))) if k % 2 or k in (0, 99)]
    with pytest.raises(AlignmentError, match="missing on other ranks"):
        run(rank_comms(0, a), rank_comms(1, half))


# --- groups -----------------------------------------------------------------------------------


def test_groups_are_matched_apart() -> None:
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    tensor = {0: "1", 1: "1", 2: "2", 3: "2"}
    data = {0: "3", 1: "4", 2: "3", 3: "4"}
    ranks = [
        rank_comms(
            rank,
            [
                Op(10 * k, 10 * k + 5, group_name=(data if k % 3 == 2 else tensor)[rank])
                for k in range(6)
            ],
        )
        for rank in range(4)
    ]
    found, counts = run(*ranks, groups=groups)
    assert seqs(found) == {rank: [0, 1, 0, 2, 3, 1] for rank in range(4)}
    assert counts == {"matched-by-order": 2 * 4 + 2 * 2}


def test_an_operation_without_group_is_refused_or_kept() -> None:
    groups = {"1": (0, 1), "2": (0, 1, 2)}
    blind = [Op(0, 5, group_name=None), Op(10, 15, group_name="1")]
    with pytest.raises(GroupError, match="names no process group and 2 fit"):
        run(rank_comms(0, blind), rank_comms(1, blind), groups=groups, world_size=3)
    found, counts = run(
        rank_comms(0, blind), rank_comms(1, blind), groups=groups, world_size=3, keep=True
    )
    assert found[0].group == [None, GroupKey((0, 1), "1")]
    assert found[0].seq == [None, 0]
    assert counts["kept-without-group"] == 2


def test_what_was_launched_before_the_recording_is_kept_without_group() -> None:
    groups = {"1": (0, 1), "2": (0, 1, 2)}
    ops = [Op(0, 5, group_name=None, early=True), Op(10, 15, group_name="1")]
    found, counts = run(rank_comms(0, ops), rank_comms(1, ops), groups=groups, world_size=3)
    assert found[0].seq == [None, 0]
    assert counts == {"early-without-group": 2, "matched-by-order": 1}


def test_a_share_of_an_all_gather_becomes_the_whole() -> None:
    ops = [Op(0, 5, kind=Kind.ALL_GATHER, nbytes=10, share=True)]
    found, _ = run(rank_comms(0, ops), rank_comms(1, ops), world_size=4)
    assert found[0].nbytes == [40]


# --- p2p --------------------------------------------------------------------------------------


def p2p(kind: Kind, peer: int, start: float, **says: Any) -> Op:
    return Op(start, start + 5, kind=kind, peer=peer, **says)


def test_p2p_first_in_first_out_per_direction() -> None:
    zero = [p2p(Kind.SEND, 1, 0), p2p(Kind.SEND, 1, 10), p2p(Kind.RECV, 1, 20)]
    one = [p2p(Kind.RECV, 0, 1), p2p(Kind.SEND, 0, 21), p2p(Kind.RECV, 0, 11)]
    found, counts = run(rank_comms(0, zero), rank_comms(1, one))
    assert seqs(found) == {0: [0, 1, 0], 1: [0, 0, 1]}
    assert found[0].peer == [1, 1, 1]
    assert counts == {"matched-p2p": 3}


def test_p2p_numbers_of_the_two_sides_are_ignored() -> None:
    zero = [p2p(Kind.SEND, 1, 10 * k, seq=k) for k in range(3)]
    one = [p2p(Kind.RECV, 0, 10 * k, seq=40 + k) for k in range(3)]
    found, _ = run(rank_comms(0, zero), rank_comms(1, one))
    assert found[1].seq == [0, 1, 2]


def test_p2p_windows_that_begin_at_different_operations() -> None:
    sizes = [8, 16, 24, 32, 40]
    zero = [p2p(Kind.SEND, 1, 10 * k, nbytes=size) for k, size in enumerate(sizes)]
    one = [p2p(Kind.RECV, 0, 10 * k, nbytes=size) for k, size in enumerate(sizes)]
    found, counts = run(rank_comms(0, zero), rank_comms(1, one[2:]))
    assert seqs(found) == {0: [None, None, 0, 1, 2], 1: [0, 1, 2]}
    assert counts["unmatched-p2p"] == 2


def test_p2p_that_does_not_fit_is_refused() -> None:
    zero = [p2p(Kind.SEND, 1, 10 * k, nbytes=8) for k in range(3)]
    one = [p2p(Kind.RECV, 0, 10 * k, nbytes=16) for k in range(3)]
    with pytest.raises(AlignmentError, match="send of bfloat16, 8 bytes, against recv"):
        run(rank_comms(0, zero), rank_comms(1, one))


def test_p2p_with_partners_that_were_not_recorded() -> None:
    found, counts = run(rank_comms(0, [p2p(Kind.SEND, 3, 0), p2p(Kind.SEND, 3, 9)]), world_size=4)
    assert found[0].seq == [0, 1]
    assert counts["matched-p2p"] == 0


def test_p2p_with_a_partner_that_recorded_none() -> None:
    a, b = history(2)
    found, counts = run(rank_comms(0, [*a, p2p(Kind.SEND, 1, 50)]), rank_comms(1, b))
    assert found[0].seq == [0, 1, None]
    assert counts["unmatched-p2p"] == 1


@pytest.mark.parametrize(
    "says", [{}, {"peer": 0}, {"peer": 9}, {"group_peer": 0}, {"group_peer": 5}]
)
def test_p2p_that_does_not_tell_its_partner(says: dict[str, int]) -> None:
    ops = [Op(0, 5, kind=Kind.SEND, **says)]
    with pytest.raises(GroupError, match="does not tell its partner"):
        run(rank_comms(0, ops), world_size=2)


def test_p2p_partner_as_rank_within_the_group() -> None:
    ops = [Op(0, 5, kind=Kind.SEND, group_name="5", group_peer=1)]
    found, _ = run(rank_comms(2, ops), groups={"5": (2, 6)}, world_size=8)
    assert found[2].peer == [6]


# --- whatever the windows ---------------------------------------------------------------------


@given(
    head=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    tail=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    clocks=st.lists(st.integers(-(10**12), 10**12), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_windows_of_one_history_are_matched(
    head: list[int], tail: list[int], clocks: list[int], seed: int
) -> None:
    """Ranks that record parts of one history agree about every operation they share."""
    chance = Random(seed)
    sizes = [chance.choice([8, 64, 512]) for _ in range(50)]
    gaps = [5 + 10 * chance.random() for _ in range(50)]
    ranks = []
    for rank in range(4):
        time, ops = 0.0, []
        for size, gap in zip(sizes, gaps, strict=True):
            time += gap
            end = time + 0.02 * chance.random()
            ops.append(Op(end - 0.3 - 2 * chance.random(), end, nbytes=size))
        ranks.append(rank_comms(rank, ops[head[rank] : 50 - tail[rank]], clock=clocks[rank]))
    found, _ = run(*ranks)
    first, last = max(head), 50 - max(tail)
    for rank, assignment in found.items():
        own = range(head[rank], 50 - tail[rank])
        assert assignment.seq == [k - first if first <= k < last else None for k in own]
