from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from prismcalib import resampling, synth
from prismcalib.build import graph_from_trace
from prismcalib.errors import CalibError
from prismcalib.merging import merge
from prismcalib.path_printing import print_prediction
from prismcalib.prediction import predict
from prismcalib.propagation import propagate
from prismcalib.resampling import resample_steps, why_not_resampled
from prismcalib.waiting import WaitRules

CALM = {"jitter": 0, "step_jitter": 0, "comm_jitter": 0, "moe_imbalance": 0, "end_spread_ns": 0}


def job(**changes):
    return synth.JobSpec(
        **{"pp": 2, "tp": 1, "dp": 4, "layers_per_stage": 1, "steps": 10, "seed": 1, **changes}
    )


def test_equal_steps_do_not_vary():
    trace = merge(synth.generate(job(**CALM))).trace
    spread = predict(trace, draws=20).spread
    step = int(predict(trace).steps["duration_ns"][-1])
    assert spread.observed_steps == 10
    assert spread.simulated_steps == 20 * 9
    for quantile in spread.quantiles:
        assert quantile.ns == quantile.low_ns == quantile.high_ns == step


@pytest.mark.parametrize(
    ("levels", "changes"),
    # Tails that were not observed cannot be drawn: of much jitter only the middle.
    [((0.05, 0.5, 0.95), {}), ((0.5,), {"pp": 1, "dp": 8, "step_jitter": 0.2})],
)
def test_quantiles_are_those_of_the_job(levels, changes):
    truth = np.diff(synth.step_ends_ns(job(steps=200, seed=9, **changes)))
    trace = merge(synth.generate(job(steps=16, **changes))).trace
    for quantile in predict(trace).spread.quantiles:
        if quantile.level not in levels:
            continue
        true = np.quantile(truth, quantile.level)
        width = max(quantile.high_ns - quantile.low_ns, 0.03 * true)
        assert quantile.low_ns - width / 2 <= true <= quantile.high_ns + width / 2
        assert quantile.low_ns <= quantile.ns <= quantile.high_ns


def test_medians_of_operations_give_too_short_a_step():
    # Every step one of eight ranks is slow; the median of every operation is the quick one.
    changes = {"pp": 1, "dp": 8, "step_jitter": 0.3}
    trace = merge(synth.generate(job(steps=15, **changes))).trace
    graph, rows = graph_from_trace(trace)
    place = pl.int_range(pl.len()).over("rank", "step")
    middle = (
        rows.with_columns(own=pl.Series(graph.duration_ns), place=place)
        .select(pl.col("own").median().over("rank", "place"))
        .to_series()
        .cast(pl.Int64)
    )
    calm = propagate(replace(graph, duration_ns=middle.to_numpy()))
    truth = np.median(np.diff(synth.step_ends_ns(job(steps=200, seed=9, **changes))))
    resampled = predict(trace).spread.quantiles[1].ns
    assert calm.makespan_ns / 15 < 0.9 * truth
    assert abs(resampled - truth) < abs(calm.makespan_ns / 15 - truth) / 2


def test_engines_and_seeds(make_run):
    trace = merge(make_run(steps=4).trace).trace
    graph, rows = graph_from_trace(trace)
    spreads = [
        resample_steps(graph, rows, header=trace.header, draws=9, engine=e)
        for e in ("python", "array")
    ]
    assert spreads[0] == spreads[1] == resample_steps(graph, rows, header=trace.header, draws=9)
    assert resample_steps(graph, rows, header=trace.header, draws=9, seed=1) != spreads[0]
    as_dict = spreads[0].as_dict()
    assert as_dict["p50"]["step_ns"] == spreads[0].quantiles[1].ns


def test_wait_rules_hold_in_every_draw(make_run):
    trace = merge(make_run(steps=3).trace, rules=WaitRules(eager_below=1 << 30)).trace
    assert predict(trace, draws=5).spread.draws == 5


def unlike(rows, step):
    """With another kind of operation at the beginning of a step."""
    place = pl.int_range(pl.len()).over("rank", "step")
    changed = (pl.col("rank") == 0) & (pl.col("step") == step) & (place == step)
    kind = pl.lit("memcpy", dtype=rows.schema["kind"])
    return rows.with_columns(kind=pl.when(changed).then(kind).otherwise("kind"))


