"""What belongs together, and what cannot."""

from __future__ import annotations

import pytest

from prismreplay.collect.deadlock import operation
from prismreplay.collect.matching import Matcher
from prismreplay.errors import MismatchError
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType, ReduceOp
from tests.prismreplay.collect.members import op_of

F4, F5 = TensorSpec((4,), DType.FLOAT32), TensorSpec((5,), DType.FLOAT32)
I4 = TensorSpec((4,), DType.INT32)


def all_reduce(rank: int, spec: TensorSpec = F4, **more: object) -> Op:
    return op_of(Call.ALL_REDUCE, 2, rank, [spec], [spec], site=f"a.py:{rank}", **more)


def send(rank: int, to: int, seq: int = 0, spec: TensorSpec = F4, **more: object) -> Op:
    return op_of(Call.SEND, 3, rank, [spec], seq=seq, peer=to, **more)


def recv(rank: int, of: int | None, seq: int = 0, spec: TensorSpec = F4, **more: object) -> Op:
    return op_of(Call.RECV, 3, rank, outputs=[spec], seq=seq, peer=of, **more)


def test_a_collective_is_complete_with_its_last_member() -> None:
    matcher = Matcher()
    first, complete = matcher.arrive(0, 1, all_reduce(0), "x")
    assert not complete
    assert first.instance.missing == [1]
    last, complete = matcher.arrive(1, 1, all_reduce(1), "y")
    assert complete
    assert last.instance is first.instance
    assert last.instance.missing == []


def test_groups_and_numbers_are_apart() -> None:
    matcher = Matcher()
    other = Group("1", (0, 1), 1, "gloo")
    assert not matcher.arrive(0, 1, all_reduce(0), "")[1]
    assert not matcher.arrive(1, 1, all_reduce(1, seq=1), "")[1]
    assert not matcher.arrive(1, 2, all_reduce(1, group=other), "")[1]
    assert matcher.arrive(1, 3, all_reduce(1), "")[1]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (all_reduce(0), op_of(Call.BARRIER, 2, 1), "operation"),
        (all_reduce(0), all_reduce(1, F5), "number of elements"),
        (all_reduce(0), all_reduce(1, I4), "element type"),
        (all_reduce(0), all_reduce(1, reduce_op=ReduceOp.MAX), "reduction"),
        (
            op_of(Call.BROADCAST, 2, 0, [F4], [F4], root=0),
            op_of(Call.BROADCAST, 2, 1, [F4], [F4], root=1),
            "root",
        ),
        (
            op_of(Call.ALL_TO_ALL_SINGLE, 2, 0, [F4], [F4], input_splits=(1, 3)),
            op_of(Call.ALL_TO_ALL_SINGLE, 2, 1, [F4], [F4], output_splits=(2, 2)),
            "elements sent and expected",
        ),
        (
            op_of(Call.ALL_GATHER, 2, 0, [F4], [F4, F4]),
            op_of(Call.ALL_GATHER, 2, 1, [F5], [F4, F5]),
            "number of elements",
        ),
    ],
)
def test_what_does_not_fit_is_refused_when_it_arrives(old: Op, new: Op, what: str) -> None:
    matcher = Matcher()
    matcher.arrive(0, 1, old, "")
    with pytest.raises(MismatchError, match=f"disagree on the {what}") as caught:
        matcher.arrive(1, 1, new, "")
    assert "rank 1" in str(caught.value)
    assert "rank 0" in str(caught.value)


def test_the_lines_of_both_ranks_are_named() -> None:
    matcher = Matcher()
    matcher.arrive(0, 1, all_reduce(0), "")
    with pytest.raises(MismatchError, match=r"5 on rank 1 at a\.py:1; 4 on rank 0 at a\.py:0"):
        matcher.arrive(1, 1, all_reduce(1, F5), "")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_third_member_tells_which_of_two_is_wrong(odd: int) -> None:
    matcher = Matcher(patient=True)
    group = Group("0", (0, 1, 2, 3), 0, "gloo")

    def member(rank: int) -> Op:
        spec = F5 if rank == odd else F4
        return all_reduce(rank, spec, group=group)

    matcher.arrive(0, 1, member(0), "")
    if odd == 2:
        matcher.arrive(1, 1, member(1), "")
        assert matcher.dispute is None
    else:
        assert not matcher.arrive(1, 1, member(1), "")[1]
        assert "ranks 1 and 0 disagree" in str(matcher.dispute)
    others = {0: "1-2", 1: "0,2", 2: "0-1"}[odd]
    told = (
        rf"rank {odd} and ranks {others} disagree on .*: 5 on rank {odd} at .*; 4 on ranks {others}"
    )
    with pytest.raises(MismatchError, match=told):
        matcher.arrive(2, 1, member(2), "")


