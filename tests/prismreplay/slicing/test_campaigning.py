from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys

import polars as pl
import pytest

from prismcalib import SliceOptions as MergeOptions
from prismcalib import merge
from prismreplay.collect.programs import ProgramCall
from prismreplay.errors import SliceError
from prismreplay.slicing.campaigning import SliceOptions, slice_job
from prismreplay.slicing.placing import gpu_places, places_of
from prismreplay.slicing.progress import Execution
from prismreplay.slicing.running import _is_mixed, _source
from prismreplay.slicing.task import SliceTask
from prismreplay.slicing.workers import Nursery, WorkError
from prismreplay.tensors.choices import TensorChoices
from prismtrace.claiming import Claim
from prismtrace.errors import OutputError
from prismtrace.headers import read_header
from prismtrace.trace import node_schema, open_trace
from tests.prismreplay.slicing.jobs import bare_graph, perform


@pytest.fixture
def job(tmp_path):
    (tmp_path / "train.py").write_text("pass\n")
    graph = bare_graph(tmp_path / "bare.parquet")
    program = ProgramCall(str(tmp_path / "train.py"), ("--steps", "2"))
    run = functools.partial(slice_job, program, tmp_path / "slices", perform=perform)
    return tmp_path, graph, run


def names(folder):
    return sorted(path.name for path in folder.glob("*.parquet"))


def test_slices_merge_into_a_calibrated_trace(job):
    _folder, graph, run = job
    report = run(SliceOptions(graph, 2, repeats=2))
    assert report.slices == ((0, 1), (2, 3))
    assert (report.ran, report.kept, report.settled) == (4, 0, True)
    assert names(report.folder) == [
        "slice-0000-1.parquet",
        "slice-0000.parquet",
        "slice-0001-1.parquet",
        "slice-0001.parquet",
    ]
    files = [report.folder / name for name in names(report.folder)]
    merged = merge(files, slices=MergeOptions(bare=graph))
    assert merged.header.ranks == (0, 1, 2, 3)
    assert merged.report.executions == 4


def test_finished_slices_of_the_same_job_are_kept(job):
    folder, graph, run = job
    run(SliceOptions(graph, 2))
    (folder / "slices" / "slice-0001.parquet").unlink()
    before = (folder / "slices" / "slice-0000.parquet").stat().st_mtime_ns
    report = run(SliceOptions(graph, 2))
    assert (report.ran, report.kept) == (1, 1)
    assert (folder / "slices" / "slice-0000.parquet").stat().st_mtime_ns == before


def test_slices_of_another_program_are_replaced(job):
    folder, graph, run = job
    run(SliceOptions(graph, 2))
    (folder / "train.py").write_text("print()\n")
    with pytest.raises(SliceError, match=r"made otherwise \(program\)"):
        run(SliceOptions(graph, 2, only=1))
    report = run(SliceOptions(graph, 2))
    assert (report.ran, report.kept) == (2, 0)
    assert report.replaced == {
        "slice-0000.parquet": ("program",),
        "slice-0001.parquet": ("program",),
    }
    # Larger slices: there are fewer of them, and none of the old ones stays.
    report = run(SliceOptions(graph, 4))
    assert names(folder / "slices") == ["slice-0000.parquet"]
    assert report.replaced["slice-0001.parquet"] == ("rotation",)


def test_one_slice_is_run_again_alone(job):
    folder, graph, run = job
    run(SliceOptions(graph, 2))
    before = {one: (folder / "slices" / one).stat().st_ino for one in names(folder / "slices")}
    report = run(SliceOptions(graph, 2, only=1))
    after = {one: (folder / "slices" / one).stat().st_ino for one in names(folder / "slices")}
    assert report.ran == 1
    assert before["slice-0000.parquet"] == after["slice-0000.parquet"]
    assert before["slice-0001.parquet"] != after["slice-0001.parquet"]
    with pytest.raises(SliceError, match="no slice 2"):
        run(SliceOptions(graph, 2, only=2))


def test_a_folder_is_one_campaign_s_at_a_time(job):
    folder, graph, run = job
    with contextlib.closing(Claim(folder / "slices")):
        for options in (SliceOptions(graph, 2), SliceOptions(graph, 2, only=1)):
            with pytest.raises(OutputError, match="another run is writing"):
                run(options)
    # Single slices, perhaps on other hosts, are made side by side.
    with contextlib.closing(Claim(folder / "slices", shared=True)):
        assert run(SliceOptions(graph, 2, only=1)).ran == 1
    assert run(SliceOptions(graph, 2)).kept == 1


def test_files_of_others_are_not_touched(job):
    folder, graph, run = job
    (folder / "slices").mkdir()
    mine = folder / "slices" / "slice-0000.parquet"
    mine.write_bytes(b"precious")
    with pytest.raises(SliceError, match="no trace"):
        run(SliceOptions(graph, 2))
    assert mine.read_bytes() == b"precious"
    mine.write_bytes(graph.read_bytes())
    with pytest.raises(SliceError, match="did not write"):
        run(SliceOptions(graph, 2))


def test_refining_ends_when_durations_settle(job):
    folder, graph, run = job
    report = run(SliceOptions(graph, 2, refine=5))
    assert [one.settled for one in report.rounds] == [True]
    assert report.rounds[0].moved_share == 0
    assert names(folder / "slices") == ["slice-0000.parquet", "slice-0001.parquet"]
    fingerprint = read_header(folder / "slices" / "slice-0000.parquet").extra["slicing"]
    assert fingerprint["fingerprint"]["arrivals"] != "early"
    again = run(SliceOptions(graph, 2, refine=5))
    assert (again.ran, again.kept) == (0, 4)


