from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismreplay.collect.residency import Decision, Do, Residency, Whereabouts
from prismreplay.errors import SwapError

GIB = 1 << 30


def filled(budget: int, host: int, sizes: dict[int, int], disk: int = 0) -> Residency:
    """A GPU with ranks that take so much, entered in this order."""
    ranks = Residency(budget, host, disk)
    for rank, size in sizes.items():
        ranks.entered(rank)
        ranks.resize(rank, size)
    return ranks


def test_ranks_that_fit_stay():
    ranks = filled(10 * GIB, 100 * GIB, {0: 3 * GIB, 1: 3 * GIB})
    assert ranks.decide(2, running=()) == Decision(Do.ADMIT, 2)


def test_the_rank_that_had_a_turn_longest_ago_leaves():
    ranks = filled(10 * GIB, 100 * GIB, {0: 4 * GIB, 1: 4 * GIB})
    ranks.entered(0)
    assert ranks.decide(2, running=()) == Decision(Do.EVICT, 1)
    ranks.left(1)
    assert ranks.decide(2, running=()) == Decision(Do.ADMIT, 2)
    assert ranks.where(1) is Whereabouts.HOST


def test_a_rank_that_computes_stays_and_is_waited_for():
    ranks = filled(10 * GIB, 100 * GIB, {0: 6 * GIB})
    assert ranks.decide(1, running=[0]) == Decision(Do.WAIT, 1)
    assert ranks.decide(1, running=[]) == Decision(Do.EVICT, 0)


def test_nobody_leaves_for_a_rank_that_would_not_fit_beside_those_that_compute():
    ranks = filled(10 * GIB, 100 * GIB, {0: 6 * GIB, 1: 3 * GIB})
    ranks.resize(2, 5 * GIB)
    assert ranks.decide(2, running=[0]) == Decision(Do.WAIT, 2)


def test_memory_that_allocators_only_keep_is_asked_for_first():
    ranks = filled(10 * GIB, 100 * GIB, {0: 4 * GIB, 1: 4 * GIB})
    ranks.resize(0, 4 * GIB, cached=3 * GIB)
    ranks.resize(1, 4 * GIB, cached=GIB)
    ranks.resize(2, 2 * GIB)
    assert ranks.decide(2, running=[1]) == Decision(Do.TRIM, 0)
    ranks.trimmed(0)
    ranks.resize(0, GIB)
    assert ranks.decide(2, running=[1]) == Decision(Do.ADMIT, 2)


def test_a_new_rank_counts_with_the_most_that_another_took():
    ranks = filled(10 * GIB, 100 * GIB, {0: 2 * GIB})
    ranks.resize(0, 2 * GIB, peak=9 * GIB)
    assert ranks.expected(1) == 9 * GIB
    assert ranks.decide(1, running=()) == Decision(Do.EVICT, 0)


def test_ranks_that_came_while_they_were_small_make_room_as_others_grow():
    ranks = filled(10 * GIB, 100 * GIB, dict.fromkeys(range(4), GIB))
    assert ranks.has_room(0, running=())
    ranks.resize(0, 6 * GIB)
    assert not ranks.has_room(1, running=())  # 6 + 1 + 1, and 6 that rank 1 may come to take
    assert ranks.decide(1, running=[0]) == Decision(Do.WAIT, 1)
    assert ranks.decide(1, running=()) == Decision(Do.EVICT, 0)
    ranks.left(0)
    assert ranks.has_room(1, running=())


def test_a_rank_that_is_there_computes_where_nobody_can_make_room():
    ranks = filled(10 * GIB, 100 * GIB, {0: 6 * GIB, 1: GIB})
    assert ranks.decide(1, running=(), stuck={0}) == Decision(Do.ADMIT, 1)
    ranks.left(0)
    assert not ranks.has_room(1, running=(), free=GIB)
    assert ranks.decide(1, running=(), free=GIB) == Decision(Do.ADMIT, 1)
    ranks.left(1)
    assert not ranks.has_room(1, running=())


def test_a_rank_larger_than_the_budget_has_the_gpu_to_itself():
    ranks = filled(10 * GIB, 100 * GIB, {0: 2 * GIB})
    ranks.resize(1, 30 * GIB)
    assert ranks.decide(1, running=()) == Decision(Do.EVICT, 0)
    ranks.left(0)
    assert ranks.decide(1, running=()) == Decision(Do.ADMIT, 1)


def test_without_room_on_the_host_the_longest_away_goes_to_disk():
    ranks = filled(4 * GIB, 4 * GIB, {0: 3 * GIB, 1: 3 * GIB}, disk=10 * GIB)
    ranks.left(0)
    assert ranks.decide(2, running=()) == Decision(Do.SPILL, 0)
    ranks.spilled(0)
    assert ranks.decide(2, running=()) == Decision(Do.EVICT, 1)


