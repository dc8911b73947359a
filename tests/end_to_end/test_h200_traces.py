"""Traces of torch 2.11 on H200s (tests/data): from profiler files to one timeline."""

from collections import Counter
from pathlib import Path

import pytest

import prismcalib
import prismtrace as pt

TRACES = Path(__file__).parent.parent / "data" / "h200"
STEPS = 3


def convert(job, tmp_path, **options):
    output = tmp_path / "run.parquet"
    report = pt.convert(TRACES / job, output, **options)
    trace = pt.open(output)
    assert [v for v in pt.validate(trace) if v.severity == "error"] == []
    return report, trace


def instances(trace):
    """How many sync instances of each kind; p2p pairs under their send."""
    nodes = trace.collect().drop_nulls("seq")
    p2p = nodes["kind"].is_in(["send", "recv"])
    keys = set(nodes.filter(~p2p).select("kind", "group", "seq").iter_rows())
    counts = Counter(kind for kind, *_ in keys)
    counts["send"] = nodes.filter(nodes["kind"] == "send").height
    return {kind: number for kind, number in counts.items() if number}


@pytest.mark.parametrize("job", ["ddp", "ddp-nosync"])
def test_every_bucket_is_waited_for_once(job, tmp_path):
    report, trace = convert(job, tmp_path)
    assert instances(trace) == {"all_reduce": 8 * STEPS}
    # On each of two ranks.
    assert report.edges == {"comm-input": 2 * 8 * STEPS, "inferred-wait": 2 * 8 * STEPS}
    assert trace.header.steps == (2, 3, 4)


@pytest.mark.parametrize("job", ["pp", "pp-nosync"])
def test_plain_and_batched_p2p(job, tmp_path):
    _, trace = convert(job, tmp_path)
    assert instances(trace) == {
        "send": (1 + 4) * STEPS,
        "all_to_all": STEPS,
        "all_reduce": STEPS,
        "all_gather": STEPS,
        "reduce_scatter": STEPS,
        "broadcast": STEPS,
        "barrier": STEPS,
    }
    batches = trace.collect().drop_nulls("batch").group_by("rank", "batch").len()
    assert batches["len"].to_list() == [4] * (2 * STEPS)


def test_groups_are_told_apart(tmp_path):
    report, trace = convert("groups", tmp_path)
    assert instances(trace) == {"all_reduce": 3 * STEPS}
    names = {group.id: group.desc for group in trace.header.groups}
    used = Counter(names[g] for g in trace.collect().drop_nulls("seq")["group"])
    assert used == {"default_pg": 2 * 2 * STEPS, "twin": 2 * STEPS}
    assert report.repairs["early-without-group"] == report.repairs["no-metadata"]


def test_groups_of_two_among_four_ranks(tmp_path):
    _, trace = convert("groups-shared", tmp_path)
    # Evens and odds twice each, then twin, default and the coalesced launch.
    assert instances(trace) == {"all_reduce": (2 * 2 + 3) * STEPS}


def test_fsdp_on_a_mesh(tmp_path):
    _, trace = convert("fsdp-mesh-shared", tmp_path)
    names = {group.id: group.desc for group in trace.header.groups}
    assert sorted(names.values()) == [
        "default_pg",
        "mesh_replicate",
        "mesh_replicate",
        "mesh_shard",
        "mesh_shard",
    ]
    nodes = trace.collect().drop_nulls("seq")
    kinds = {(names[g], kind) for g, kind in nodes.select("group", "kind").iter_rows()}
    assert kinds == {
        ("mesh_shard", "all_gather"),
        ("mesh_shard", "reduce_scatter"),
        ("mesh_replicate", "all_reduce"),
    }


@pytest.mark.parametrize("job", ["ddp", "ddp-nosync", "tp", "pp", "pp-nosync", "groups"])
@pytest.mark.parametrize("grain", ["communication", "kernel"])
def test_the_recorded_timeline_comes_back(job, grain, tmp_path):
    _, trace = convert(job, tmp_path, grain=grain)
    result = prismcalib.merge(trace)
    assert result.report.propagated_ns == result.report.recorded_ns
    spread = result.report.clock.end_spread_before
    assert spread is not None
    # Two devices of one host: ends of one collective agree within about a microsecond.
    assert spread.median_ns < 2_000
