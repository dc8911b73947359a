"""Cut a job into executions of its own and merge them: the job comes back, to the nanosecond."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from itertools import pairwise

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prismtrace as pt
from prismcalib import synth
from prismcalib.merging import merge
from prismcalib.slices import SliceOptions

COMPARED = ("start_ns", "dur_ns", "deps", "kind", "group", "seq", "bytes")


@st.composite
def jobs(draw):
    interleaved = draw(st.booleans())
    pp = draw(st.integers(2 if interleaved else 1, 3))
    dp = draw(st.sampled_from([1, 2, 4]))
    chunks = 2 if interleaved else 1
    return synth.JobSpec(
        pp=pp,
        tp=draw(st.integers(1, 2)),
        dp=dp,
        ep=draw(st.sampled_from([size for size in (1, 2) if dp % size == 0])),
        microbatches=pp * draw(st.integers(1, 2)),
        layers_per_stage=2,
        schedule="interleaved" if interleaved else "1f1b",
        chunks=chunks,
        coalesced_p2p=not interleaved and draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        steps=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**20)),
        launch_gap_ns=draw(st.sampled_from([0, 3000])),
        stragglers=draw(st.sampled_from([{}, {0: 1.4}])),
    )


def partition(draw, ranks: int) -> list[list[int]]:
    """The ranks in groups of any size and order."""
    order = draw(st.permutations(range(ranks)))
    cuts = sorted(draw(st.sets(st.integers(1, ranks), max_size=4)) | {0, ranks})
    return [list(order[a:b]) for a, b in pairwise(cuts)]


@given(st.data())
@settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_cut_gives_back_the_job(data):
    spec = data.draw(jobs())
    run = synth.generate(spec)
    nodes = run.collect()
    true_end = int((nodes["start_ns"] + nodes["dur_ns"]).max())
    with tempfile.TemporaryDirectory() as folder:
        paths = synth.cut_into_slices(
            run,
            folder,
            partition(data.draw, spec.world_size),
            seed=spec.seed,
            virtual=data.draw(st.sampled_from(["early", "none"])),
            transfers=data.draw(st.sampled_from(["observed", "given"])),
        )
        shuffled = data.draw(st.permutations(paths))
        result = merge(shuffled)
        merged = result.nodes
        assert result.report.propagated_ns == true_end
        assert result.report.steps_ns[-1] == list(true_steps(nodes))[-1]
        for name in COMPARED:
            assert merged[name].equals(nodes[name]), name
        assert result.report.overlap_clamps == result.report.transfer_clamps == 0


def true_steps(nodes: pl.DataFrame) -> list[int]:
    ends = (
        nodes.with_columns(end=pl.col("start_ns") + pl.col("dur_ns"))
        .group_by("step")
        .agg(pl.col("end").max())
        .sort("step")["end"]
    )
    return [after - before for before, after in zip([0, *ends[:-1]], ends, strict=True)]


@given(st.integers(0, 2**20), st.sampled_from([0.01, 0.05]))
@settings(deadline=None, max_examples=8, derandomize=True)
def test_noise_moves_the_step_time_within_its_own_size(seed, noise):
    spec = synth.JobSpec(pp=2, tp=2, dp=2, microbatches=3, steps=2, seed=seed)
    run = synth.generate(spec)
    true_ns = int(synth.step_ends_ns(spec)[-1])
    with tempfile.TemporaryDirectory() as folder:
        paths = synth.cut_into_slices(run, folder, 2, seed=seed, noise=noise, repeats=3)
        found = merge(paths).report.propagated_ns
    # No duration is off by more than three deviations, so no path is.
    assert abs(found - true_ns) <= 3 * noise * true_ns


@pytest.mark.needs_data
@pytest.mark.parametrize("job", ["megatron-tp8", "dlrm8"])
def test_real_runs_come_back_from_slices(data_dir, tmp_path, job):
    files = sorted((data_dir / "kineto" / job).glob("*.json*"))
    pt.convert(files, tmp_path / "run.parquet")
    whole = merge(tmp_path / "run.parquet")
    for size in (1, 3):
        paths = synth.cut_into_slices(whole.trace, tmp_path / str(size), size)
        result = merge(paths)
        assert result.report.propagated_ns == whole.report.propagated_ns
        assert result.nodes["dur_ns"].equals(whole.nodes["dur_ns"])
        shift = result.nodes["start_ns"] - whole.nodes["start_ns"]
        assert shift.n_unique() == 1
        # What a slice saw by itself is another story.
        assert result.report.before_ns < 0.9 * whole.report.propagated_ns


@pytest.mark.parametrize("job", ["ddp", "tp", "pp", "groups"])
def test_recordings_come_back_from_random_cuts(job, repo):
    path = repo / "benchmarks" / "fidelity_cuts.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = benchmark  # its dataclasses look there
    spec.loader.exec_module(benchmark)
    cuts = list(benchmark.cuts_of(f"h200/{job}", benchmark.H200 / job, 3))
    assert [cut["clocks"] for cut in cuts] == list(benchmark.CLOCKS)
    assert all(cuts[0][error] == 0 for error in ("step", "communication_ns", "duration"))
    # Several clocks are known as well as ends agree; a clock may be 100 ppm too fast.
    assert all(cut["step"] < 5e-4 for cut in cuts)
    assert f"| h200/{job} | 2 | 3 |" in benchmark.table(cuts)


def test_options_do_not_change_an_exact_campaign(tmp_path):
    spec = synth.JobSpec(pp=2, tp=1, dp=2, microbatches=2, steps=2, launch_gap_ns=1000)
    run = synth.generate(spec)
    paths = synth.cut_into_slices(run, tmp_path, 1, repeats=2)
    expected = run.collect()["start_ns"]
    for reduce in ("median", "mean", "min", "last"):
        merged = merge(paths, slices=SliceOptions(reduce=reduce))
        assert merged.nodes["start_ns"].equals(expected)
        assert merged.nodes["x_spread_ns"].max() == 0
