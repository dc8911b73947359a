"""Plans by the names of operations: on made-up jobs, in files, and beyond the recorded steps."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

import prismcalib
import prismtrace as pt
from prismcalib import synth
from prismreplay.errors import PlanError
from prismreplay.plan import OpKey, Plan, compile_plan
from tests.prismreplay.run.jobs import PLANNED, job, operations


def readies(plan: Plan, trace: pt.Trace, sandbox: list[int]) -> dict[tuple[OpKey, int], int]:
    """When the operations are ready if sandbox ranks arrive as in the trace."""
    world = plan.world()
    found = [one for one in operations(trace, sandbox) if world.is_boundary(one[1], one[2])]
    for time, key, rank, _ in found:
        world.arrived(key, rank, time - plan.boundary.origin_ns)
    return {(key, rank): world.ready_ns(key, rank) for _, key, rank, _ in found}


def check(plan: Plan, trace: pt.Trace, sandbox: list[int]) -> int:
    found = readies(plan, trace, sandbox)
    for _, key, rank, ready in operations(trace, sandbox):
        if (key, rank) in found:
            assert found[key, rank] == ready - plan.boundary.origin_ns
    return len(found)


@pytest.mark.parametrize("shape", PLANNED, ids=str)
@pytest.mark.parametrize("sandbox", [[0], [1, 6], [4, 5, 6, 7]], ids=str)
def test_known_operations_are_ready_when_they_were(shape, sandbox):
    trace = job(2, **shape)
    assert check(compile_plan(trace, sandbox), trace, sandbox) > 10


@pytest.mark.parametrize("shape", PLANNED, ids=str)
def test_more_steps_than_recorded_repeat_the_last_one(shape):
    short, long = job(3, **shape), job(7, **shape)
    plan = compile_plan(short, [0, 3])
    within = check(plan, short, [0, 3])
    assert check(plan, long, [0, 3]) > 2 * within


def test_a_file_keeps_everything(tmp_path):
    trace = job(2, **PLANNED[0])
    plan = compile_plan(trace, [2, 3])
    plan.write(tmp_path / "plan.parquet")
    again = Plan.read(tmp_path / "plan.parquet")
    assert again.groups == plan.groups
    assert (again.sandbox, again.steps, again.period_ns) == (
        plan.sandbox,
        plan.steps,
        plan.period_ns,
    )
    assert again.operations.equals(plan.operations)
    for name in ("kind", "owner", "edge_offsets", "edge_source", "edge_weight_ns"):
        assert np.array_equal(getattr(again.boundary, name), getattr(plan.boundary, name))
    assert check(again, trace, [2, 3]) > 10


@pytest.mark.parametrize("shape", PLANNED, ids=str)
def test_a_large_trace_gives_the_same_plan(shape, tmp_path, monkeypatch):
    trace = job(2, **shape)
    edits = [prismcalib.Scale("kind = 'compute' AND rank = 5", 1.5)]
    held = compile_plan(trace, [1, 6], edits)
    pt.write(trace, tmp_path / "trace.parquet")
    monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
    monkeypatch.setattr("prismcalib.blocks.BLOCK_ROWS", 300)
    plan = compile_plan(pt.open(tmp_path / "trace.parquet"), [1, 6], edits)
    assert (plan.steps, plan.period_ns) == (held.steps, held.period_ns)
    assert plan.boundary.origin_ns == held.boundary.origin_ns
    # Vertices may be numbered otherwise; what they say is the same.
    assert readies(plan, trace, [1, 6]) == readies(held, trace, [1, 6])
    names = ["group", "seq", "src_rank", "dst_rank", "rank", "arrival"]
    assert (
        plan.operations.drop("vertex")
        .sort(names)
        .equals(held.operations.drop("vertex").sort(names))
    )


def test_all_ranks_in_the_sandbox_leave_no_boundary(tmp_path):
    plan = compile_plan(job(2, **PLANNED[0]), range(8))
    assert plan.operations.is_empty()
    plan.write(tmp_path / "plan.parquet")
    assert Plan.read(tmp_path / "plan.parquet").operations.is_empty()


KEY = "prismreplay_plan"


@pytest.mark.parametrize(
    "change",
    [
        lambda head, rows: (head.pop("sandbox"), rows)[1],
        lambda head, rows: (head.update(groups=[{"id": 1}]), rows)[1],
        lambda head, rows: (head.update(steps=3), rows)[1],
        lambda _, rows: rows.drop("operations"),
        # Junctions in a circle: a run would never know when they are ready.
        lambda _, rows: rows.with_columns(
            pl.col("source").list.eval(pl.element() * 0 + rows.height - 1)
        ),
        lambda _, rows: rows.with_columns(pl.col("weight_ns").list.head(0)),
    ],
    ids=["no ranks", "groups", "steps", "columns", "a circle", "weights"],
)
def test_a_damaged_plan(tmp_path, change):
    compile_plan(job(1, **PLANNED[0]), [2]).write(tmp_path / "plan.parquet")
    head = json.loads(pl.read_parquet_metadata(tmp_path / "plan.parquet")[KEY])
    rows = change(head, pl.read_parquet(tmp_path / "plan.parquet"))
    rows.write_parquet(tmp_path / "changed.parquet", metadata={KEY: json.dumps(head)})
    with pytest.raises(PlanError, match="damaged") as caught:
        Plan.read(tmp_path / "changed.parquet")
    assert caught.value.where == str(tmp_path / "changed.parquet")


def test_what_is_refused(tmp_path):
    recorded = synth.generate(synth.JobSpec(pp=2, tp=1, dp=1, microbatches=2, layers_per_stage=1))
    with pytest.raises(PlanError, match="needs a calibrated trace"):
        compile_plan(recorded, [0])
    trace = job(1, **PLANNED[0])
    for ranks in ([], [8], [-1]):
        with pytest.raises(PlanError, match="sandbox ranks"):
            compile_plan(trace, ranks)
    pt.write(trace, tmp_path / "trace.parquet")
    with pytest.raises(PlanError, match="not a plan"):
        Plan.read(tmp_path / "trace.parquet")
    with pytest.raises(pt.TraceError):
        Plan.read(tmp_path / "missing.parquet")
    with pytest.raises(PlanError, match=r"no operation \[group=77 seq=0\]"):
        compile_plan(trace, [0]).world().arrived(OpKey(77, 0), 0, 0)
    group = trace.header.groups[0]
    with pytest.raises(PlanError, match=rf"no operation \[group={group.name} seq=0\]"):
        compile_plan(trace, [0]).world().arrived(OpKey(group.id, 0, 6, 7), 0, 0)
