"""What a rank has probably done whose communication does not fit."""

from __future__ import annotations

import pytest

from prismreplay.collect.matching import Matcher
from prismreplay.errors import MismatchError
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType

GROUP = Group("0", (0, 1, 2, 3), 0, "gloo")
STEP = ("reduce 8", "reduce 4", "metric 1", "broadcast 2", "barrier 0")


def op_of(name: str, seq: int, step: int) -> Op:
    call, elements, *line = name.split()
    spec = TensorSpec((int(elements),), DType.FLOAT32)
    kind = {"broadcast": Call.BROADCAST, "barrier": Call.BARRIER}.get(call, Call.ALL_REDUCE)
    specs = () if kind is Call.BARRIER else (spec,)
    root = 0 if kind is Call.BROADCAST else None
    site = f"train.py:{line[0] if line else call}"
    return Op(kind, GROUP, seq, specs, specs, spec.nbytes, root=root, site=site, step=step)


def told(odd_step: list[str], *, at: int = 2, ahead: int = 0, odd: int = 2) -> str:
    """The message where rank `odd` makes other operations in step `at`.

    All ranks submit `ahead` operations more before the next one's turn.
    """
    usual = [(name, step) for step in range(at + 2) for name in STEP]
    own = [(name, step) for step in range(at + 2) for name in (odd_step if step == at else STEP)]
    matcher = Matcher(patient=True)

    def play() -> None:
        for first in range(0, min(len(usual), len(own)), ahead + 1):
            for rank in dict.fromkeys((odd, 0, 1, 2, 3)):
                program = own if rank == odd else usual
                for seq in range(first, min(first + ahead + 1, len(program))):
                    matcher.arrive(rank, seq, op_of(program[seq][0], seq, program[seq][1]), "")

    with pytest.raises(MismatchError) as caught:
        play()
    return str(caught.value)


def without(*names: str) -> list[str]:
    return [name for name in STEP if name not in names]


@pytest.mark.parametrize(
    ("left_out", "what"),
    [
        ("metric 1", "the all_reduce of 4 bytes at train.py:metric"),
        ("broadcast 2", "the broadcast of 8 bytes at train.py:broadcast"),
        ("barrier 0", "the barrier at train.py:barrier"),
        ("reduce 8", "the all_reduce of 32 bytes at train.py:reduce"),
    ],
)
@pytest.mark.parametrize("odd", [1, 2, 3])
def test_one_that_a_rank_leaves_out(left_out: str, what: str, odd: int) -> None:
    message = told(without(left_out), odd=odd)
    assert f"as if rank {odd} had left out {what} in step 2, or makes it later" in message
    assert message.startswith(f"rank {odd} and ranks 0")


def test_several_that_a_rank_leaves_out() -> None:
    message = told(without("metric 1", "broadcast 2"))
    assert "left out the all_reduce of 4 bytes at train.py:metric and 1 more after it" in message


def test_one_more_than_the_others() -> None:
    message = told([*STEP[:3], "extra 3", *STEP[3:]])
    assert (
        "as if rank 2 had made the all_reduce of 12 bytes at train.py:extra in addition to what "
        "came here before in step 2" in message
    )


def test_another_order_of_two() -> None:
    swapped = [*STEP[:3], STEP[4], STEP[3]]
    assert "left out the broadcast of 8 bytes" in told(swapped)
    ahead = told(swapped, ahead=4)
    assert "had made the barrier at train.py:barrier before the broadcast of 8 bytes" in ahead
    assert "not after it in step 2" in ahead
    elsewhere = told([*STEP[:3], "barrier 0 elsewhere", STEP[3]])
    assert "had made the barrier at train.py:elsewhere before the broadcast" in elsewhere


def test_where_nothing_came_before() -> None:
    message = told(without("metric 1"), at=0)
    assert "as if" not in message
    assert message.endswith("operation 2, step 0]")


def test_most_that_do_what_is_new_are_not_blamed() -> None:
    matcher = Matcher(patient=True)
    for seq, name in enumerate(STEP * 3):
        for rank in range(4):
            matcher.arrive(rank, seq, op_of(name, seq, seq // 5), "")
    matcher.arrive(0, 15, op_of("evaluation 9", 15, 3), "")
    matcher.arrive(1, 15, op_of("evaluation 9", 15, 3), "")
    with pytest.raises(MismatchError) as caught:
        matcher.arrive(2, 15, op_of(STEP[0], 15, 3), "")
    assert "as if" not in str(caught.value)
