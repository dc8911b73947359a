"""Real recorded runs, from profiler files to the aligned timeline."""

import pytest

from prismcalib.errors import CoverageError, MergeInputError
from prismcalib.merging import merge
from prismcalib.paths import critical_path
from prismcalib.prediction import predict
from prismtrace import convert
from prismtrace.validation import validate


@pytest.fixture(scope="module")
def recorded(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")

    def path_of(name):
        path = folder / f"{name.replace('/', '_')}.parquet"
        if not path.exists():
            source = data_dir / "kineto" / name
            convert(sorted(source.glob("*.json.gz")) if source.is_dir() else [source], path)
        return path

    return path_of


def test_a_tensor_parallel_step(recorded):
    result = merge(recorded("megatron-tp8"), verify=True)
    report = result.report
    assert (report.ranks, report.instances) == (8, 84)
    assert report.recorded_ns == pytest.approx(630.8e6, rel=1e-4)
    assert abs(report.difference_ns) <= 0.01 * report.recorded_ns
    # One host: the ends agree, no clock is to be corrected.
    assert report.clock.end_spread_before == report.clock.end_spread_after
    assert report.clock.end_spread_after.median_ns == 30_000
    assert report.clock.end_spread_after.max_ns == 49_000
    assert {domain.offset_ns for domain in report.clock.domains} == {0}
    assert report.clock.inconsistent == 0
    # Idle time lies between spans and inside them; with every kernel a row, all of it between.
    assert (report.lags.total_ns, report.idle_inside.total_ns) == (122_733_000, 424_417_000)
    # Nothing is lost: idle gaps are kept as lags, and the path adds up.
    path = critical_path(result.trace)
    assert report.idle_inside_on_critical_path.total_ns == path.inner_idle_ns
    assert report.lags_on_critical_path.total_ns == path.gap_ns
    parts = path.compute_ns + path.transfer_ns + path.unmatched_ns + path.gap_ns + path.lead_in_ns
    assert parts == path.length_ns == report.propagated_ns
    assert (result.nodes.filter("critical")["slack_ns"] == 0).all()
    assert predict(result.trace).step_ns == report.propagated_ns
    assert [found.rule for found in validate(result.trace) if found.severity == "error"] == []


def test_a_recommendation_step(recorded):
    report = merge(recorded("dlrm8"), verify=True).report
    assert (report.ranks, report.instances) == (8, 8)
    assert report.clock.end_spread_after.median_ns == 2_500
    assert report.clock.end_spread_after.max_ns == 7_000
    assert abs(report.difference_ns) <= 0.01 * report.recorded_ns


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("edge-cases/cpu_only_rank-34.json.gz", "1 of 300 ranks present: ranks 0-33, 35-299"),
        ("edge-cases/nccl_metadata_base_time_last.json.gz", "1 of 2 ranks present: rank 1 missing"),
    ],
)
def test_partial_runs_are_refused(recorded, name, text):
    with pytest.raises(CoverageError, match=text):
        merge(recorded(name))


def test_ranks_that_nothing_relates_are_refused(data_dir, tmp_path):
    convert(data_dir / "kineto" / "gloo-cpu-4", tmp_path / "run.parquet", unmatched="keep")
    with pytest.raises(MergeInputError, match="none of the 112 communications is matched"):
        merge(tmp_path / "run.parquet")
