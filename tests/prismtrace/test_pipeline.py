"""Whole conversions: synthetic jobs, bad input, results that stay whole whatever happens."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from prismtrace.converters import convert
from prismtrace.converters.inputs import expand_inputs
from prismtrace.errors import (
    AlignmentError,
    GroupError,
    InputFileError,
    MixedRanksError,
    OutputError,
    PrismError,
    RankError,
    StepError,
    TraceError,
    ValidationError,
)
from prismtrace.trace import Trace
from tests.prismtrace.kineto_events import (
    ALL_REDUCE,
    document,
    launched,
    metadata,
    rows,
    run,
    write_files,
)
from tests.prismtrace.kineto_jobs import AUTOGRAD, Collective, Compute, Exchange, Job, Mark

# --- jobs of every torch version ----------------------------------------------------------------

JOBS = {
    "torch 2.1, one group": {"torch": "2.1", "dp": 1},
    "torch 2.2, one group": {"torch": "2.2", "dp": 1},
    "torch 2.4": {"torch": "2.4"},
    "torch 2.5, pipeline": {"torch": "2.5", "pp": 2},
    "torch 2.6, batched p2p": {"torch": "2.6", "pp": 2, "batched_p2p": True},
    "torch 2.12, Seq": {"torch": "2.12", "pp": 2},
    "torch 2.13, Comms Id": {"torch": "2.13", "pp": 2, "batched_p2p": True},
    "cuda_sync events": {"torch": "2.6", "pp": 2, "cuda_sync": True},
    "communication on the computing stream": {"torch": "2.12", "pp": 2, "async_comms": False},
    "hosts with different clocks and bases": {
        "torch": "2.6",
        "pp": 2,
        "ranks_per_host": 2,
        "host_offset_ns": 3_000_000_000,
        "base_step_ns": 7_889_238 * 10**9,
    },
}


@pytest.fixture(params=JOBS, ids=str)
def job(request: pytest.FixtureRequest) -> Job:
    return Job(**JOBS[request.param], steps=2)


@pytest.mark.parametrize("grain", ["communication", "kernel"])
def test_jobs_are_matched_completely(job: Job, grain: str, tmp_path: Path) -> None:
    trace, report = run(tmp_path, job.write(tmp_path / "in"), grain=grain)
    assert not [name for name in report.repairs if name != "assumed-world-group"]
    assert (report.world_size, report.steps) == (job.world_size, (3, 4))
    ends = (
        trace.nodes.filter(pl.col("group").is_not_null())
        .select(
            "rank", "seq", end=pl.col("start_ns") + pl.col("dur_ns"), pair="peer", group="group"
        )
        .collect()
    )
    assert ends["seq"].null_count() == 0
    # Members of one instance end together on the true clock.
    offset = pl.col("rank") // job.ranks_per_host * job.host_offset_ns
    collectives = ends.filter(pl.col("pair").is_null()).with_columns(end=pl.col("end") - offset)
    spread = collectives.group_by("group", "seq").agg(
        pl.len(), spread=pl.col("end").max() - pl.col("end").min()
    )
    assert spread["spread"].max() < 5_000
    sizes = {g.id: len(g.ranks) for g in trace.header.groups}
    assert all(count == sizes[group] for group, count in spread.select("group", "len").iter_rows())
    assert sum(report.matched.values()) == len(job.instances)


def test_edges_are_the_true_dependencies(job: Job, tmp_path: Path) -> None:
    # Longest path over the edges, with recorded durations, never ends later than recorded.
    trace, _ = run(tmp_path, job.write(tmp_path / "in"), grain="kernel")
    nodes = trace.nodes.select("rank", "index", "start_ns", "dur_ns", "deps").collect()
    end = {(r, i): start + dur for r, i, start, dur, _ in nodes.iter_rows()}
    for rank, index, start, _, deps in nodes.iter_rows():
        assert all(end[rank, index - back] <= start + 5_000 for back in deps)


def test_a_communication_waits_for_its_input_and_is_waited_for(job: Job, tmp_path: Path) -> None:
    trace, _ = run(tmp_path, job.write(tmp_path / "in"), grain="kernel")
    successors: dict[tuple[int, int], set[str]] = defaultdict(set)
    nodes = trace.nodes.select("rank", "index", pl.col("kind").cast(pl.String), "deps").collect()
    kind = {(rank, index): text for rank, index, text, _ in nodes.iter_rows()}
    first: dict[int, int] = {}
    for rank, index, text, deps in nodes.iter_rows():
        for back in deps:
            successors[rank, index - back].add(text)
        if text != "compute" and deps == []:
            # Only the first operation of a rank may wait for nothing.
            assert first.setdefault(rank, index) == index
    lonely = [key for key in kind if kind[key] != "compute" and not successors[key]]
    # At most the last communication of each stream of a rank is waited for by nobody.
    assert len(lonely) <= 4 * job.world_size


def test_phases_and_steps(tmp_path: Path) -> None:
    trace, _ = run(tmp_path, Job(steps=2).write(tmp_path / "in"), grain="kernel")
    computes = trace.nodes.filter(pl.col("kind") == "compute")
    assert set(rows(Trace(trace.header, computes), "name", "phase")) == {
        ("mm_kernel", None),
        ("mm_kernel", "backward"),
        ("_fused_adam__kernel", "optimizer"),
    }
    assert trace.nodes.collect()["step"].null_count() == 0


def test_a_span_never_crosses_a_step(tmp_path: Path) -> None:
    program = [
        Mark("ProfilerStep#1", 0), Compute("a", 1_000), Compute("b", 1_000),
        Mark("ProfilerStep#2", 0), Compute("c", 1_000), Mark("", 0),
    ]  # fmt: skip
    job = Job(tp=1, dp=1, programs={0: program})
    trace, _ = run(tmp_path, job.write(tmp_path / "in"))
    assert rows(trace, "step", "x_kernels") == [(1, 4), (2, 2)]


def test_exchange_in_both_directions_is_no_cycle(tmp_path: Path) -> None:
    programs: dict[int, Any] = {
        rank: [
            Compute("a", 50_000 * (rank + 1)),
            Exchange((("send", 1 - rank), ("recv", 1 - rank)), batched=True),
            Compute("b", 10_000),
        ]
        for rank in range(2)
    }
    job = Job(tp=2, dp=1, programs=programs, torch="2.7")
    trace, report = run(tmp_path, job.write(tmp_path / "in"))
    assert report.matched == {"p2p": 2}
    batch = trace.nodes.filter(pl.col("batch").is_not_null()).collect()
    assert (
        batch.group_by("rank").agg(pl.col("start_ns", "dur_ns").n_unique()).rows()
        == [
            (0, 1, 1),
            (1, 1, 1),
        ]
        or batch["rank"].n_unique() == 2
    )
    # What follows waits for both operations of the batch.
    last = trace.nodes.filter(pl.col("index") == pl.col("index").max().over("rank")).collect()
    assert all({1, 2} <= set(deps) for deps in last["deps"].to_list())


def test_communication_follows_the_stream_not_the_thread(tmp_path: Path) -> None:
    # The autograd thread computes last; the main thread communicates.
    program = [Compute("a", 1_000), Compute("b", 90_000, AUTOGRAD), Collective("all_reduce", "0")]
    job = Job(tp=2, dp=1, programs={0: program, 1: program})
    trace, _ = run(tmp_path, job.write(tmp_path / "in"), grain="kernel")
    (deps,) = rows(trace, "deps")[4]
    assert deps == [1]


def test_windows_cut_differently(tmp_path: Path) -> None:
    job = Job(tp=2, dp=1, steps=3, torch="2.4")
    documents = job.documents()
    start = {rank: min(e["ts"] for e in d["traceEvents"]) for rank, d in documents.items()}
    length = max(e["ts"] + e["dur"] for e in documents[0]["traceEvents"]) - start[0]
    # Rank 1's profiler began a fifth later and saw neither its launches nor its step's start.
    documents[1]["traceEvents"] = [
        e for e in documents[1]["traceEvents"] if e["ts"] > start[1] + length / 5
    ]
    trace, report = run(tmp_path, write_files(tmp_path / "in", *documents.values()))
    assert report.repairs["unmatched-head"] > 0
    matched = trace.nodes.filter(pl.col("seq").is_not_null()).collect()
    per_rank = matched.group_by("rank").len()["len"].to_list()
    assert per_rank[0] == per_rank[1] == report.matched["by-order"]


# --- options ------------------------------------------------------------------------------------


def test_groups_from_a_file(tmp_path: Path) -> None:
    job = Job(tp=2, dp=2, torch="2.2")
    tensor = {0: "1", 1: "1", 2: "2", 3: "2"}
    job.programs = {r: [Compute("a", 9_000), Collective("all_reduce", tensor[r])] for r in range(4)}
    files = job.write(tmp_path / "in")
    with pytest.raises(GroupError) as caught:
        convert(files, tmp_path / "run.parquet")
    assert "--groups" in (caught.value.hint or "")
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps({"tp0": "0-1", "tp1": [2, 3]}))
    trace, report = run(tmp_path, files, groups=groups)
    assert [(g.name, g.ranks) for g in trace.header.groups] == [("tp0", (0, 1)), ("tp1", (2, 3))]
    assert report.matched == {"by-order": 2}
    for text, problem in [("[]", "not a groups file"), ('{"x": "0-9"}', "outside the world")]:
        groups.write_text(text)
        with pytest.raises(TraceError, match=problem):
            convert(files, tmp_path / "run.parquet", groups=groups)
    with pytest.raises(InputFileError, match="no such file"):
        convert(files, tmp_path / "run.parquet", groups=tmp_path / "absent.json")


def test_strict_refuses_repairs(tmp_path: Path) -> None:
    bad = document(launched("k", 0, 5, -1, 1))
    files = write_files(tmp_path / "in", bad)
    with pytest.raises(ValidationError, match="clamped-negative-duration 1"):
        convert(files, tmp_path / "run.parquet", strict=True)
    assert not (tmp_path / "run.parquet").exists()
    fine = write_files(tmp_path / "fine", document(launched("k", 0, 5, 1, 1)))
    convert(fine, tmp_path / "run.parquet", strict=True)


@pytest.mark.parametrize(
    "options", [{"grain": "operator"}, {"unmatched": "drop"}], ids=["grain", "unmatched"]
)
def test_options_that_do_not_exist(options: dict[str, Any], tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", document(launched("k", 0, 5, 1, 1)))
    with pytest.raises(ValueError, match=next(iter(options))):
        convert(files, tmp_path / "run.parquet", **options)


def test_arguments_can_be_kept_at_kernel_grain_only(tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", document(launched("k", 0, 5, 1, 1)))
    with pytest.raises(TraceError) as caught:
        convert(files, tmp_path / "run.parquet", keep_args=["grid"])
    assert "--grain kernel" in (caught.value.hint or "")


@pytest.mark.parametrize("pattern", ["step_(", "absent"])
def test_steps_that_are_not_there(pattern: str, tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", document(launched("k", 0, 5, 1, 1)))
    with pytest.raises(StepError):
        convert(files, tmp_path / "run.parquet", step_from=pattern)


def test_progress_adds_up_to_the_input(tmp_path: Path) -> None:
    files = Job(tp=2, dp=1).write(tmp_path / "in")
    seen: list[int] = []
    run(tmp_path, files, progress=seen.append, jobs=2)
    assert sum(seen) == sum(file.stat().st_size for file in files)


def test_stream_numbers_of_any_size(tmp_path: Path) -> None:
    numbers = [7, 40_000, 2**31 + 5]
    events = [launched("k", k, 10 * k + 5, 3, k + 1, stream=s) for k, s in enumerate(numbers)]
    trace, _ = run(tmp_path, write_files(tmp_path / "in", document(*events)))
    assert list(trace.header.streams.values()) == [f"stream {number}" for number in numbers]
    assert rows(trace, "stream") == [(0,), (1,), (2,)]


def test_result_does_not_depend_on_order_or_jobs(tmp_path: Path) -> None:
    files = Job(pp=2, torch="2.6", batched_p2p=True).write(tmp_path / "in")
    results = set()
    for number, (inputs, jobs) in enumerate([(files, 1), (files[::-1], 1), (files, 2)]):
        convert(inputs, tmp_path / f"{number}.parquet", jobs=jobs)
        results.add((tmp_path / f"{number}.parquet").read_bytes())
    assert len(results) == 1


def test_many_small_files(tmp_path: Path) -> None:
    world = 100
    ranks = "[" + ", ".join(map(str, range(30))) + ", ...]"
    files = write_files(
        tmp_path / "in",
        *(
            document(
                launched("gemm", 0, 3, 5 + rank / 100, 1),
                launched(ALL_REDUCE, 1, 9 + rank / 100, 20 - rank / 100, 2, stream=20,
                         **{**metadata(group="0", ranks=ranks), "Group size": world}),
                rank=rank,
                world_size=world,
                groups={"0": list(range(world))},
            )
            for rank in range(world)
        ),
    )  # fmt: skip
    trace, report = run(tmp_path, files)
    assert report.matched == {"by-order": 1}
    assert trace.nodes.select(pl.col("group", "seq").drop_nulls().n_unique()).collect().row(0) == (
        1,
        1,
    )


# --- bad input ----------------------------------------------------------------------------------


def good(rank: int = 0, **more: Any) -> dict[str, Any]:
    return document(launched("gemm", 0, 5, 10, 1), **{"rank": rank, "world_size": 2, **more})


def truncated() -> bytes:
    text = json.dumps(Job(tp=1, dp=1).documents()[0]).encode()
    return text[: len(text) * 2 // 3]


BAD: dict[str, tuple[list[Any], type[PrismError], str]] = {
    "empty": ([b""], PrismError, ""),
    "not JSON": ([b"hello world\n" * 50], PrismError, ""),
    "binary": ([bytes(range(256)) * 9], PrismError, ""),
    "no events": ([document()], InputFileError, "neither GPU events nor CPU operators"),
    "truncated": ([truncated()], InputFileError, "damaged"),
    "truncated gzip": ([gzip.compress(truncated())[:-200]], InputFileError, "damaged"),
    "execution trace": ([{"schema": "1.1.1-chakra.0.0.4", "nodes": []}], RankError, "execution trace does not say"),
    "duplicate ranks": ([good(0), good(0)], RankError, "rank 0 is in two files"),
    "rank outside": ([good(5)], RankError, "outside the world of 2"),
    "world sizes": ([good(0), good(1, world_size=4)], RankError, "disagree about the world size"),
    "group outside": ([good(0, groups={"1": [0, 9]})], GroupError, "outside the world"),
    "no rank": ([good(rank=None)], RankError, "--rank"),
    "other steps": (
        [
            document(
                *(
                    launched(ALL_REDUCE, 9 * k, 90 * k + 5, 20, k, stream=20,
                             **metadata(nelems=8 * k + rank))
                    for k in range(1, 5)
                ),
                rank=rank,
                world_size=2,
            )
            for rank in range(2)
        ],
        AlignmentError,
        "do not match",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "jobs"), [*((case, 1) for case in BAD), ("truncated", 2), ("duplicate ranks", 2)]
)
def test_bad_input_is_one_error_and_leaves_nothing(case: str, jobs: int, tmp_path: Path) -> None:
    contents, kind, text = BAD[case]
    folder = tmp_path / "in"
    files = write_files(folder, *contents)
    if case == "no rank":
        files = [file.rename(folder / "x.json") for file in files]
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.parquet").write_bytes(b"previous")
    with pytest.raises(kind) as caught:
        convert(files, out / "run.parquet", jobs=jobs)
    error = caught.value
    assert text in f"{error} {error.hint}"
    assert error.where, "the place is named"
    assert error.hint, "the next action is named"
    if kind is not AlignmentError and case != "group outside":
        assert any(str(file) in error.where for file in files)
    assert [path.name for path in out.iterdir()] == ["run.parquet"]
    assert (out / "run.parquet").read_bytes() == b"previous"


def test_two_ranks_in_one_file(tmp_path: Path) -> None:
    one, two = json.dumps(good(0)), json.dumps(good(1))
    (file,) = write_files(tmp_path / "in", one + two)
    with pytest.raises(MixedRanksError):
        convert(file, tmp_path / "run.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_truncated_file_can_be_recovered(tmp_path: Path) -> None:
    (file,) = write_files(tmp_path / "in", truncated())
    file = file.rename(file.with_name("rank0.json"))
    trace, report = run(tmp_path, file, recover=True)
    assert report.repairs["truncated"] == 1
    assert trace.header.policies["truncated"] == 1
    assert trace.nodes.collect().height > 0
    # What came behind the cut is no fault of the profiler's options.
    begin = b'"traceEvents": ['
    file.write_bytes(truncated().partition(begin)[0] + begin)
    with pytest.raises(InputFileError) as caught:
        run(tmp_path, file, recover=True)
    assert "cut short" in str(caught.value.hint)


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    output = tmp_path / "run.parquet"
    for inputs, text in [
        (tmp_path / "absent.json", "no such file"),
        (tmp_path / "*.json.gz", "no file matches"),
        (tmp_path / "empty", "holds no trace"),
        ([], "no input file"),
    ]:
        with pytest.raises(InputFileError, match=text) as caught:
            convert(inputs, output)
        assert caught.value.hint
    (tmp_path / "empty" / "jobs").mkdir()
    with pytest.raises(InputFileError) as outer:
        convert(tmp_path / "empty", output)
    assert str(outer.value.hint).endswith("the folders in it are not looked into: jobs")
    file, _ = write_files(tmp_path / "in", good(0), good(1))
    with pytest.raises(RankError, match="given twice"):
        convert([file, file], output)
    with pytest.raises(RankError, match="names no input file"):
        convert(file, output, ranks={"other.json": 1})
    with pytest.raises(RankError, match="not negative"):
        convert(file, output, ranks={file.name: -1})


def test_a_folder_of_operation_logs(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("dp_rank,stage,step,optype,start_ts,duration\n")
    (tmp_path / "other.csv").write_text("a,b\n")
    assert expand_inputs(tmp_path) == [log]


def test_unreadable_file(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root reads everything but this.
        file = Path("/proc/self/mem")
    else:
        (file,) = write_files(tmp_path / "in", good())
        file.chmod(0)
    with pytest.raises(InputFileError, match="cannot read") as caught:
        convert(file, tmp_path / "run.parquet")
    assert caught.value.where == str(file)
    assert not list(tmp_path.glob("*run*"))


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", good())
    (tmp_path / "folder").mkdir()
    for output in (tmp_path / "absent" / "run.parquet", tmp_path / "folder", files[0] / "x"):
        with pytest.raises(OutputError) as caught:
            convert(files, output)
        assert str(output) in str(caught.value)
        assert caught.value.hint
    with pytest.raises(OutputError, match="one of the inputs"):
        convert(files, files[0])
    assert json.loads(files[0].read_text())
    assert not list((tmp_path / "folder").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", good())
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with pytest.raises(OutputError):
        convert(files, closed / "run.parquet")


# --- failures of the machine --------------------------------------------------------------------

SCRIPT = """
import sys
from prismtrace.converters import convert
from prismtrace.errors import PrismError
try:
    convert([sys.argv[1]], sys.argv[2], jobs=int(sys.argv[3]), grain="kernel")
