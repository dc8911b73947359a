"""Flight-recorder dumps beside profiles: which group a collective belongs to."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import prismtrace as pt
from prismtrace.converters.flight.resolving import dumps_beside, groups_from_dumps
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.placing import RankComms
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.errors import GroupError, RankError
from prismtrace.schema import DType, Kind
from tests.prismtrace.flight_dumps import MS, START_NS, Recorder, recorders, write_dumps
from tests.prismtrace.kineto_jobs import Collective, Job


def profile(recorder: Recorder, window: slice, *, late_ns: int = MS // 4, **told: str) -> RankTrace:
    """What a profiler that tells no groups (but those `told`, by position) saw of a rank."""
    entries = recorder.entries[window]
    comms = [
        CommOp(
            kind={"nccl:all_reduce": Kind.ALL_REDUCE, "nccl:broadcast": Kind.BROADCAST}[
                entry["profiling_name"]
            ],
            dtype=DType.FLOAT32,
            nbytes=4 * entry["input_sizes"][0][0],
            group_name=told.get(f"at{k}"),
        )
        for k, entry in enumerate(entries)
    ]
    start = np.array([entry["time_created_ns"] for entry in entries], dtype=np.int64) + late_ns
    count = len(entries)
    return RankTrace(
        path=Path("profile.json"),
        rank=recorder.rank,
        world_size=None,
        host=None,
        groups=(NamedGroup("0", "default_pg", (0, 1)),),
        comms=RankComms(
            recorder.rank,
            np.arange(count),
            comms,
            start,
            start + MS // 4,
            [None] * count,
            [None] * count,
            [None] * count,
        ),
        streams=(),
        steps=(),
        nodes=Path("nodes.parquet"),
        rows=count,
        counts={},
    )


def named(trace: RankTrace, recorder: Recorder, tmp_path: Path) -> list[str | None]:
    counts: Counter[str] = Counter()
    paths = write_dumps(tmp_path / "fr", [recorder])
    (found,) = groups_from_dumps([trace], paths, {}, counts)
    names = [comm.group_name for comm in found.comms.comm]
    before = [comm.group_name for comm in trace.comms.comm]
    assert counts["group-from-flight-recorder"] == sum(
        a != b for a, b in zip(names, before, strict=True)
    )
    return names


@pytest.fixture
def recorder() -> Recorder:
    """Groups 0 and a take turns irregularly; no two steps are alike."""
    (found, _) = recorders(2, a=(0, 1))
    for step in range(8):
        for size in range(3):
            found.run(group="a", shape=(size + 1,))
        found.run(shape=(step + 1,))
    return found


def test_a_window_is_found_by_looks(recorder, tmp_path):
    assert named(profile(recorder, slice(8, 16)), recorder, tmp_path) == [*"aaa0"] * 2


def test_a_window_that_begins_before_the_recording(recorder, tmp_path):
    trace = profile(recorder, slice(4, 20))
    recorder.capacity = 22
    assert named(trace, recorder, tmp_path) == [None] * 6 + [*"a0aaa0aaa0"]


def test_places_that_disagree_leave_the_group_open(tmp_path):
    (recorder, _) = recorders(2, a=(0, 1))
    for _ in range(10):
        recorder.run(group="a")
        recorder.run()
    # All operations look alike: the profile may begin with either group.
    late = profile(recorder, slice(5, 9), late_ns=100 * MS)
    assert named(late, recorder, tmp_path) == [None] * 4
    # One that tells its group settles the others.
    late = profile(recorder, slice(5, 9), late_ns=100 * MS, at1="a")
    assert named(late, recorder, tmp_path) == ["0", "a", "0", "a"]


def test_what_looks_different_is_not_named(recorder, tmp_path):
    trace = profile(recorder, slice(8, 16))
    recorder.entries[10]["input_sizes"] = [[77]]
    assert named(trace, recorder, tmp_path) == [None] * 8


def test_equal_periods_need_no_clock(tmp_path):
    (recorder, _) = recorders(2, a=(0, 1))
    for _ in range(10):
        recorder.run(group="a", shape=(2,))
        recorder.run(shape=(3,))
    other_clock = profile(recorder, slice(6, 10), late_ns=-START_NS)
    assert named(other_clock, recorder, tmp_path) == ["a", "0", "a", "0"]


def test_groups_of_one_launch_no_kernel(tmp_path):
    (recorder, _) = recorders(2, a=(0, 1), me=(0,))
    trace_of = []
    for step in range(4):
        recorder.run(group="a", shape=(step + 1,))
        trace_of.append(recorder.entries[-1])
        recorder.run(group="me")
    full = recorder.entries
    recorder.entries = trace_of
    trace = profile(recorder, slice(0, 4))
    recorder.entries = full
    assert named(trace, recorder, tmp_path) == ["a"] * 4


def test_dumps_only_count_as_beside_other_files(recorder, tmp_path):
    paths = write_dumps(tmp_path / "fr", [recorder])
    other = tmp_path / "x.json"
    other.write_text('{"traceEvents": []}')
    assert dumps_beside(paths) == []
    assert dumps_beside([*paths, other]) == paths


def test_dumps_of_which_nothing_is_used_are_counted(recorder, tmp_path):
    trace = profile(recorder, slice(2, 8))
    (stranger, _) = recorders(2, a=(0, 1))
    for _ in range(9):
        stranger.run(shape=(77,))
    counts: Counter[str] = Counter()
    paths = write_dumps(tmp_path / "fr", [stranger])
    (found,) = groups_from_dumps([trace], paths, {}, counts)
    assert {comm.group_name for comm in found.comms.comm} == {None}
    # Of ranks without a profile.
    groups_from_dumps([trace], paths, {paths[0]: 1}, counts)
    assert counts == {"group-from-flight-recorder": 0, "unused-flight-recorder": 2}


def test_two_dumps_of_one_rank(recorder, tmp_path):
    (path,) = write_dumps(tmp_path / "fr", [recorder])
    twin = tmp_path / "b_rank0"
    twin.write_bytes(path.read_bytes())
    with pytest.raises(RankError, match="two flight-recorder dumps"):
        groups_from_dumps([profile(recorder, slice(0, 4))], [path, twin], {}, Counter())


def test_recorded_profiles_and_dumps_of_one_job(data_dir, tmp_path):
    """gloo's profiles name no group: collectives get theirs from the recorder, p2p does not."""
    inputs = [data_dir / "kineto/gloo-cpu-4", data_dir / "flight-recorder"]
    out = tmp_path / "out.parquet"
    with pytest.raises(GroupError, match="send names no process group") as refused:
        pt.convert(inputs, out)
    assert "further inputs" not in (refused.value.hint or "")
    report = pt.convert(inputs, out, unmatched="keep")
    assert report.repairs == {"group-from-flight-recorder": 48, "kept-without-group": 64}
    assert report.matched == {"by-seq": 20}
    trace = pt.open(out)
    assert trace.header.kind == "recorded"
    assert "fr_rank_0" in trace.header.sources
    nodes = trace.nodes.collect()
    sizes = nodes.filter(pl.col("kind").cast(pl.String).is_in(["all_reduce", "all_gather"]))
    assert sizes["group"].null_count() == 0
    recorded = {}
    for rank in range(4):
        dump = pickle.loads((data_dir / f"flight-recorder/fr_rank_{rank}").read_bytes())
        recorded[rank] = [entry["process_group"][0] for entry in dump["entries"]]
    names = {group.id: group.name for group in trace.header.groups}
    for rank in range(4):
        found = [names[group] for group in sizes.filter(pl.col("rank") == rank)["group"]]
        assert found == recorded[rank][-len(found) :]