def test_without_room_anywhere_it_says_how_much_is_missing():
    ranks = filled(4 * GIB, 4 * GIB, {0: 3 * GIB, 1: 3 * GIB})
    ranks.left(0)
    with pytest.raises(SwapError, match=r"3\.0 GiB of host memory.*3\.0 GiB more") as caught:
        ranks.decide(2, running=())
    assert "--fold dp" in caught.value.hint


def test_what_others_took_of_the_gpu_counts():
    ranks = filled(10 * GIB, 100 * GIB, {0: 4 * GIB, 1: 2 * GIB})
    ranks.left(0)
    assert ranks.decide(0, running=(), free=GIB) == Decision(Do.EVICT, 1)
    ranks.left(1)
    with pytest.raises(SwapError, match=r"4\.0 GiB of rank 0; 1\.0 GiB of the GPU are free"):
        ranks.decide(0, running=(), free=GIB)


def test_ranks_that_the_driver_cannot_move_are_passed_over():
    ranks = filled(10 * GIB, 100 * GIB, {0: 4 * GIB, 1: 4 * GIB})
    assert ranks.decide(2, running=(), stuck={0}) == Decision(Do.EVICT, 1)
    with pytest.raises(SwapError, match="no room"):
        ranks.decide(2, running=(), stuck={0, 1})


def test_ranks_that_wait_for_the_one_that_comes_leave_last():
    ranks = filled(10 * GIB, 100 * GIB, {0: 4 * GIB, 1: 4 * GIB})
    assert ranks.decide(2, running=(), soon=[0]) == Decision(Do.EVICT, 1)
    assert ranks.decide(2, running=(), soon=[0, 1]) == Decision(Do.EVICT, 0)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(2, 12),
    count=st.integers(1, 9),
    spare=st.integers(0, 20),
    slots=st.integers(1, 3),
    data=st.data(),
)
def test_ranks_that_grow_in_their_turns_stay_in_the_budget(size, count, spare, slots, data):
    """All are alike and begin with 1; but for the first, it is known how large one may become."""
    budget = size + spare
    ranks = Residency(budget, size * count)
    ranks.resize(0, 1, peak=size)
    sizes, running = dict.fromkeys(range(count), 1), []
    for rank in range(count):
        ranks.resize(rank, 1)
    for _ in range(30 * count):
        idle = [rank for rank in range(count) if rank not in running]
        rank = data.draw(st.sampled_from(idle), label="next") if idle else None
        while rank is not None and len(running) < slots:
            decision = ranks.decide(rank, running)
            if decision.do is not Do.EVICT:
                break
            assert decision.rank not in (rank, *running)
            ranks.left(decision.rank)
        if rank is not None and len(running) < slots and decision.do is Do.ADMIT:
            ranks.entered(rank)
            assert ranks.has_room(rank, running)
            running.append(rank)
        else:
            rank = running.pop(0)
            sizes[rank] = data.draw(st.integers(sizes[rank], size), label="grows to")
            ranks.resize(rank, sizes[rank])
        assert ranks.taken(Whereabouts.GPU) <= budget


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    budget=st.integers(12, 30),
    slots=st.integers(1, 3),
    data=st.data(),
)
def test_never_over_budget_and_everybody_gets_on(sizes, budget, slots, data):
    """Ranks of known sizes play random turns; the host has room for all."""
    ranks = Residency(budget, sum(sizes))
    left = {rank: data.draw(st.integers(1, 4), label="turns") for rank in range(len(sizes))}
    ready, waiting, running = list(left), [], []
    # A rank that enters for the first time has as much as any: its size becomes known then.
    for rank, size in enumerate(sizes):
        ranks.resize(rank, size)
    for _ in range(60 * len(sizes)):
        if not left:
            break
        while ready and len(waiting) + len(running) < slots:
            waiting.append(ready.pop(data.draw(st.integers(0, len(ready) - 1), label="next")))
        decision = ranks.decide(waiting[0], running) if waiting else None
        if decision is None or decision.do is Do.WAIT:
            assert running, "nobody computes, yet somebody is to wait"
            rank = running.pop(data.draw(st.integers(0, len(running) - 1), label="blocks"))
            left[rank] -= 1
            if left[rank]:
                ready.append(rank)
            else:
                ranks.ended(rank)
                del left[rank]
        elif decision.do is Do.EVICT:
            assert decision.rank not in running
            assert decision.rank != waiting[0]
            ranks.left(decision.rank)
        else:
            assert decision == Decision(Do.ADMIT, waiting[0])
            running.append(waiting.pop(0))
            ranks.entered(running[-1])
        assert ranks.taken(Whereabouts.GPU) <= budget
    assert not left
