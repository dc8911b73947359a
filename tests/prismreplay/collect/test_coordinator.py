"""The coordinator, with ranks that are played by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismreplay.collect.coordinator import Coordinator
from prismreplay.collect.matching import Request
from prismreplay.collect.scheduling import Policy, in_turn, thrifty
from prismreplay.errors import DeadlockError, MismatchError
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType
from tests.prismreplay.collect.members import op_of

ONE = TensorSpec((1,), DType.INT32)


@dataclass
class Parcel:
    """Bytes that are a list of what ranks put in."""

    data: Any
    nbytes: int = 4
    file: int | None = None


@dataclass
class Summing:
    """Performs every collective as a sum; supplies what is in `known`."""

    known: dict[tuple[int, Call], Any] = field(default_factory=dict)

    def supply(self, rank: int, op: Op, _inputs: Any) -> tuple[Any, Sequence[Any]] | None:
        found = self.known.get((rank, op.call))
        return None if found is None else (Parcel(found), [(0, 4)])

    def perform(self, members: Sequence[Request]) -> list[tuple[Any, Sequence[Any]]]:
        total = sum(one.inputs.data for one in members)
        return [(Parcel(total), [(0, 4)]) for _ in members]


class Table:
    """Ranks as generators: they yield what they ask, and get the answer."""

    def __init__(
        self, programs: Sequence[Callable[[Rank], Any]], slots: int, policy: Policy = thrifty
    ) -> None:
        self.performer = Summing()
        self.coordinator = Coordinator(
            range(len(programs)), slots, self.performer, policy=policy, patient=True
        )
        self.ranks = [Rank(self.coordinator, rank, len(programs)) for rank in range(len(programs))]
        self._running = {
            one.rank: program(one) for one, program in zip(self.ranks, programs, strict=True)
        }
        self.most = 0
        for running in self._running.values():
            next(running)
        for one in self.ranks:
            self.coordinator.begin(one.rank)

    def play(self) -> None:
        """Until all have ended, or nobody can go on."""
        while not self.coordinator.finished:
            self.coordinator.grant()
            self.most = max(self.most, len(self.coordinator.turns.running))
            if not self.coordinator.outbox:
                if self.coordinator.stuck and not self.coordinator.time_out():
                    raise self.coordinator.dispute or self.coordinator.deadlock()
                continue
            sent = self.coordinator.outbox.popleft()
            answer = None if sent.message[0] == "go" else sent.message
            try:
                self._running[sent.rank].send(answer)
            except StopIteration:
                self.coordinator.end(sent.rank)


class Rank:
    """What a rank can say."""

    def __init__(self, coordinator: Coordinator, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._to = coordinator
        self._ticket = self._question = 0
        self._seq: dict[Any, int] = {}
        self.group = Group("0", tuple(range(size)), rank, "gloo")
        coordinator.join(rank, self.group)

    def _next(self, key: Any) -> int:
        self._seq[key] = self._seq.get(key, -1) + 1
        return self._seq[key]

    def start(self, call: Call, value: Any, *, tracked: bool = True, **more: Any) -> int:
        self._ticket += 1
        key = call if call in (Call.SEND, Call.RECV) else "collective"
        seq = self._next((key, more.get("peer")))
        inputs = [] if call is Call.RECV else [ONE]
        outputs = [] if call is Call.SEND else [ONE]
        op = op_of(call, self.size, self.rank, inputs, outputs, seq=seq, group=self.group,
                   site=f"job.py:{self._ticket}", **more)  # fmt: skip
        self._to.submit(self.rank, self._ticket, op, Parcel(value), waits=tracked)
        return self._ticket

    def all_reduce(self, value: int) -> int:
        return self.start(Call.ALL_REDUCE, value)

    def wait(self, ticket: int) -> Any:
        self._question += 1
        self._to.wait(self.rank, self._question, ticket)
        answer = yield
        return answer[2]

    def done(self, ticket: int) -> Any:
        self._question += 1
        self._to.poll(self.rank, self._question, ticket)
        answer = yield
        return answer[2]

    def store(self, op: str, *args: Any) -> Any:
        self._question += 1
        self._to.ask_store(self.rank, self._question, op, args, "job.py:9")
        answer = yield
        return answer[2] if answer[0] == "value" else RuntimeError(answer[2])


def test_a_sum_of_all() -> None:
    got = {}

    def program(me: Rank) -> Any:
        yield  # its first turn
        ticket = me.all_reduce(me.rank)
        got[me.rank] = yield from me.wait(ticket)

    table = Table([program] * 4, slots=1)
    table.play()
    assert got == dict.fromkeys(range(4), 6)
    assert table.coordinator.counts.collectives == 1
    assert table.coordinator.turns.switches == 7  # the last to come goes on at once


@given(st.integers(1, 4), st.sampled_from([thrifty, in_turn]), st.integers(0, 2**32))
def test_results_do_not_depend_on_who_ran_when(slots: int, policy: Policy, seed: int) -> None:
    import random

    rng = random.Random(seed)
    shared = [rng.choice(["sum", "late", "ring", "store"]) for _ in range(rng.randint(0, 8))]
    got: dict[int, list[Any]] = {rank: [] for rank in range(4)}

    def program(me: Rank) -> Any:
        yield
        held = []
        right, left = (me.rank + 1) % 4, (me.rank - 1) % 4
        for number, what in enumerate(shared):
            if what == "ring":
                incoming = me.start(Call.RECV, None, peer=left)
                me.start(Call.SEND, 10 * number + me.rank, peer=right, tracked=False)
                got[me.rank].append((yield from me.wait(incoming)))
            elif what == "store":
                if me.rank == number % 4:
                    yield from me.store("set", f"key{number}", b"%d" % number)
                got[me.rank].append((yield from me.store("get", f"key{number}", 1800.0)))
            else:
                held.append(me.all_reduce(number * (me.rank + 1)))
                if what == "sum":
                    got[me.rank].append((yield from me.wait(held.pop())))
        for ticket in held:
            got[me.rank].append((yield from me.wait(ticket)))

    table = Table([program] * 4, slots, policy)
    table.play()
    assert table.most <= slots
    assert table.coordinator.turns.most_running <= slots
    late = [10 * number for number, what in enumerate(shared) if what == "late"]
    for rank in range(4):
        expected: list[Any] = []
        for number, what in enumerate(shared):
            if what == "ring":
                expected.append(10 * number + (rank - 1) % 4)
            elif what == "store":
                expected.append(b"%d" % number)
            elif what == "sum":
                expected.append(10 * number)
        assert got[rank] == expected + late


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    def program(me: Rank) -> Any:
        yield
        yield from me.wait(me.start(Call.RECV, None, peer=1 - me.rank))

    with pytest.raises(DeadlockError, match="2 ranks blocked; they wait for each other") as caught:
        Table([program] * 2, slots=2).play()
    assert "rank 0 waits in recv 0 from rank 1 in group [0-1]  at job.py:1" in caught.value.report
    assert "rank 1 waits in recv 0 from rank 0" in caught.value.report


def test_waiting_for_a_rank_that_has_ended_is_told_although_others_go_on() -> None:
    def member(me: Rank) -> Any:
        yield
        yield from me.wait(me.all_reduce(1))

    def gone(_: Rank) -> Any:
        yield

    with pytest.raises(DeadlockError, match="program of rank 2 has ended without") as caught:
        Table([member, member, gone], slots=3).play()
    assert "ranks 0-1 wait in all_reduce 0 of group [0-2] for rank 2" in caught.value.report
    assert "the program of rank 2 has ended" in caught.value.report


def test_ranks_that_may_come_yet_are_told_from_those_that_have_ended() -> None:
    def waits(me: Rank) -> Any:
        yield
        yield from me.wait(me.all_reduce(1))

    def elsewhere(me: Rank) -> Any:
        yield
        yield from me.store("get", "default|never", 1800.0)

    def gone(_: Rank) -> Any:
        yield

    with pytest.raises(DeadlockError) as caught:
        Table([waits, elsewhere, gone, waits, waits], slots=1).play()
    others = "rank 2 (ended), rank 1 (waiting elsewhere), ranks 3-4 (still running)"
    assert caught.value.report.splitlines()[1:] == [
        f"  rank 0 waits in all_reduce 0 of group [0-4] for {others}  at job.py:1",
        "  rank 1 waits in store get until somebody sets 'never'  at job.py:9",
        "  the program of rank 2 has ended",
        "  ranks 3-4 are still running, and may come yet",
    ]


def test_a_key_that_nobody_sets() -> None:
    def program(me: Rank) -> Any:
        yield
        if me.rank:
            yield from me.store("get", "default|never", 1800.0)
        yield from me.wait(me.all_reduce(1))

    with pytest.raises(DeadlockError, match="nobody sets the keys that rank 1 waits for") as caught:
        Table([program] * 2, slots=1).play()
    assert "store get until somebody sets 'never'  at job.py:9" in caught.value.report


def test_an_impatient_wait_fails_in_the_program_when_nobody_can_go_on() -> None:
    got = {}

    def program(me: Rank) -> Any:
        yield
        if me.rank:
            got[me.rank] = yield from me.store("wait", ["never"], 2.0)
        yield from me.wait(me.all_reduce(1))

    Table([program] * 2, slots=1).play()
    assert "timed out" in str(got[1])


def test_a_rank_that_keeps_asking_does_not_keep_others_from_running() -> None:
    asked = []

    def program(me: Rank) -> Any:
        yield
        ticket = me.all_reduce(1)
        while not (yield from me.done(ticket)):
            asked.append(me.rank)
        yield from me.wait(ticket)

    Table([program] * 3, slots=1).play()
    assert len(asked) < 20


def test_what_is_supplied_needs_no_partners() -> None:
    got = {}

    def program(me: Rank) -> Any:
        yield
        got[me.rank] = yield from me.wait(me.all_reduce(1))

    table = Table([program] * 3, slots=1)
    table.performer.known = {(rank, Call.ALL_REDUCE): 7 for rank in range(3)}
    table.play()
    assert got == {0: 7, 1: 7, 2: 7}
    assert table.coordinator.counts.supplied == 3
    assert set(table.coordinator.turns.taken.values()) == {1}
    assert table.coordinator.turns.switches == 3


def test_a_lent_turn_lets_another_rank_run() -> None:
    coordinator = Coordinator(range(2), 1, Summing())
    coordinator.begin(0)
    coordinator.begin(1)
    coordinator.grant()
    assert list(coordinator.turns.running) == [0]
    coordinator.lend(0)
    coordinator.grant()
    assert list(coordinator.turns.running) == [1]
    coordinator.end(1)
    assert not coordinator.stuck  # rank 0 is only asleep


def test_the_first_operation_that_does_not_fit_stops_the_run() -> None:
    def program(me: Rank) -> Any:
        yield
        yield from me.wait(me.start(Call.ALL_REDUCE if me.rank else Call.BARRIER, 1))

    with pytest.raises(MismatchError, match="disagree on the operation"):
        Table([program] * 2, slots=2).play()


def test_a_third_rank_tells_which_of_two_is_wrong() -> None:
    def program(me: Rank) -> Any:
        yield
        yield from me.wait(me.start(Call.BARRIER if me.rank == 1 else Call.ALL_REDUCE, 1))

    told = r"rank 1 and ranks [023,-]+ disagree on the operation: barrier on rank 1"
    with pytest.raises(MismatchError, match=told):
        Table([program] * 4, slots=2).play()


def test_two_ranks_that_differ_are_told_of_where_the_third_ends() -> None:
    def program(me: Rank) -> Any:
        yield
        if me.rank < 2:
            yield from me.wait(me.start(Call.ALL_REDUCE if me.rank else Call.BARRIER, 1))

    with pytest.raises(MismatchError, match=r"ranks \d and \d disagree on the operation"):
        Table([program] * 3, slots=2).play()


def test_two_ranks_that_differ_are_told_of_where_the_third_waits_for_them() -> None:
    def program(me: Rank) -> Any:
        yield
        if me.rank == 2:
            yield from me.wait(me.start(Call.RECV, 1, peer=0))
        else:
            yield from me.wait(me.start(Call.ALL_REDUCE if me.rank else Call.BARRIER, 1))

    with pytest.raises(MismatchError, match=r"ranks \d and \d disagree on the operation"):
        Table([program] * 3, slots=2).play()


def test_who_waits_while_another_still_computes() -> None:
    coordinator = Coordinator(range(2), 2, Summing())
    ranks = [Rank(coordinator, rank, 2) for rank in range(2)]
    for one in ranks:
        coordinator.begin(one.rank)
    coordinator.grant()
    assert coordinator.standing() == ""
    next(ranks[0].wait(ranks[0].all_reduce(1)))
    assert coordinator.standing().splitlines()[1:] == [
        "  rank 0 waits in all_reduce 0 of group [0-1] for rank 1  at job.py:1",
        "  rank 1 is still running, and may come yet",
    ]


def test_messages_that_nobody_receives_are_counted() -> None:
    def program(me: Rank) -> Any:
        yield
        if me.rank == 0:
            me.start(Call.SEND, 1, peer=1, tracked=False)

    table = Table([program] * 2, slots=1)
    table.play()
    assert table.coordinator.unreceived() == 1


def test_a_rank_that_is_far_ahead_waits_until_its_message_is_received() -> None:
    order = []

    def program(me: Rank) -> Any:
        yield
        if me.rank == 0:
            me.start(Call.SEND, 1, peer=1, tracked=False)
            yield from me.wait(me.start(Call.SEND, 2, peer=1))
        else:
            order.append((yield from me.wait(me.start(Call.RECV, None, peer=0))))
            order.append((yield from me.wait(me.start(Call.RECV, None, peer=0))))
        order.append(f"end {me.rank}")

    Table([program] * 2, slots=1).play()
    assert order == [1, 2, "end 1", "end 0"]