@pytest.mark.parametrize("torch", ["2.2", "2.3"])
def test_profiles_of_gpus_that_tell_no_groups(tmp_path, torch):
    """Before torch 2.4 a kernel tells the size of its group only: tensor and data groups are alike."""
    job = Job(tp=2, dp=2, torch=torch, steps=2)
    profiles = job.write(tmp_path / "in")
    with pytest.raises(GroupError):
        pt.convert(profiles, tmp_path / "out.parquet")
    groups = {group.name: group.ranks for group in job.groups}
    ranks = [Recorder(rank, groups) for rank in range(job.world_size)]
    for recorder in ranks:
        for _ in range(2):  # the profiled steps are the last of four
            for action in job.program(recorder.rank):
                if isinstance(action, Collective):
                    record(recorder, action, job)
    report = pt.convert([*profiles, *write_dumps(tmp_path / "fr", ranks)], tmp_path / "out.parquet")
    trace = pt.open(tmp_path / "out.parquet")
    assert report.matched == {"by-seq": len(job.instances)}
    assert report.repairs["group-from-flight-recorder"] == 2 * len(job.instances)
    assert [v for v in pt.validate(trace) if v.severity == "error"] == []
    names = {group.id: group.name for group in trace.header.groups}
    nodes = trace.nodes.filter(pl.col("group").is_not_null()).collect()
    for rank in range(job.world_size):
        found = [names[group] for group in nodes.filter(pl.col("rank") == rank)["group"]]
        actions = job.program(rank)
        assert found == [a.group for a in actions if isinstance(a, Collective)]


def record(recorder: Recorder, action: Collective, job: Job) -> None:
    size = len(next(group.ranks for group in job.groups if group.name == action.group))
    recorder.run(
        {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}.get(
            action.kind, action.kind
        ),
        group=action.group,
        shape=(action.nelems // (size if action.kind == "all_gather" else 1),),
        dtype="BFloat16",
    )
