import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import prismtrace as pt
from prismcalib import compare, what_if
from prismcalib.build import graph_from_trace
from prismcalib.edits import Scale, ScaleGaps
from prismcalib.graph import Graph
from prismcalib.merging import merge
from prismcalib.propagation import propagate_batch
from prismcalib.step_times import step_table
from prismcalib.steps import StepModel
from prismtrace.schema import TraceHeader, TraceKind

HEADER = TraceHeader(kind=TraceKind.CALIBRATED, world_size=2, ranks=(0, 1))


def test_steps_of_a_run_are_chained(make_run):
    graph, rows = graph_from_trace(merge(make_run(steps=3).trace).trace)
    model = StepModel.of(graph, rows, HEADER)
    assert not model.apart
    assert model.graph is graph
    batch = propagate_batch(graph, graph.duration_ns[:, None], steps=model.number)
    assert (model.durations(batch) == batch.step_ns).all()
    without = StepModel.of(graph, rows.with_columns(step=pl.lit(None, pl.Int32)), HEADER)
    batch = propagate_batch(graph, graph.duration_ns[:, None], steps=without.number)
    assert without.durations(batch).tolist() == [batch.makespan_ns.tolist()]


def two_steps(**changes):
    """Two steps of two ranks with one collective each; the second was recorded at 1000."""
    given = {
        "durations_ns": [10, 5, 30, 6] * 2,
        "deps": [[], [0], [], [2], [], [4], [], [6]],
        "instances": [-1, 0, -1, 0, -1, 1, -1, 1],
        "releases_ns": [0, 0, 3, 0, 1000, 0, 1001, 0],
        **changes,
    }
    return Graph.from_lists(given.pop("durations_ns"), given.pop("deps"), **given)


STEPS = pl.DataFrame({"step": [7] * 4 + [9] * 4}, schema={"step": pl.Int32})


def test_steps_that_nothing_connects_are_laid_side_by_side():
    model = StepModel.of(two_steps(), STEPS, HEADER)
    assert model.apart
    assert model.graph.release_ns.tolist() == [0, 0, 3, 0, 0, 0, 1, 0]
    durations = np.stack([two_steps().duration_ns, two_steps().duration_ns // 2], axis=1)
    batch = propagate_batch(model.graph, durations, steps=model.number)
    assert model.durations(batch).tolist() == [[39, 37], [21, 19]]


def test_sampled_steps_begin_where_they_were_laid():
    # The second was laid at 45, where the first ended, and its first operation came 5 later.
    graph = two_steps(releases_ns=[6, 0, 3, 0, 50, 0, 51, 0])
    rows = STEPS.with_columns(
        start_ns=pl.Series([6, 33, 3, 33, 50, 81, 51, 81]), dur_ns=pl.Series(graph.duration_ns)
    ).with_columns(dur_ns=pl.when(pl.int_range(8) == 3).then(12).otherwise("dur_ns"))
    header = HEADER.model_copy(update={"extra": {"sampled_steps": True}})
    model = StepModel.of(graph, rows, header)
    assert model.graph.release_ns.tolist() == [6, 0, 3, 0, 5, 0, 6, 0]
    batch = propagate_batch(model.graph, graph.duration_ns[:, None], steps=model.number)
    assert model.durations(batch).tolist() == [[39, 42]]
    # `predict`, `report` and `stragglers` count the recorded times in the same way.
    bounds = pl.DataFrame({"step": [7, 9], "start_ns": [3, 50], "end_ns": [45, 87]})
    assert step_table(bounds, header, 3, 87)["duration_ns"].to_list() == [45, 42]
    # A repair that moved an end into the next step does not shorten that one.
    late = bounds.with_columns(end_ns=pl.Series([52, 87]))
    assert step_table(late, header, 3, 87)["duration_ns"].to_list() == [52, 37]


@pytest.mark.parametrize(
    "changes",
    [
        {"deps": [[], [0], [], [2], [], [4], [], [6, 3]]},
        {"instances": [-1, 0, -1, 1, -1, 0, -1, 1]},
        {"waits": [[], [], [], [], [0], [], [], []]},
    ],
)
def test_one_connection_is_enough(changes):
    assert not StepModel.of(two_steps(**changes), STEPS, HEADER).apart


def test_one_step_or_rows_outside_of_steps_are_not_apart():
    assert not StepModel.of(two_steps(), STEPS.with_columns(step=pl.lit(1, pl.Int32)), HEADER).apart
    outside = pl.when(pl.int_range(8) == 7).then(None).otherwise("step")
    assert not StepModel.of(two_steps(), STEPS.with_columns(step=outside), HEADER).apart
    assert not StepModel.of(replace(two_steps(), release_ns=None), STEPS, HEADER).apart


@pytest.mark.needs_data
@pytest.mark.parametrize("job", ["SE", "ST"])
def test_steps_of_operation_logs(job, data_dir, tmp_path):
    logs = data_dir / "ops/straggler"
    pt.convert([logs / f"trace-{job}.parquet"], tmp_path / "run.parquet")
    trace = merge(tmp_path / "run.parquet").trace
    answer = what_if(trace, {"no delays": [ScaleGaps("true", 0)], "half": [Scale("true", 0.5)]})
    known = json.loads((logs / f"result-{job}.json").read_text())
    for scenario, name in ((answer.baseline, "base"), (answer.scenarios[0], "nodelay")):
        expected = np.array(list(known[f"step_t_{name}"].values()))
        # Aligning clocks moves the recorded steps a little; without delays nothing is left of it.
        assert abs(scenario.steps_ns / 1e9 - expected).max() < (2e-4 if name == "base" else 5e-6)
        path = scenario.critical_path
        assert path.length_ns == sorted(scenario.steps_ns)[(len(expected) - 1) // 2]
        parts = path.compute_ns + path.transfer_ns + path.gap_ns + path.lead_in_ns
        assert parts + path.unmatched_ns == path.length_ns
    # Unlike steps held at their recorded times, these become shorter.
    assert answer.scenarios[1].delta_ns < 0
    assert compare(trace, trace).own_effect_ns == 0
