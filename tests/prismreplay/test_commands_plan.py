"""`prismreplay plan`: what it writes is a plan that a run takes, what it says is true."""

from __future__ import annotations

import json

import polars as pl
import pytest
from typer.testing import CliRunner

import prismcalib
import prismtrace as pt
from prismcalib import synth
from prismreplay.cli import app
from prismreplay.commands_run import _timing
from prismreplay.errors import PlanError
from prismreplay.plan import Plan, compile_plan


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    spec = synth.JobSpec(pp=2, tp=2, dp=2, microbatches=2, layers_per_stage=1, steps=2)
    path = tmp_path_factory.mktemp("plan") / "calibrated.parquet"
    pt.write(prismcalib.merge(synth.generate(spec)).trace, path)
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_file_is_the_plan(calibrated, tmp_path):
    done = invoke(calibrated, "--sandbox", "0-1", "-o", tmp_path / "plan.parquet", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    plan = Plan.read(tmp_path / "plan.parquet")
    assert plan.operations.equals(compile_plan(pt.open(calibrated), [0, 1]).operations)
    assert said["sandbox"] == list(plan.sandbox) == [0, 1]
    assert (said["vertices"], said["edges"]) == (plan.boundary.vertices, plan.boundary.edges)
    names = ["group", "seq", "src_rank", "dst_rank", "rank"]
    assert said["boundary_operations"] == plan.operations.select(names).n_unique()
    assert (said["steps"], said["period_ns"]) == (2, plan.period_ns)
    assert sum(said["transfer_share"].values()) == pytest.approx(1)


def test_groups_are_counted_by_who_is_in_them(calibrated, tmp_path):
    groups = pt.open(calibrated).header.groups
    done = invoke(calibrated, "--sandbox", "0-1", "-o", tmp_path / "plan.parquet", "--json")
    said = json.loads(done.stdout)
    shared = [group for group in groups if {0, 1} & set(group.ranks)]
    real = [group for group in shared if set(group.ranks) <= {0, 1}]
    assert real  # the tensor-parallel pair
    assert said["groups"] == len(groups)
    assert said["real_groups"] == len(real)
    assert said["mixed_groups"] == len(shared) - len(real)
    assert said["bypassed_groups"] == len(groups) - len(shared)


def test_injected_ranks_arrive_later(calibrated, tmp_path):
    plain, slow = tmp_path / "plain.parquet", tmp_path / "slow.parquet"
    assert invoke(calibrated, "--sandbox", "0", "-o", plain).exit_code == 0
    done = invoke(
        calibrated, "--sandbox", "0", "-o", slow, "--inject", "rank=1-7,kind=compute,scale=2"
    )
    assert done.exit_code == 0
    assert "of 8" in done.stdout
    before, after = (Plan.read(path).boundary.edge_weight_ns.sum() for path in (plain, slow))
    assert after > before


def test_a_plan_of_an_older_calibration_is_refused(calibrated, tmp_path):
    graph, plan = tmp_path / "graph.parquet", tmp_path / "plan.parquet"
    graph.write_bytes(calibrated.read_bytes())
    assert invoke(graph, "--sandbox", "0", "-o", plan).exit_code == 0
    # By what it holds, whatever its name and the time of the file.
    assert _timing(pt.open(calibrated), (0,), [], plan, early=False).plan is not None

    slower = pt.open(calibrated)
    pt.write(
        pt.Trace(
            header=slower.header,
            nodes=slower.nodes.with_columns(
                dur_ns=pl.when(pl.col("kind") == "compute")
                .then(pl.col("dur_ns") + 1)
                .otherwise("dur_ns")
            ),
        ),
        graph,
    )
    with pytest.raises(PlanError, match="another calibration") as refused:
        _timing(pt.open(graph), (0,), [], plan, early=False)
    assert str(graph) in str(refused.value)


def test_a_plan_that_says_nothing_of_its_graph_is_taken(calibrated, tmp_path):
    compile_plan(pt.open(calibrated), [0]).write(tmp_path / "plan.parquet")
    timing = _timing(pt.open(calibrated), (0,), [], tmp_path / "plan.parquet", early=False)
    assert timing.plan.made_from is None


def test_ranks_that_are_not_there_are_wrong_usage(calibrated, tmp_path):
    done = invoke(calibrated, "--sandbox", "8", "-o", tmp_path / "plan.parquet")
    assert done.exit_code == 2
    assert not (tmp_path / "plan.parquet").exists()
