"""Steps of small groups: who takes part in what, how many bytes go where, and gloo does them."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

pytest.importorskip("torch")

from prismreplay.run.hub import serve_store
from prismreplay.run.real_group import gloo_group
from prismreplay.run.reduced import Buffers, assistants_steps, is_reducible, perform, steps_of
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType, ReduceOp

RANKS = (0, 2, 4, 6, 8)
SANDBOX = (2, 6)
ASSISTANT = len(SANDBOX)
SIZE = len(RANKS)
WHOLE, EACH = TensorSpec((10, 3), DType.FLOAT32), TensorSpec((2, 3), DType.FLOAT32)
FIVE = (EACH,) * SIZE
BYTES = {"whole": WHOLE.nbytes, "each": EACH.nbytes}


def an_op(call, rank, inputs=(), outputs=(), **more):
    group = Group("g", RANKS, RANKS.index(rank), "gloo")
    return Op(call, group, 3, inputs, outputs, 0, DType.FLOAT32, **more)


def issued(call, root=None, **more):
    """What the sandbox ranks issue."""
    ops = {}
    for rank in SANDBOX:
        is_root = rank == root
        inputs, outputs = {
            Call.ALL_REDUCE: ((WHOLE, EACH), (WHOLE, EACH)),
            Call.BROADCAST: ((WHOLE,) if is_root else (), (WHOLE,)),
            Call.REDUCE: ((WHOLE,), (WHOLE,) if is_root else ()),
            Call.ALL_GATHER: ((EACH,), FIVE),
            Call.ALL_GATHER_SINGLE: ((EACH,), (WHOLE,)),
            Call.GATHER: ((EACH,), FIVE if is_root else ()),
            Call.SCATTER: (FIVE if is_root else (), (EACH,)),
            Call.REDUCE_SCATTER: (FIVE, (EACH,)),
            Call.REDUCE_SCATTER_SINGLE: ((WHOLE,), (EACH,)),
            Call.ALL_TO_ALL: (FIVE, FIVE),
            Call.ALL_TO_ALL_SINGLE: ((WHOLE,), (WHOLE,)),
            Call.BARRIER: ((), ()),
        }[call]
        ops[rank] = an_op(call, rank, inputs, outputs, root=root, **more)
    return ops


CASES = [
    *((call, None) for call in (Call.ALL_REDUCE, Call.ALL_GATHER, Call.ALL_GATHER_SINGLE)),
    *((call, None) for call in (Call.REDUCE_SCATTER, Call.REDUCE_SCATTER_SINGLE)),
    *((call, None) for call in (Call.ALL_TO_ALL, Call.ALL_TO_ALL_SINGLE, Call.BARRIER)),
    *(
        (call, root)
        for call in (Call.BROADCAST, Call.REDUCE, Call.GATHER, Call.SCATTER)
        for root in (6, 4)
    ),
]


def place_steps(ops):
    steps = {place: steps_of(ops[rank], SANDBOX, rank) for place, rank in enumerate(SANDBOX)}
    return {**steps, ASSISTANT: assistants_steps(ops, SANDBOX)}


@pytest.fixture(scope="module")
def small_group():
    """Three members of a real gloo group, in threads."""
    store, port = serve_store()
    members = [None] * (ASSISTANT + 1)

    def make(place):
        members[place] = gloo_group("small", place, len(members), port)

    in_threads(make, range(len(members)))
    yield members
    del store


def in_threads(function, places):
    failures = []

    def run(place):
        try:
            function(place)
        except BaseException as error:  # noqa: BLE001  shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("call", "root"), CASES)
def test_gloo_performs_the_steps(call, root, small_group):
    more = {"reduce_op": ReduceOp.MAX} if call in (Call.REDUCE, Call.REDUCE_SCATTER) else {}
    steps = place_steps(issued(call, root, **more))

    def play(place):
        for tag in (7, 8):  # twice, one after the other
            works = perform(steps[place], small_group[place], place, tag, Buffers())
            for work, _ in works:
                work.wait()

    in_threads(play, steps)


def test_messages_go_to_the_assistant_and_come_from_it(small_group):
    send = an_op(Call.SEND, 6, inputs=(WHOLE,), peer=4)
    receive = an_op(Call.RECV, 2, outputs=(EACH,), peer=8)
    given, got = steps_of(send, SANDBOX, 6), steps_of(receive, SANDBOX, 2)
    assert assistants_steps({6: send}, SANDBOX) == given
    assert (given[0].root, given[0].peer, given[0].elements) == (1, ASSISTANT, BYTES["whole"])
    assert (got[0].root, got[0].peer, got[0].elements) == (ASSISTANT, 0, BYTES["each"])

    def play(place):
        mine = {0: got, 1: given, ASSISTANT: (*given, *got)}[place]
        for step in mine:
            tag = 5 if step in given else 6
            for work, _ in perform((step,), small_group[place], place, tag, Buffers()):
                work.wait()

    in_threads(play, range(3))


def test_messages_among_sandbox_ranks_have_no_steps():
    sandbox = frozenset(SANDBOX)
    assert not is_reducible(an_op(Call.SEND, 6, inputs=(EACH,), peer=2), sandbox)
    assert is_reducible(an_op(Call.SEND, 6, inputs=(EACH,), peer=0), sandbox)
    # From anyone: nobody knows who until it is there.
    assert not is_reducible(an_op(Call.RECV, 6, outputs=(EACH,)), sandbox)


def test_a_sandbox_rank_gets_as_many_bytes_as_in_the_large_group():
    gathered = steps_of(issued(Call.ALL_GATHER_SINGLE)[2], SANDBOX, 2)
    # Of the two sandbox ranks and three virtual ones.
    assert 3 * gathered[0].elements + gathered[1].elements == BYTES["whole"]
    exchanged = place_steps(issued(Call.ALL_TO_ALL_SINGLE))
    assert exchanged[0][0].receives == (24, 24, 72)
    assert exchanged[ASSISTANT][0].sends == (72, 72, 0)
    scattered = steps_of(issued(Call.REDUCE_SCATTER_SINGLE)[2], SANDBOX, 2)
    assert 3 * scattered[0].elements + scattered[1].elements == WHOLE.elements


def test_uneven_parts_of_an_all_to_all():
    ops = {
        2: an_op(
            Call.ALL_TO_ALL_SINGLE,
            2,
            (TensorSpec((6, 1), DType.UINT8),),
            (TensorSpec((9, 1), DType.UINT8),),
            input_splits=(1, 0, 2, 3, 0),
            output_splits=(4, 0, 0, 0, 5),
        ),
        6: an_op(
            Call.ALL_TO_ALL_SINGLE,
            6,
            (TensorSpec((3, 1), DType.UINT8),),
            (TensorSpec((4, 1), DType.UINT8),),
            input_splits=(1, 0, 1, 1, 0),
            output_splits=(0, 3, 0, 1, 0),
        ),
    }
    steps = place_steps(ops)
    assert steps[0][0].sends == (0, 3, 3)
    assert steps[1][0].receives == (3, 1, 0)
    assert steps[ASSISTANT][0].sends == (9, 0, 0)
    assert steps[ASSISTANT][0].receives == (3, 2, 0)


@pytest.mark.parametrize(("call", "root"), CASES)
def test_all_places_do_the_same_steps(call, root):
    steps = place_steps(issued(call, root))
    assert len(Counter(tuple(step.call for step in each) for each in steps.values())) == 1
    if call not in (Call.ALL_TO_ALL, Call.ALL_TO_ALL_SINGLE):
        assert len(set(steps.values())) == 1


def test_results_may_lie_where_the_program_wants_its_own():
    import torch

    own = torch.ones(4, 2)
    buffers = Buffers([own])
    assert buffers.of(8, DType.FLOAT32).data_ptr() == own.data_ptr()
    assert buffers.of(8, DType.FLOAT32).data_ptr() != own.data_ptr()
    assert Buffers([own.t()]).of(8, DType.FLOAT32).data_ptr() != own.data_ptr()
    assert Buffers([own]).of(32, DType.UINT8).data_ptr() == own.data_ptr()
