"""Programs along their graphs: as long as them, longer, shorter, and others."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from prismreplay.errors import MismatchError, PlanError
from prismreplay.plan import OpKey
from prismreplay.run.following import followers_of
from prismreplay.runtime.operations import Call
from prismtrace.schema import DType
from prismtrace.trace import open_trace
from tests.prismreplay.run.jobs import job, operation, program
from tests.prismreplay.slicing.jobs import bare_graph


@pytest.fixture(scope="module")
def trace():
    return job()


def key_of(row):
    if row["kind"] == "send":
        return OpKey(row["group"], row["seq"], row["rank"], row["peer"])
    if row["kind"] == "recv":
        return OpKey(row["group"], row["seq"], row["peer"], row["rank"])
    return OpKey(row["group"], row["seq"])


@pytest.mark.parametrize("rank", range(8))
def test_every_operation_is_found(trace, rank):
    follower = followers_of(trace, [rank])[rank]
    for row, op in program(trace, rank):
        placed = follower.place(op)
        assert (placed.key, placed.round_, placed.step) == (key_of(row), 0, row["step"])
        assert placed.data_seq == row["seq"]
    assert (follower.missing, follower.repeated, follower.resized) == (0, 0, 0)


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_longer_programs_repeat_the_last_step(trace, rank):
    follower = followers_of(trace, [rank])[rank]
    made = list(program(trace, rank))
    last = [(row, op) for row, op in made if row["step"] == trace.header.steps[-1]]
    after = [
        (row, op) for row, op in made if row["step"] is None and row["index"] > last[-1][0]["index"]
    ]
    for _, op in made[: len(made) - len(after)]:
        follower.place(op)
    for round_ in (1, 2):
        for row, op in last:
            placed = follower.place(op)
            assert (placed.key, placed.round_) == (key_of(row), round_)
    assert follower.repeated == 2 * len(last)


def test_what_seemed_to_follow_the_training_is_the_next_step_s_when_it_goes_on(tmp_path):
    # As programs do that sum the loss once the optimizer is done: of the last step it has none.
    bare = open_trace(bare_graph(tmp_path / "bare.parquet", 2, [("dp", range(2))], 2, 2))
    steps, sizes = {0: 0, 1: 1, 2: 1, 3: None}, {0: 1000, 1: 4, 2: 1000, 3: 4}
    trace = replace(
        bare,
        nodes=bare.nodes.with_columns(
            step=pl.col("seq").replace_strict(steps, default=pl.col("step"), return_dtype=pl.Int32),
            bytes=pl.col("seq").replace_strict(sizes, default=None, return_dtype=pl.Int64),
        ),
    )
    follower = followers_of(trace, [0])[0]
    rows = trace.nodes.filter(pl.col("rank") == 0, pl.col("seq").is_not_null()).collect()
    gradients, loss = (operation(trace, row) for row in rows.head(2).iter_rows(named=True))
    found = [follower.place(op) for op in (gradients, loss) * 4]
    # The loss may be the last; once the training goes on, it was that of the step before.
    names = [(place.key.seq, place.round_) for one in found for place in [one.otherwise or one]]
    assert names == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]
    assert [(one.key.seq, one.round_) for one in found[3::2]] == [(3, 0)] * 3
    assert follower.resized == 0


BARRIER, GRADIENTS, LOSS = ("barrier", 0), ("all_reduce", 1000), ("all_reduce", 4)


def following(folder, steps, last=()):
    """A follower of a rank whose steps make these, with `last` after them, and what to call."""
    made = [(*one, number) for number, step in enumerate(steps) for one in step]
    made += [(*one, None) for one in last]
    bare = open_trace(bare_graph(folder / "bare.parquet", 2, [("dp", range(2))], len(made)))
    rows = bare.nodes.collect()
    at = pl.col("seq")
    for number, name in enumerate(("kind", "bytes", "step")):
        values = {seq: one[number] for seq, one in enumerate(made)}
        known = at.replace_strict(values, default=None, return_dtype=rows.schema[name])
        rest = None if name == "step" else pl.col(name)
        rows = rows.with_columns(pl.when(at.is_null()).then(rest).otherwise(known).alias(name))
    trace = replace(bare, nodes=rows.lazy())
    row = rows.filter(rank=0, kind="all_reduce").row(0, named=True)

    def make(what):
        return operation(trace, row, call=Call(what[0]), payload_bytes=what[1])

    return followers_of(trace, [0])[0], make


@pytest.mark.parametrize(
    "last", [(), (BARRIER,), (("broadcast", 8), BARRIER)], ids=["nothing", "barrier", "both"]
)
def test_what_only_earlier_steps_have_is_found_there_when_the_training_goes_on(tmp_path, last):
    rare, usual = [GRADIENTS, LOSS, BARRIER], [GRADIENTS, LOSS]
    follower, make = following(tmp_path, [rare, usual, usual], last)
    steps = [rare, usual, usual] * 3
    placed = [[follower.place(make(one)) for one in step] for step in steps]
    ended = [follower.place(make(one)) for one in last]
    found = [[(one.otherwise or one) for one in step] for step in placed[3:]]
    assert [[one.round_ for one in step[:2]] for step in found] == [[n, n] for n in range(1, 7)]
    barriers = [step[2] for step in found if len(step) > 2] + ended[-1:]
    # The plan hears of the one that follows the training once, and of no other.
    assert [one.skipping for one in barriers] == [len(last) == 0, True, True][: len(barriers)]
    assert follower.unplanned == 2
    assert follower.resized == 0


def test_a_sum_that_only_earlier_steps_have_is_not_taken_for_another_size(tmp_path):
    rare, usual = [GRADIENTS, LOSS], [GRADIENTS]
    follower, make = following(tmp_path, [rare, usual])
    for step in [rare, usual] * 3:
        for one in step:
            follower.place(make(one))
    assert (follower.unplanned, follower.resized, follower.repeated) == (2, 0, 4)


def test_a_size_that_an_earlier_step_had_may_come_again(tmp_path):
    small, large = [("all_reduce", 8), GRADIENTS], [("all_reduce", 9), GRADIENTS]
    follower, make = following(tmp_path, [small, large])
    for step in [small, large] * 3:
        for one in step:
            follower.place(make(one))
    assert (follower.unplanned, follower.resized, follower.repeated) == (0, 2, 8)


@pytest.mark.parametrize("what", [BARRIER, LOSS])
def test_a_further_step_without_what_the_last_has_is_refused(tmp_path, what):
    rare, usual = [GRADIENTS, what, ("broadcast", 8)], [GRADIENTS, ("broadcast", 8)]
    follower, make = following(tmp_path, [usual, rare], [BARRIER])
    for one in [*usual, *rare, GRADIENTS]:
        follower.place(make(one))
    with pytest.raises(
        PlanError,
        match=rf"rank 0 makes broadcast of 8 bytes .* in step 2: it is {what[0]} there. The graph "
        "ends with step 1, which further steps repeat",
    ) as caught:
        follower.place(make(usual[1]))
    assert "collect as many steps as are run" in caught.value.hint


def test_shorter_programs_leave_steps_out(trace):
    follower = followers_of(trace, [1])[1]
    first = [op for row, op in program(trace, 1) if row["step"] in (None, trace.header.steps[0])]
    for op in first:
        follower.place(op)
    assert follower.missing > 0


def test_another_program_is_told_its_line(trace):
    follower = followers_of(trace, [0])[0]
    row, _ = next((row, op) for row, op in program(trace, 0) if row["kind"] == "all_reduce")
    with pytest.raises(PlanError, match="rank 0 makes barrier") as caught:
        follower.place(operation(trace, row, call=Call.BARRIER))
    assert caught.value.where == "train.py:7 in main"


def test_another_group_is_refused(trace):
    follower = followers_of(trace, [0])[0]
    _, op = next(program(trace, 0))
    op.group.name = "another"
    with pytest.raises(PlanError, match="no such group"):
        follower.place(op)


def test_a_collective_of_another_size_is_refused(trace):
    follower = followers_of(trace, [0])[0]
    row, op = next((row, op) for row, op in program(trace, 0) if row["kind"] == "all_reduce")
    with pytest.raises(
        MismatchError,
        match=r"ranks 0 and \d disagree on the size of all_reduce: [\d,]+ bytes on rank 0 at "
        r"train.py:7 in main, [\d,]+ bytes on rank \d in the graph",
    ):
        follower.place(operation(trace, row, payload_bytes=op.payload_bytes + 1))


@pytest.mark.parametrize("how", ["uneven lists", "objects", "messages", "further steps"])
def test_sizes_that_may_differ_are_counted(trace, how):
    follower = followers_of(trace, [0])[0]
    made = list(program(trace, 0))
    wanted = ("send",) if how == "messages" else ("all_reduce",)
    if how == "uneven lists":
        wanted = ("all_to_all", "all_gather", "reduce_scatter")
    at = [number for number, (row, _) in enumerate(made) if row["kind"] in wanted]
    last = [number for number in at if made[number][0]["step"] == trace.header.steps[-1]]
    first = len(made) if how == "further steps" else at[0]
    for _, op in made[:first]:
        follower.place(op)
    row, op = made[last[0] if how == "further steps" else first]
    more = {"dtype": DType.UINT8} if how == "objects" else {}
    follower.place(operation(trace, row, payload_bytes=op.payload_bytes + 1, **more))
    assert follower.resized == 1


def test_a_receive_from_anyone_comes_from_who_sent(trace):
    rank = 4
    follower = followers_of(trace, [rank])[rank]
    for row, op in program(trace, rank):
        asked = operation(trace, row, peer=None, seq=None) if row["kind"] == "recv" else op
        placed = follower.place(asked)
        if row["kind"] == "recv":
            assert (placed.peer, placed.data_seq) == (row["peer"], row["seq"])