def test_nobody_else_tells_which_of_all_members_is_wrong() -> None:
    matcher = Matcher(patient=True)
    matcher.arrive(0, 1, all_reduce(0), "")
    with pytest.raises(MismatchError):
        matcher.arrive(1, 1, all_reduce(1, F5), "")


def test_three_members_of_which_none_is_like_another() -> None:
    matcher = Matcher(patient=True)
    group = Group("0", (0, 1, 2), 0, "gloo")
    for rank, spec in enumerate((F4, F5)):
        matcher.arrive(rank, 1, all_reduce(rank, spec, group=group), "")
    six = TensorSpec((6,), DType.FLOAT32)
    with pytest.raises(MismatchError, match="ranks 2, 0 and 1 disagree on the number"):
        matcher.arrive(2, 1, all_reduce(2, six, group=group), "")


def test_uneven_splits_that_agree_fit() -> None:
    matcher = Matcher()
    three, one = TensorSpec((3, 2), DType.FLOAT32), TensorSpec((1, 2), DType.FLOAT32)
    give = {"input_splits": (1, 2), "output_splits": (1, 0)}
    take = {"input_splits": (0, 1), "output_splits": (2, 1)}
    matcher.arrive(0, 1, op_of(Call.ALL_TO_ALL_SINGLE, 2, 0, [three], [one], **give), "")
    assert matcher.arrive(1, 1, op_of(Call.ALL_TO_ALL_SINGLE, 2, 1, [one], [three], **take), "")[1]


def test_messages_meet_in_order_by_tag() -> None:
    matcher = Matcher()
    matcher.arrive(0, 1, send(0, 2, 0, tag=7), "seven")
    matcher.arrive(0, 2, send(0, 2, 1, tag=8), "eight")
    eight, complete = matcher.arrive(2, 1, recv(2, 0, 0, tag=8), None)
    assert complete
    assert eight.instance.requests[0].inputs == "eight"
    waiting, complete = matcher.arrive(2, 2, recv(2, 1, 0), None)
    assert not complete
    assert waiting.instance.missing == [1]
    assert matcher.arrive(1, 1, send(1, 2), "one")[0].instance is waiting.instance
    assert matcher.unreceived() == 1


def test_tags_do_not_count_on_nccl() -> None:
    matcher = Matcher()
    group = Group("0", (0, 1), 0, "nccl")
    matcher.arrive(0, 1, send(0, 1, tag=7, group=group), "")
    assert matcher.arrive(1, 1, recv(1, 0, tag=9, group=group), None)[1]


def test_a_receive_from_anyone_takes_what_was_sent_first() -> None:
    matcher = Matcher()
    matcher.arrive(1, 1, send(1, 0), "from 1")
    matcher.arrive(2, 1, send(2, 0), "from 2")
    got, complete = matcher.arrive(0, 1, recv(0, None, None), None)  # type: ignore[arg-type]
    assert complete
    assert got.source == 1
    waiting, _ = matcher.arrive(0, 2, recv(0, 2, 0), None)
    assert waiting.source == 2
    late, complete = matcher.arrive(0, 3, recv(0, None, None), None)  # type: ignore[arg-type]
    assert not complete
    matcher.arrive(2, 2, send(2, 0, 1), "")
    assert late.source == 2


def test_a_message_that_does_not_fit_its_receive() -> None:
    matcher = Matcher()
    matcher.arrive(0, 1, send(0, 1), "")
    with pytest.raises(MismatchError, match="number of elements of recv: 5 on rank 1"):
        matcher.arrive(1, 1, recv(1, 0, spec=F5), None)


def test_a_group_has_the_same_members_on_all_of_them() -> None:
    matcher = Matcher()
    matcher.join(0, Group("1", (0, 1), 0, "gloo"), "a.py:3")
    matcher.join(1, Group("1", (0, 1), 1, "gloo"), "a.py:3")
    for rank in (0, 1):  # private ones share a name and nothing else
        matcher.join(rank, Group("2", (rank,), 0, "gloo"))
    with pytest.raises(MismatchError, match=r"0-2 on rank 2 at a.py:9, 0-1 on rank 0 at a.py:3"):
        matcher.join(2, Group("1", (0, 1, 2), 2, "gloo"), "a.py:9")


def test_messages_with_tags_are_counted_without_them() -> None:
    tagged = recv(1, 0, seq=(4 << 32) + 2, tag=4)
    assert tagged.count == 2
    assert operation(tagged) == "recv 2 with tag 4 from rank 0 in group [0-2]"