def test_steps_of_other_operations_keep_their_times(make_run):
    # DDP's first step is one: it cuts its buckets anew after it.
    result = merge(make_run(steps=5).trace)
    usual = predict(result.trace, draws=30).spread
    assert (usual.observed_steps, usual.unlike_steps) == (5, 0)
    slow = pl.when(pl.col("step") == 1).then(pl.col("dur_ns") * 50).otherwise("dur_ns")
    nodes = unlike(result.nodes, 1).with_columns(dur_ns=slow)
    trace = merge(replace(result.trace, nodes=nodes.lazy())).trace
    found = predict(trace, draws=30).spread
    assert (found.observed_steps, found.unlike_steps) == (4, 1)
    # All but the first of the window, which follows no step, and the unlike one.
    assert found.simulated_steps == 30 * 3
    assert found.quantiles[-1].ns < 2 * usual.quantiles[-1].ns


def test_why_there_is_no_spread(make_run, monkeypatch):
    one = merge(make_run(steps=1).trace)
    assert "two steps" in predict(one.trace).why_no_spread
    assert predict(one.trace).spread is None
    three = merge(make_run(steps=3).trace)
    assert predict(three.trace, draws=0).why_no_spread == "no draws were asked for"
    rows = three.nodes
    assert why_not_resampled(rows) is None
    monkeypatch.setattr(resampling, "_LARGEST", 10)
    assert "too many" in why_not_resampled(rows)
    monkeypatch.undo()
    assert why_not_resampled(unlike(rows, 0)) is None
    two_unlike = unlike(unlike(rows, 0), 1)
    assert "same operations" in why_not_resampled(two_unlike)
    assert "after the warm-up (1 step)" in why_not_resampled(unlike(rows, 1), warmup=1)
    graph, _ = graph_from_trace(three.trace)
    with pytest.raises(CalibError, match="operations"):
        resample_steps(graph, two_unlike, header=three.header)
    with pytest.raises(CalibError, match="no draws"):
        resample_steps(graph, rows, header=three.header, draws=0)


def test_rows_outside_steps_stay(make_run):
    result = merge(make_run(steps=3).trace)
    nodes = result.nodes.with_columns(step=pl.when(pl.col("step") > 0).then("step").otherwise(None))
    spread = predict(replace(result.trace, nodes=nodes.lazy()), draws=4).spread
    assert spread.observed_steps == 2
    assert spread.simulated_steps == 8


def test_members_of_a_communication_take_its_transfer_from_one_step(make_run):
    graph, rows = graph_from_trace(merge(make_run(steps=5).trace).trace)
    member, step = graph.instance >= 0, rows["step"].to_numpy()
    graph = replace(graph, duration_ns=np.where(member, 100 + step, step))
    pool = resampling._StepPool.of(rows, [0, 1, 2, 3, 4], graph)
    choices = np.random.default_rng(1).integers(0, 5, (20, pool.ranks, pool.steps))
    ((durations, _),) = resampling._draws(graph, pool, choices)
    for choice, drawn in zip(choices, durations.T, strict=True):
        taken = pl.DataFrame({"instance": graph.instance[member], "ns": drawn[member]})
        assert taken.unique().height == graph.instances
        # Computation goes on taking what its own rank chose.
        chosen = choice[rows["rank"].to_numpy()[~member], step[~member]]
        assert drawn[~member].tolist() == chosen.tolist()


def test_what_drawn_steps_are_is_said_beside_the_step_time(capsys):
    trace = merge(synth.generate(job(**CALM, steps=3))).trace
    prediction = predict(trace, draws=20)
    print_prediction(prediction, trace.header, spread=True)
    shown = capsys.readouterr().out
    assert "the step time above is the median of the steps as they were" in shown
    assert "other operations" not in shown
    unlike = replace(prediction, spread=replace(prediction.spread, unlike_steps=1))
    print_prediction(unlike, trace.header, spread=True)
    assert "; 1 step with other operations left out" in capsys.readouterr().out


def test_what_exposed_means_where_spans_hold_idle_time(capsys):
    trace = merge(synth.generate(job(**CALM, steps=3))).trace
    prediction = predict(trace, draws=0)
    title = "where each rank spends the window (transferring and waiting: not beside computation"
    for idle, told in ((0, f"{title})"), (5, f"{title}, nor beside what is idle inside spans)")):
        ranks = prediction.ranks.with_columns(inner_idle_ns=pl.lit(idle, pl.Int64))
        print_prediction(replace(prediction, ranks=ranks), trace.header, spread=False)
        assert told in capsys.readouterr().out
