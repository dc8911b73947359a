"""Conversion of recorded traces: facts that were verified from the files by other means."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from prismtrace.converters import ConvertReport, convert
from prismtrace.errors import AlignmentError, GroupError, InputFileError, RankError
from prismtrace.schema import TraceKind
from prismtrace.trace import Trace
from tests.prismtrace.kineto_events import rows, run


@pytest.fixture(scope="module")
def kineto(data_dir: Path) -> Path:
    return data_dir / "kineto"


@pytest.fixture(scope="module", params=["communication", "kernel"])
def grain(request: pytest.FixtureRequest) -> str:
    return request.param


Converted = tuple[Trace, ConvertReport]


@pytest.fixture(scope="module")
def megatron(kineto: Path, grain: str, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return run(tmp_path_factory.mktemp("megatron"), kineto / "megatron-tp8", grain=grain)


@pytest.fixture(scope="module")
def dlrm(kineto: Path, grain: str, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return run(tmp_path_factory.mktemp("dlrm"), kineto / "dlrm8", grain=grain)


def instances(trace: Trace) -> pl.DataFrame:
    return (
        trace.nodes.filter(pl.col("seq").is_not_null())
        .with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
        .group_by("group", "seq")
        .agg(
            pl.len().alias("members"),
            kinds=pl.col("kind").n_unique(),
            kind=pl.col("kind").first().cast(pl.String),
            last_start=pl.col("start_ns").max(),
            first_end=pl.col("end_ns").min(),
            start_spread=pl.col("start_ns").max() - pl.col("start_ns").min(),
            end_spread=pl.col("end_ns").max() - pl.col("end_ns").min(),
        )
        .sort("seq")
        .collect()
    )


# --- Megatron, TP 8, torch 2.2: no metadata on kernels ------------------------------------------


def test_megatron_matches_every_all_reduce_on_all_ranks(megatron: Converted) -> None:
    trace, report = megatron
    found = instances(trace)
    assert found.height == 84
    assert found["members"].unique().to_list() == [8]
    assert found["kind"].unique().to_list() == ["all_reduce"]
    assert report.matched == {"by-order": 84}
    assert report.repairs == {}
    assert (found["last_start"] < found["first_end"]).all()
    assert (found["end_spread"].median(), found["end_spread"].max()) == (30_000, 49_000)
    assert found["start_spread"].max() == 41_730_000


def test_megatron_window_and_header(megatron: Converted) -> None:
    trace, report = megatron
    header = trace.header
    assert (header.kind, header.world_size, header.ranks) == (
        TraceKind.RECORDED,
        8,
        tuple(range(8)),
    )
    assert (header.steps, report.missing_ranks) == ((3,), ())
    assert [(g.name, g.ranks) for g in header.groups] == [("world", tuple(range(8)))]
    start, end = (
        trace.nodes.select(
            pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("dur_ns")).max().alias("end")
        )
        .collect()
        .row(0)
    )
    assert end - start == 630_762_000


def test_megatron_counts_at_each_grain(megatron: Converted, grain: str) -> None:
    trace, report = megatron
    per_rank = trace.nodes.group_by("rank").agg(
        pl.len(),
        comms=(pl.col("kind") == "all_reduce").sum(),
        kernels=pl.col("x_kernels").sum() if grain == "communication" else pl.len(),
    )
    for _, nodes, comms, kernels in per_rank.collect().iter_rows():
        assert comms == 84
        # 690 kernels, 6 copies and 81 fills of memory.
        assert kernels == 690 + 6 + 81
        assert nodes == kernels if grain == "kernel" else nodes < 200
    assert report.events == 121_756


def test_megatron_payload_from_shapes_and_kernel_names(megatron: Converted) -> None:
    trace, _ = megatron
    found = trace.nodes.filter(pl.col("kind") == "all_reduce").group_by(
        "bytes", "dtype", "reduce_op"
    )
    sizes = {row[:3]: row[3] for row in found.len().collect().iter_rows()}
    assert sizes[2 * 4 * 2048 * 4096, "float16", "sum"] == 8 * 81
    assert sum(n for (_, dtype, _), n in sizes.items() if dtype == "float32") == 8 * 3


def test_megatron_waits(megatron: Converted) -> None:
    # Every all_reduce waits for the computing stream, and is waited for by it. The 85th runs
    # within one rank: it has no kernel and no edges.
    _, report = megatron
    assert report.edges == {"comm-input": 8 * 84, "record-wait": 8 * 84}


def test_edges_lead_back_and_never_from_what_had_not_ended(megatron: Converted) -> None:
    trace, _ = megatron
    nodes = trace.nodes.with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    pairs = (
        nodes.select("rank", "index", "stream", "start_ns", dep="deps")
        .explode("dep")
        .filter(pl.col("dep").is_not_null())
        .with_columns(source=pl.col("index") - pl.col("dep"))
        .join(
            nodes.select("rank", source="index", source_stream="stream", end_ns="end_ns"),
            on=["rank", "source"],
        )
        .collect()
    )
    across = pairs.filter(pl.col("stream") != pl.col("source_stream"))
    assert len(across) == 2 * 8 * 84
    assert (across["end_ns"] - across["start_ns"]).max() <= 5_000


# --- DLRM, torch 2.1: old kernel names, operations without launch -------------------------------


def test_dlrm_matches_all_to_alls_and_all_reduces(dlrm: Converted) -> None:
    trace, report = dlrm
    found = instances(trace)
    assert found.height == 8
    assert found["members"].unique().to_list() == [8]
    assert sorted(found["kind"]) == ["all_reduce"] * 3 + ["all_to_all"] * 5
    assert (found["end_spread"].median(), found["end_spread"].max()) == (2_500, 7_000)
    assert found["start_spread"].max() == 7_624_000
    assert report.matched == {"by-order": 8}


def test_dlrm_counts_operations_without_launch(dlrm: Converted) -> None:
    trace, report = dlrm
    assert report.repairs["orphan-launch"] == 2 * 64
    assert report.repairs["assumed-world-group"] == 8 * 8
    assert trace.header.policies == report.repairs


def test_dlrm_orphans_keep_their_place_on_their_stream(kineto: Path, tmp_path: Path) -> None:
    trace, _ = run(tmp_path, [*sorted((kineto / "dlrm8").glob("worker1_*"))], grain="kernel")
    nodes = trace.nodes.collect()
    by_stream = nodes.group_by("stream").agg("start_ns")
    assert all(starts == sorted(starts) for starts in by_stream["start_ns"].to_list())


# --- Single files -------------------------------------------------------------------------------


def test_metadata_with_base_time_at_the_end(kineto: Path, tmp_path: Path) -> None:
    file = kineto / "edge-cases/nccl_metadata_base_time_last.json.gz"
    trace, report = run(tmp_path, file)
    assert (report.ranks, report.world_size, report.missing_ranks) == ((0,), 2, (1,))
    assert [(g.name, g.desc, g.ranks) for g in trace.header.groups] == [("0", "default_pg", (0, 1))]
    comms = trace.nodes.filter(pl.col("group") == 0).collect()
    assert comms.height == 21
    assert comms["seq"].sort().to_list() == list(range(21))
    assert set(comms["kind"].cast(pl.String)) == {"all_reduce", "broadcast"}
    sizes = comms.filter(pl.col("kind") == "all_reduce")["bytes"].to_list()
    assert 4 * 6_637_568 in sizes
    # Absolute time: April 2024 as the file's base, 51 days into it.
    assert comms["start_ns"].min() // 10**15 == 1_716


def test_large_comms_id(kineto: Path, tmp_path: Path) -> None:
    trace, report = run(tmp_path, kineto / "edge-cases/large_integer_comms_id_rank-70.json.gz")
    assert report.ranks == (70,)
    assert rows(trace, "rank", "kind", "seq") == [(70, "all_reduce", 0)]


def test_rank_not_found(kineto: Path, tmp_path: Path) -> None:
    file = kineto / "edge-cases/rank_not_found.json.gz"
    with pytest.raises(RankError) as caught:
        convert(file, tmp_path / "run.parquet")
    assert str(file) in str(caught.value)
    assert "--rank rank_not_found.json.gz=N" in (caught.value.hint or "")
    # What a rank does not mend is said at once: the job used NCCL, the GPU was not profiled.
    assert "no GPU events" in str(caught.value)
    assert "CUDA" in (caught.value.hint or "")
    with pytest.raises(InputFileError, match="no GPU events") as caught_next:
        convert(file, tmp_path / "run.parquet", ranks={file.name: 3})
    assert "CUDA" in (caught_next.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_cuda_event_sync(kineto: Path, tmp_path: Path) -> None:
    file = kineto / "edge-cases/cuda_event_sync.json.gz"
    _, report = run(tmp_path, file, ranks={file.name: 0}, grain="kernel")
    assert report.repairs == {}


def test_cuda_event_sync_multi_stream(kineto: Path, tmp_path: Path) -> None:
    file = kineto / "edge-cases/cuda_event_sync_multi_stream.json.gz"
    trace, report = run(tmp_path, file, ranks={file.name: 0}, grain="kernel")
    # A memset and a kernel on each stream; what 24 runs waits for the event recorded on 20.
    streams = trace.header.streams
    assert [(streams[s], d) for s, d in rows(trace, "stream", "deps")] == [
        ("stream 20", []),
        ("stream 20", [1]),
        ("stream 28", []),
        ("stream 28", [1]),
        ("stream 24", [3]),
        ("stream 24", [1]),
    ]
    assert report.edges == {"stream-wait": 1}
    assert report.repairs == {"unresolved-sync-record": 1}


def test_one_rank_of_a_cpu_job(kineto: Path, tmp_path: Path) -> None:
    trace, report = run(tmp_path, kineto / "edge-cases/cpu_only_rank-34.json.gz")
    assert (report.ranks, report.world_size, len(report.missing_ranks)) == ((34,), 300, 299)
    assert report.steps == (551, 552, 553, 554, 555)
    # Numbered, but met by nobody.
    assert report.matched == {"alone": 10}
    assert trace.nodes.filter(pl.col("group").is_not_null()).collect().height == 10


# --- What must be refused -----------------------------------------------------------------------


def test_sampled_events_are_refused(kineto: Path, tmp_path: Path) -> None:
    with pytest.raises(AlignmentError) as caught:
        convert(kineto / "edge-cases/sampled", tmp_path / "run.parquet")
    assert "ranks 0 and 1" in str(caught.value)
    assert "sampled or dropped" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_sampled_events_can_be_kept_unaligned(kineto: Path, tmp_path: Path) -> None:
    trace, report = run(tmp_path, kineto / "edge-cases/sampled", unmatched="keep")
    assert trace.nodes.filter(pl.col("seq").is_not_null()).collect().height == 0
    assert report.matched == {}
    assert report.repairs["kept-unmatched"] == 20


def test_gloo_with_several_groups_is_refused(kineto: Path, tmp_path: Path) -> None:
    with pytest.raises(GroupError) as caught:
        convert(kineto / "gloo-cpu-4", tmp_path / "run.parquet")
    message = str(caught.value)
    for candidate in (
        "'0' (default_pg) = ranks 0-3",
        "'1' (dp) = ranks 0,2",
        "'3' (pp) = ranks 0-1",
    ):
        assert candidate in message
    assert "--unmatched keep" in (caught.value.hint or "")


def test_gloo_with_several_groups_can_be_kept(kineto: Path, tmp_path: Path) -> None:
    trace, report = run(tmp_path, kineto / "gloo-cpu-4", unmatched="keep")
    assert report.world_size == 4
    # Five groups over all ranks; each file lists its own.
    listed = {g.name: g.ranks for g in trace.header.groups}
    assert listed == {"0": (0, 1, 2, 3), "1": (0, 2), "2": (1, 3), "3": (0, 1), "4": (2, 3)}
    comms = trace.nodes.filter(~pl.col("kind").is_in(["compute", "memcpy"])).collect()
    assert comms.height == report.repairs["kept-without-group"] > 0
    assert comms["group"].null_count() == comms["seq"].null_count() == comms.height
    assert report.edges["inferred-wait"] > 0


# --- The same bytes whatever the order and the number of processes -------------------------------


def test_result_does_not_depend_on_order_or_jobs(kineto: Path, tmp_path: Path) -> None:
    files = sorted((kineto / "dlrm8").iterdir())
    results = set()
    for number, (inputs, jobs) in enumerate(
        [(files, 1), (files[::-1], 1), ([kineto / "dlrm8"], 2), (files[3:] + files[:3], 3)]
    ):
        output = tmp_path / f"{number}.parquet"
        convert(inputs, output, jobs=jobs, grain="kernel")
        results.add(output.read_bytes())
    assert len(results) == 1


def test_name_and_place_of_files_do_not_matter(kineto: Path, tmp_path: Path) -> None:
    copies = tmp_path / "with space"
    copies.mkdir()
    for file in (kineto / "dlrm8").iterdir():
        shutil.copyfile(file, copies / file.name.replace(".gz", ""))
    first, _ = run(tmp_path, kineto / "dlrm8")
    nodes = first.nodes.collect()
    second, _ = run(tmp_path, [copies / "*.json"])
    assert second.nodes.collect().equals(nodes)