except PrismError as error:
    print(type(error).__name__, "|", error, "|", error.hint)
except KeyboardInterrupt:
    print("interrupted")
"""


def start(inputs: Path, output: Path, jobs: int, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(inputs), str(output), str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("limit", [2_000, 9_000], ids=["temporary files", "result"])
def test_full_disk(jobs: int, limit: int, tmp_path: Path) -> None:
    # A limit on the size of files fails in the same calls as a full disk does.
    Job(tp=2, dp=1, layers=6).write(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.parquet").write_bytes(b"previous")

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start(tmp_path / "in", out / "run.parquet", jobs, preexec_fn=restrict)
    stdout, stderr = process.communicate()
    assert stdout.startswith("OutputError | cannot write the result: File too large"), stderr
    if limit < 5_000:
        assert "free some space" in stdout
    assert (out / "run.parquet").read_bytes() == b"previous"
    assert [path.name for path in out.iterdir()] == ["run.parquet"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupt(jobs: int, tmp_path: Path) -> None:
    (file, *_) = Job(tp=1, dp=1, steps=40, layers=12).write(tmp_path / "in")
    for rank in range(1, 24):
        shutil.copyfile(file, file.with_name(f"rank{rank}.json"))
    out = tmp_path / "out"
    out.mkdir()
    process = start(tmp_path / "in", out / "run.parquet", jobs)
    deadline = time.monotonic() + 30
    while not list(out.glob(".*.parts/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert stdout == "interrupted\n", stderr
    assert list(out.iterdir()) == []