def test_some_steps_only_fit_a_graph_of_these_steps(job):
    _folder, graph, run = job
    report = run(SliceOptions(graph, 2, steps=(1, 1)))
    kept = open_trace(report.graph[0])
    assert kept.header.steps == (1,)
    rows = kept.nodes.collect()
    assert rows["index"].to_list() == [0, 1] * 4
    assert rows["deps"].to_list() == [[], [1]] * 4
    merged = merge(
        [report.folder / f"slice-000{number}.parquet" for number in (0, 1)],
        slices=MergeOptions(bare=kept),
    )
    assert merged.report.rows == rows.height
    with pytest.raises(SliceError, match="steps 5 to 6"):
        run(SliceOptions(graph, 2, steps=(5, 6)))


def test_a_graph_is_needed(job):
    folder, graph, run = job
    run(SliceOptions(graph, 2))
    with pytest.raises(SliceError, match="where a bare graph is due"):
        run(SliceOptions(folder / "slices" / "slice-0000.parquet", 2))


def test_a_package_that_workers_need_is_missed_before_they_begin(job, monkeypatch):
    _folder, graph, run = job
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match="safetensors"):
        run(SliceOptions(graph, 2))


def fail(task):
    if task == "die":
        os._exit(9)
    raise SliceError(task, where="here", hint="so")


def test_failures_of_workers_come_through():
    with Nursery(gc.collect, fail) as nursery:
        with pytest.raises(WorkError, match="this") as caught:
            nursery.start("this").result()
        assert caught.value.error.hint == "so"
        with pytest.raises(WorkError, match="killed"):
            nursery.start("die").result()


def test_slices_run_side_by_side_where_there_are_cores():
    rotation = [(0, 1), (2, 3), (4, 5)]
    places = places_of(None, rotation, range(8))
    assert places.rooms == ((0, 1, 2), (3, 4, 5))
    assert places.timing_true
    assert places_of(3, rotation, range(8)).rooms == ((0, 1, 2),)
    assert places_of(16, rotation[:1], range(8)).at_once == 1
    few = places_of(2, rotation, range(8))
    assert few.rooms == ((0, 1),)
    assert not few.timing_true
    assert places_of(9, rotation, range(2)).rooms == ((), (), ())
    helped = places_of(None, rotation, range(8), assistants=1)
    assert helped.rooms == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_slices_on_gpus_take_one_for_each_rank():
    rotation = ((0, 1), (2, 3), (4, 5))
    places = gpu_places(None, rotation, ["a", "b", "c", "d", "e"], range(8))
    assert places.gpus == (("a", "b"), ("c", "d"))
    assert places.rooms == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert places.timing_true
    assert gpu_places(2, rotation, ["a", "b", "c"], range(8)).gpus == (("a", "b"),)
    assert gpu_places(None, rotation, ["a", "b", "c", "d"], range(4)).rooms == ((), ())
    few = gpu_places(None, rotation, ["a"], range(8))
    assert few.gpus == (("a",),)
    assert not few.timing_true


def test_slices_with_assistants_are_others(job):
    folder, graph, run = job
    run(SliceOptions(graph, 2))
    report = run(SliceOptions(graph, 2, assistants=1))
    assert (report.ran, report.assistants) == (2, 1)
    assert report.replaced["slice-0000.parquet"] == ("assistants",)
    header = read_header(folder / "slices" / "slice-0000.parquet")
    assert header.extra["slicing"]["fingerprint"]["assistants"] == "1"


@pytest.mark.parametrize(
    ("assistants", "sources"),
    [(0, ["none", "none", "none"]), (1, ["reduced", "none", "reduced"])],
)
def test_small_groups_times_are_called_so(tmp_path, assistants, sources):
    graph = bare_graph(tmp_path / "bare.parquet")
    execution = Execution(index=0, repeat=0, ranks=(0, 1))
    task = SliceTask(
        program=ProgramCall("train.py", ()),
        execution=execution,
        graph=(graph,),
        output=tmp_path / "slice.parquet",
        log_dir=tmp_path,
        world_size=4,
        local_world_size=4,
        tensors=TensorChoices(),
        fingerprint={},
        assistants=assistants,
    )
    rows = pl.DataFrame(
        {
            "kind": ["compute", "all_reduce", "send", "recv", "all_reduce"],
            "peer": [None, None, 1, 2, None],
            "group": [None, 0, 0, 0, 1],
            "transfer_source": [None, None, None, None, "measured"],
        },
        schema_overrides={name: node_schema()[name] for name in ("kind", "transfer_source")},
    )
    found = rows.select(_source(_is_mixed([1]), task))["transfer_source"].to_list()
    assert found == [None, *sources, "measured"]


def fail_at_second(task):
    if task.execution.index == 1:
        raise SliceError("it broke", where="slice 1")
    return perform(task)


def test_a_failure_ends_the_campaign_and_leaves_what_is_finished(job):
    folder, graph, run = job
    one_at_a_time = SliceOptions(graph, 2, devices=1)
    with pytest.raises(WorkError, match="it broke"):
        run(one_at_a_time, perform=fail_at_second)
    assert names(folder / "slices") == ["slice-0000.parquet"]
    report = run(one_at_a_time)
    assert (report.ran, report.kept) == (1, 1)
