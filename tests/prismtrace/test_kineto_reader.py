from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismtrace.converters.kineto.reader import KinetoFile, read_kineto, read_kineto_blocks
from prismtrace.errors import InputFileError, MixedRanksError, SourceFormatError

BASE_NS = 1_719_853_884_000_000_000


def event(name: str = "k", ts: float = 10, dur: float = 2, cat: str = "kernel", **more: Any) -> Any:
    args = more.pop("args", {"stream": 7, "device": 0, "correlation": 5, "External id": 3})
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            **more, "args": args}  # fmt: skip


def document(*events: Any, **metadata: Any) -> dict[str, Any]:
    info = {"backend": "nccl", "rank": 1, "world_size": 2}
    return {"schemaVersion": 1, "distributedInfo": info, **metadata, "traceEvents": list(events)}


def read_text(text: str | bytes, block: int = 10**9, **options: Any) -> KinetoFile:
    data = text if isinstance(text, bytes) else text.encode()
    blocks = (data[i : i + block] for i in range(0, len(data), block))
    return read_kineto_blocks(blocks, path=Path("t.json"), **options)


def read_events(*events: Any, **metadata: Any) -> KinetoFile:
    return read_text(json.dumps(document(*events, **metadata)))


def repairs(file: KinetoFile) -> dict[str, int]:
    return {k: n for k, n in file.counts.items() if k not in {"events", "kept"}}


# --- Recorded traces -------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(8))
def test_megatron_counts(data_dir: Path, rank: int) -> None:
    file = read_kineto(data_dir / f"kineto/megatron-tp8/megatron_kineto_{rank}.json.gz")
    by_cat = dict(file.events.group_by("cat").len().iter_rows())
    assert (by_cat["kernel"], by_cat["cpu_op"], by_cat["cuda_driver"]) == (690, 5337, 120)
    nccl = file.events.filter(pl.col("name").str.starts_with("ncclDevKernel_AllReduce"))
    assert (len(nccl), nccl["stream"].unique().to_list()) == (84, [24])
    records = file.comms.join(file.events, on="row").filter(pl.col("name") == "record_param_comms")
    # 85 records of data, 85 of waiting: only the first kind has tensors.
    assert records["concrete_inputs"].list.len().value_counts(sort=True).rows() == [
        (8, 85),
        (7, 85),
    ]
    assert file.metadata.rank == rank
    assert (file.metadata.world_size, file.metadata.backend) == (8, "nccl")
    assert file.metadata.device_names == ("NVIDIA A100-SXM4-80GB",) * 8
    assert file.has_gpu


def test_megatron_ends_agree(data_dir: Path) -> None:
    spreads = pl.concat(
        read_kineto(path)
        .events.filter(pl.col("name").str.starts_with("nccl") & (pl.col("cat") == "kernel"))
        .sort("start_ns")
        .select(k=pl.int_range(pl.len()), name="name", end=pl.col("start_ns") + pl.col("dur_ns"))
        for path in sorted((data_dir / "kineto/megatron-tp8").iterdir())
    )
    by_k = spreads.group_by("k").agg(
        names=pl.col("name").n_unique(), spread=pl.col("end").max() - pl.col("end").min()
    )
    assert by_k["names"].to_list() == [1] * 84
    assert (by_k["spread"].median(), by_k["spread"].max()) == (30_000, 49_000)


def test_dlrm_nccl_kernels(data_dir: Path) -> None:
    for path in sorted((data_dir / "kineto/dlrm8").iterdir()):
        file = read_kineto(path)
        nccl = file.events.filter(pl.col("name").str.starts_with("ncclKernel"))
        assert (len(nccl), nccl["stream"].unique().to_list()) == (8, [84])


def test_nccl_metadata_and_base_at_the_end(data_dir: Path) -> None:
    file = read_kineto(data_dir / "kineto/edge-cases/nccl_metadata_base_time_last.json.gz")
    assert file.counts["events"] == 40_573
    assert file.metadata.base_time_ns == 1_711_964_646_000_000_000
    assert file.metadata.nccl_version == "2.17.1"
    assert [(g.name, g.desc, g.ranks) for g in file.metadata.groups] == [
        ("0", "default_pg", (0, 1))
    ]
    assert file.events["start_ns"].min() > file.metadata.base_time_ns
    kernels = file.comms.join(file.events.filter(pl.col("cat") == "kernel"), on="row")
    assert len(kernels) == 21
    assert kernels["pg_ranks"].to_list() == [[0, 1]] * 21
    first = file.events.row(0, named=True)
    assert first["start_ns"] == 1_711_964_646_000_000_000 + 4_458_676_522_690_655
    assert (first["dur_ns"], first["external_id"], first["rf_id"]) == (156_777, 2049, 1909)
    memcpy = file.events.filter(pl.col("cat") == "gpu_memcpy")
    assert memcpy["bytes"].null_count() == 0


def test_large_comms_id(data_dir: Path) -> None:
    file = read_kineto(data_dir / "kineto/edge-cases/large_integer_comms_id_rank-70.json.gz")
    assert file.comms["comms_id"].to_list() == [10_159_970_886_766_084_423]


def test_cuda_sync(data_dir: Path) -> None:
    file = read_kineto(data_dir / "kineto/edge-cases/cuda_event_sync.json.gz")
    syncs = file.syncs
    assert sorted(syncs["kind"]) == ["Context Sync", "Event Sync", "Event Sync", "Stream Sync"]
    waits = syncs.filter(pl.col("kind") == "Event Sync")
    assert waits["wait_on_record_correlation"].to_list() == [1533, 1533]
    context = syncs.filter(pl.col("kind") == "Context Sync").join(file.events, on="row")
    assert context["stream"].to_list() == [None]


def test_cuda_sync_multi_stream(data_dir: Path) -> None:
    file = read_kineto(data_dir / "kineto/edge-cases/cuda_event_sync_multi_stream.json.gz")
    waits = file.syncs.join(file.events, on="row").filter(pl.col("kind") == "Stream Wait Event")
    assert waits.select(
        "wait_on_stream", "wait_on_record_correlation", "stream", "correlation"
    ).rows() == [(20, 1385, 24, 1389)]
    resolved = file.syncs.join(file.events, on="row").filter(pl.col("kind") == "Event Sync")
    assert set(
        resolved.select("correlation", "wait_on_record_correlation").drop_nulls().rows()
    ) == {(54, 32), (1410, 62)}
    assert file.counts["unresolved-sync-record"] == 1


def test_cpu_only(data_dir: Path) -> None:
    file = read_kineto(data_dir / "kineto/edge-cases/cpu_only_rank-34.json.gz")
    assert (file.metadata.rank, file.metadata.world_size, file.has_gpu) == (34, 300, False)
    assert len(file.metadata.groups[0].ranks or ()) == 300
    missing = read_kineto(data_dir / "kineto/edge-cases/rank_not_found.json.gz")
    assert missing.metadata.rank is None


def test_gloo(data_dir: Path) -> None:
    groups = set()
    for path in sorted((data_dir / "kineto/gloo-cpu-4").iterdir()):
        file = read_kineto(path)
        assert not file.has_gpu
        assert file.metadata.host_name == "vm"
        groups |= {(g.name, g.ranks) for g in file.metadata.groups}
        names = file.comms.join(file.events, on="row")["name"]
        assert names.str.starts_with("gloo:").sum() == 28
    assert len(groups) == 5


def test_same_events_as_a_plain_parser(data_dir: Path) -> None:
    path = data_dir / "kineto/edge-cases/nccl_metadata_base_time_last.json.gz"
    plain = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    kept = {"kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation"}
    rows = [
        (e["cat"], e["name"], e["pid"], e["tid"], BASE + int(e["ts"] * 1000), int(e["dur"] * 1000),
         e["args"].get("correlation"))
        for BASE in [plain["baseTimeNanoseconds"]]
        for e in plain["traceEvents"] if e["ph"] == "X" and e["cat"] in kept
    ]  # fmt: skip
    file = read_kineto(path)
    columns = ["cat", "name", "pid", "tid", "start_ns", "dur_ns", "correlation"]
    assert file.events.select(columns).rows() == rows


# --- Layouts ---------------------------------------------------------------------------------

INFO = '"distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2}'
PRETTY = (
    '  {\n    "ph": "X", "cat": "kernel", "name": "a", "pid": 0, "tid": 7,\n'
    '    "ts": 1.250, "dur": 0.005,\n    "args": {\n      "stream": 7, "correlation": 5\n    }\n  }'
)
FLOW = (
    '  {\n    "ph": "s", "id": 5, "pid": 9, "tid": 9, "ts": 1.001,\n'
    '    "cat": "ac2g", "name": "ac2g"\n  }'
)
LAYOUTS = {
    "before": f'{{\n  {INFO},\n  "baseTimeNanoseconds": 7000,\n  "traceEvents": [\n{PRETTY},\n{FLOW},\n{PRETTY}\n  ],\n  "traceName": "x"\n}}',
    "after": f'{{"traceEvents":[{PRETTY},{FLOW},{PRETTY}],{INFO},"baseTimeNanoseconds":7000}}',
    "both": f'{{"baseTimeNanoseconds": 7000, "traceEvents" : [ {PRETTY} , {FLOW} ,{PRETTY} ]  , {INFO}}}\n',
    "lists after": f'{{{INFO}, "traceEvents": [{PRETTY}, {FLOW}, {PRETTY}], "deviceProperties": [{{"id": 0, "name": "A"}}, {{"id": 1, "name": "B"}}], "baseTimeNanoseconds": 7000}}',
    "trailing comma": f'{{{INFO}, "baseTimeNanoseconds": 7000, "traceEvents": [\n{PRETTY},\n{FLOW},\n{PRETTY},\n]}}',
    "byte order mark": f'\ufeff{{{INFO}, "baseTimeNanoseconds": 7000, "traceEvents": [\n{PRETTY},\n{FLOW},\n{PRETTY}]}}',
    "compact": "".join(f'{{{INFO}, "baseTimeNanoseconds": 7000, "traceEvents": [{PRETTY},{FLOW},{PRETTY}]}}'.split("\n")),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [1, 7, 64, 10**6])
def test_layouts(layout: str, block: int) -> None:
    file = read_text(LAYOUTS[layout], block)
    assert file.counts == {"events": 3, "kept": 2, "dropped-flow": 1}
    assert file.events["start_ns"].to_list() == [8250, 8250]
    assert file.events["dur_ns"].to_list() == [5, 5]
    assert (file.metadata.rank, file.metadata.world_size) == (1, 2)
    if layout == "lists after":
        assert file.metadata.device_names == ("A", "B")


@pytest.mark.parametrize("block", [1, 50, 10**6])
def test_bare_list(block: int) -> None:
    file = read_text(f"[{PRETTY}, {FLOW}, {PRETTY}]\n", block)
    assert file.counts == {"events": 3, "kept": 2, "dropped-flow": 1}
    assert file.metadata.rank is None
    assert file.events["start_ns"].to_list() == [1250, 1250]


def test_empty_list() -> None:
    file = read_events()
    assert file.counts == {"events": 0, "kept": 0}
    assert file.events.columns[:6] == ["row", "cat", "name", "pid", "tid", "start_ns"]
    assert file.events.schema == read_events(event()).events.schema
    assert file.comms.schema == read_events(event("c10d::send")).comms.schema
    assert not file.has_gpu


@pytest.mark.parametrize("block", [1, 30, 10**6])
def test_nested_objects_in_args(block: int) -> None:
    nested = event(args={"stream": 7, "list": [{"a": [1]}, {"b": "},{"}], "n": [{"c": 1}], "z": 1})
    file = read_text(json.dumps(document(nested, nested, event("last"), nested)), block)
    assert file.events["name"].to_list() == ["k", "k", "last", "k"]
    assert repairs(file) == {}


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ""])
@pytest.mark.parametrize("zipped", [True, False])
def test_gzip_is_told_by_content(tmp_path: Path, suffix: str, zipped: bool) -> None:
    data = json.dumps(document(event())).encode()
    path = tmp_path / f"trace{suffix}"
    # Two members, as `cat a.gz b.gz` makes them, with padding behind.
    path.write_bytes(
        gzip.compress(data[:40]) + gzip.compress(data[40:]) + b"\0" * 8 if zipped else data
    )
    seen: list[int] = []
    file = read_kineto(path, on_bytes=seen.append)
    assert file.counts == {"events": 1, "kept": 1}
    assert sum(seen) == path.stat().st_size


# --- Chunks: any cut gives the same result ---------------------------------------------------

NASTY = st.text(st.sampled_from('{}[]",:\\ \n\tnrué☃𝄞ab'), max_size=12)
NAMES = st.one_of(
    NASTY, st.text(max_size=8), st.sampled_from(['},{"ph":', "}]}", '"}],"x":', "\\"])
)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Any], str]:
    names = draw(st.lists(NAMES, max_size=8))
    events = []
    for i, name in enumerate(names):
        args = {
            "stream": 7,
            name: name,
            "more": [{"x": name}, {"y": [name]}][: draw(st.integers(0, 2))],
        }
        events.append(event(name, ts=i, args=args))
        if draw(st.booleans()):
            events.append({"name": name, "ph": draw(st.sampled_from("Mis")), "ts": 1, "args": {}})
    metadata = {"distributedInfo": {"rank": 1}, "host_name": "h" + draw(NASTY)}
    first = draw(st.booleans())
    whole = {"traceEvents": events, **metadata} if first else {**metadata, "traceEvents": events}
    style = draw(st.sampled_from([{"indent": 2}, {"separators": (",", ":")}, {}]))
    return events, json.dumps(whole, ensure_ascii=draw(st.booleans()), **style)


@given(traces(), st.integers(1, 400))
def test_any_cut_gives_the_same_result(trace: tuple[list[Any], str], block: int) -> None:
    events, text = trace
    file = read_text(text, block)
    kept = [e for e in events if e["ph"] == "X"]
    assert file.events["name"].to_list() == [e["name"] for e in kept]
    assert file.events["start_ns"].to_list() == [e["ts"] * 1000 for e in kept]
    assert file.counts["events"] == len(events)
    assert not any(name.startswith(("repaired", "dropped-un", "trunc")) for name in file.counts)
    assert file.metadata.rank == 1


@given(traces(), st.integers(1, 400), st.data())
def test_any_truncation_keeps_the_complete_events(
    trace: tuple[list[Any], str], block: int, data: st.DataObject
) -> None:
    events = trace[0]
    body = json.dumps(events)[:-1]
    cut = data.draw(st.integers(0, len(body)))
    file = read_text(('{"traceEvents": ' + body)[: 17 + cut], block)
    kept = [e["name"] for e in events if e["ph"] == "X"]
    found = file.events["name"].to_list()
    assert found == kept[: len(found)]
    assert file.counts["truncated"] == 1
    complete = sum(1 for n in _ends(events) if n <= cut)
    assert file.counts["events"] >= complete - 1


def _ends(events: list[Any]) -> Iterator[int]:
    at = 1
    for e in events:
        at += len(json.dumps(e))
        yield at
        at += 2


# --- Exact time ------------------------------------------------------------------------------


@given(st.integers(0, 8_700_000_000_000_000), st.integers(0, 10**12))
def test_relative_decimals_are_exact(start_ns: int, dur_ns: int) -> None:
    text = f'[{{"ph":"X","cat":"kernel","name":"k","ts":{us(start_ns)},"dur":{us(dur_ns)}}}]'
    row = read_text(text).events.row(0, named=True)
    assert (row["start_ns"], row["dur_ns"]) == (start_ns, dur_ns)


@given(st.lists(st.integers(10**18, 9 * 10**18), min_size=1, max_size=5), st.integers(20, 300))
def test_absolute_decimals_are_exact(starts_ns: list[int], block: int) -> None:
    events = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"k","ts":{us(ns)},"dur":0.001}}' for ns in starts_ns
    )
    file = read_text(f'{{"traceEvents":[{events}]}}', block)
    assert file.events["start_ns"].to_list() == starts_ns


def us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def test_integer_microseconds_and_base() -> None:
    file = read_events(event(ts=1_706_850_122_845_782, dur=17))
    assert file.events["start_ns"].to_list() == [1_706_850_122_845_782_000]
    assert file.events["dur_ns"].to_list() == [17_000]
    based = read_events(event(ts=5164786011559.006), baseTimeNanoseconds=BASE_NS)
    assert based.events["start_ns"].to_list() == [BASE_NS + 5_164_786_011_559_006]
    assert based.metadata.base_time_ns == BASE_NS


def test_negative_and_missing_durations_are_counted() -> None:
    endless = event()
    del endless["dur"]
    timeless = event()
    del timeless["ts"]
    file = read_events(event(ts=100.7, dur=-0.2), endless, timeless)
    assert file.events["dur_ns"].to_list() == [0, 0]
    assert repairs(file) == {
        "clamped-negative-duration": 1,
        "missing-duration": 1,
        "dropped-no-time": 1,
    }


def test_ragged_fractions_are_counted() -> None:
    def fractions(pad: str) -> dict[str, int]:
        rows = [
            f'{{"ph":"X","cat":"kernel","name":"k","ts":{i}.{i * 7 % 1000:{pad}},"dur":1}}'
            for i in range(1200)
        ]
        return read_text(f"[{','.join(rows)}]").counts

    assert fractions("d")["ragged-fractions"] > 1000
    assert "ragged-fractions" not in fractions("03d")


# --- Columns ---------------------------------------------------------------------------------


def test_categories_and_aliases() -> None:
    names = {
        "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
        "Operator": "cpu_op", "hip_runtime": "cuda_runtime", "xpu_driver": "cuda_driver",
        "privateuse1_runtime": "cuda_runtime", "mtia_ccp_events": "kernel", "cuda_sync": "cuda_sync",
    }  # fmt: skip
    file = read_events(*[event(cat=cat) for cat in names])
    assert file.events["cat"].to_list() == list(names.values())


def test_dropped_events_are_counted_by_kind() -> None:
    skipped = ["python_function", "gpu_user_annotation", "overhead", "Trace", "cuda_event"]
    flows = [{"ph": "s", "cat": "critical_path", "ts": 1}, {"ph": "f", "cat": "ac2g", "ts": 1}]
    others = [{"ph": "M", "name": "process_name"}, {"ph": "i", "ts": 3, "pid": ""}, {"ph": "Z"}]
    file = read_events(*[event(cat=c, pid="Spans") for c in skipped], *flows, *others)
    assert file.counts == {
        "events": 10, "kept": 0,
        "dropped-python-function": 1, "dropped-gpu-user-annotation": 1, "dropped-overhead": 1,
        "dropped-trace-span": 1, "dropped-other-category": 1, "dropped-critical-path-flow": 1,
        "dropped-flow": 1, "dropped-metadata": 1, "dropped-instant": 1, "dropped-other-phase": 1,
    }  # fmt: skip


def test_integers_of_every_spelling() -> None:
    file = read_events(
        event(pid="12", tid="-3", args={"stream": 4294967295, "correlation": "77", "bytes": 2**70}),
        event(args={"external id": 9, "stream": 3.0, "correlation": "x", "device": True}),
        event(cat="cpu_op", args=None),
    )
    assert file.events["pid"].to_list() == [12, 0, 0]
    assert file.events["tid"].to_list() == [-3, 7, 7]
    assert file.events["stream"].to_list() == [None, 3, None]
    assert file.events["correlation"].to_list() == [77, None, None]
    assert file.events["external_id"].to_list() == [None, 9, None]
    assert file.events["device"].to_list() == [12, 0, None]
    assert file.events["bytes"].to_list() == [None, None, None]
    assert file.counts["dropped-field"] == 3


def test_comm_columns() -> None:
    args = {
        "Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 25136,
        "Out msg nelems": 201088, "Group size": 8, "Process Group Name": "3",
        "Process Group Description": "undefined", "Process Group Ranks": "[0, 1, 2, 3]",
        "In split size": "[]", "Out split size": "[]", "Seq": 4, "Comms Id": 2**64 - 1,
        "Src Rank": 0, "Dst Rank": 1, "Rank": 2, "Is asynchronized op": True,
        "Concrete Inputs": ["", 3, "[]"], "Input Dims": [[4], []], "Input type": ["float", ""],
    }  # fmt: skip
    file = read_events(
        event("other"),
        event("nccl", args=args),
        event("record_param_comms", cat="cpu_op", args={"Process Group Ranks": "[0, 1, ...]"}),
        event("record_param_comms", cat="cpu_op", args={"In msg size": 8, "Comms Id": -1}),
        event("gloo:send", cat="user_annotation", args={"Process Group Ranks": "[]"}),
        event("gloo:send", cat="cpu_op"),
    )
    assert file.comms["row"].to_list() == [1, 2, 3, 4]
    row = file.comms.row(0, named=True)
    assert row["pg_ranks"] == [0, 1, 2, 3]
    assert (row["collective"], row["out_nelems"], row["seq"]) == ("_allgather_base", 201088, 4)
    assert (row["comms_id"], row["is_async"], row["peer"]) == (2**64 - 1, True, 2)
    assert row["concrete_inputs"] == ["", "3", "[]"]
    assert json.loads(row["input_dims"]) == [[4], []]
    assert json.loads(row["input_type"]) == ["float", ""]
    assert file.comms["pg_ranks"].to_list()[1:] == [None, None, None]
    assert file.comms["in_nelems"].to_list()[2] == 8
    assert file.comms["comms_id"].to_list()[2] == 2**64 - 1


def test_kept_arguments() -> None:
    file = read_events(
        event(args={"foo": 1, "stream": 7, "bar": "x"}),
        event(args={"bar": [1, {"y": 2}], "half": 0.5}),
    )
    assert not any(c.startswith("x_arg_") for c in file.events.columns)
    text = json.dumps(document(event(args={"foo": 1, "stream": 7, "bar": "x"}),
                               event(args={"bar": [1, {"y": 2}], "half": 0.5})))  # fmt: skip
    kept = read_text(text, keep_args=["foo", "bar", "half", "stream", "gone", "foo"]).events
    assert kept["x_arg_foo"].to_list() == [1, None]
    assert kept["x_arg_bar"].to_list() == ["x", '[1,{"y":2}]']
    assert kept["x_arg_half"].to_list() == [None, 0.5]
    assert kept["x_arg_stream"].to_list() == [7, None]
    assert kept["x_arg_gone"].to_list() == [None, None]


def test_groups_of_old_and_on_demand_traces() -> None:
    config = [
        {"uid": "5", "pg_desc": "tp", "ranks": "[0, 1]"},
        {"pg_name": "6", "ranks": []},
        {"pg_name": "7", "ranks": [3]},
    ]
    info = {"rank": "3", "world_size": 4, "pg_config": config, "nccl_version": "unknown"}
    file = read_events(event(), distributedInfo=info)
    assert [(g.name, g.desc, g.ranks) for g in file.metadata.groups] == [
        ("5", "tp", (0, 1)),
        ("6", "", None),
        ("7", "", (3,)),
    ]
    assert (file.metadata.rank, file.metadata.nccl_version) == (3, None)


# --- Invalid files ---------------------------------------------------------------------------

GOOD = '{"ph":"X","cat":"kernel","name":"good","pid":0,"tid":7,"ts":1,"dur":1,"args":{"stream":7}}'


def raw_event(name: str = "bad", args: str = '"stream":7') -> str:
    return f'{{"ph":"X","cat":"kernel","name":"{name}","pid":0,"tid":7,"ts":2,"dur":1,"args":{{{args}}}}}'


BROKEN = {
    "inf": (raw_event(args='"memory bandwidth (GB/s)": inf, "stream":7'), "bad", "number"),
    "nan": (raw_event(args='"a": -nan, "b": NaN, "c": [1, Infinity]'), "bad", "number"),
    "number too large": (raw_event(args='"stream": 1e999'), "bad", "number"),
    "lone backslash": (raw_event(r"C:\windows\x"), "C:\\windows\\x", "backslash"),
    "backslash u": (raw_event(r"C:\users"), r"C:\users", "backslash"),
    "backslash at the end": (raw_event("C:\\dir\\"), "C:\\dir\\", "backslash"),
    "line break": (raw_event("a\nb"), "a\nb", "control-character"),
    "control byte": (raw_event("a\x01b"), "a\x01b", "control-character"),
    "bad UTF-8": (raw_event().encode().replace(b"bad", b"a\xffb"), "a\ufffdb", "utf8"),
    "half a surrogate pair": (raw_event(r"\\ud800 \ud83d\ude00\udc80"), "\\ud800 😀\ufffd", "utf8"),
    "stray quotes": (raw_event('a "b" c'), 'a "b" c', "quote"),
    "quote and colon": (raw_event('f("x": 1)'), 'f("x": 1)', "quote"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("block", [1, 100, 10**6])
@pytest.mark.parametrize("style", [",", " ,\n  "])
def test_invalid_text_is_repaired(kind: str, block: int, style: str) -> None:
    bad, name, repair = BROKEN[kind]
    bad = bad if isinstance(bad, bytes) else bad.encode()
    events = style.encode().join([GOOD.encode(), GOOD.encode(), bad, GOOD.encode(), bad])
    text = b'{"traceEvents": [' + events + b'\n], "distributedInfo": {"rank": 4}}'
    file = read_text(text, block)
    assert file.events["name"].to_list() == ["good", "good", name, "good", name]
    assert file.counts["events"] == 5
    assert set(repairs(file)) == {f"repaired-{repair}"}
    assert file.metadata.rank == 4


@pytest.mark.parametrize("block", [1, 100, 10**6])
@pytest.mark.parametrize("rubbish", ['{"ph":"X" "cat":}', '{"ph":,}', '{"ts": 1-2, "name": x}'])
def test_what_cannot_be_repaired_is_dropped(block: int, rubbish: str) -> None:
    text = (
        f'{{"traceEvents": [{GOOD}, {rubbish}, {GOOD}, {GOOD}], "distributedInfo": {{"rank": 4}}}}'
    )
    file = read_text(text, block)
    assert file.events["name"].to_list().count("good") >= 2
    assert file.counts["dropped-unreadable"] >= 1
    assert file.metadata.rank == 4


def test_names_that_look_repairable_stay() -> None:
    name = r'a: nan, "b": inf} \\ C:\new },{"ph":"X"'
    bad = raw_event(args='"x": nan')
    text = f"[{json.dumps(event(name))}, {bad}, {json.dumps(event(name))}]"
    assert read_text(text).events["name"].to_list() == [name, "bad", name]


def test_wrong_types_cost_only_their_field() -> None:
    file = read_events(
        event(), event(args={"stream": [1], "correlation": 4, "Collective name": 5}), event(name=7)
    )
    assert file.events["correlation"].to_list() == [5, 4, 5]
    assert file.events["stream"].to_list() == [7, 7, 7]
    assert file.counts["dropped-field"] == 3


def test_truncated_text() -> None:
    whole = json.dumps(document(event("a"), event("b"), event("c")))
    file = read_text(whole[: whole.index('"c"') + 20])
    assert file.events["name"].to_list() == ["a", "b"]
    assert file.metadata.rank == 1
    assert repairs(file) == {"truncated": 1}


def test_truncated_gzip(tmp_path: Path) -> None:
    events = [event(f"k{i * 7919 % 1000}", ts=i * 1.37) for i in range(3000)]
    data = gzip.compress(json.dumps(document(*events)).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(data[: len(data) // 2])
    file = read_kineto(path)
    assert 0 < file.counts["kept"] < 3000
    assert (file.counts["truncated"], file.counts["damaged-gzip"]) == (1, 1)


@pytest.mark.parametrize("block", [64, 10**6])
def test_two_ranks_in_one_file_are_refused(block: int) -> None:
    one = json.dumps(document(*[event()] * 5))
    two = one.replace('"rank": 1', '"rank": 0')
    interleaved = one[: len(one) // 2] + two + one[len(one) // 2 :]
    for text in (one + two, interleaved):
        with pytest.raises(MixedRanksError, match="ranks 0, 1") as caught:
            read_text(text, block)
        assert caught.value.where == "t.json"
        assert caught.value.hint


def test_broken_metadata_still_gives_rank_and_base() -> None:
    text = f'{{"host_name": "C:\\x", "distributedInfo": {{"rank": 3, "world_size": 8}}, "baseTimeNanoseconds": 5000, "traceEvents": [{GOOD}], "INFO": [oops]}}'
    file = read_text(text)
    assert (file.metadata.rank, file.metadata.world_size) == (3, 8)
    assert file.metadata.base_time_ns == 5000
    assert file.counts["repaired-metadata"] == 1


# --- Wrong files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (gzip.compress(b"", mtime=0), "empty"),
        (b"hello", "no traceEvents"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": null}', "no traceEvents"),
        (b"\x1f\x8bgarbage", "damaged"),
    ],
)
def test_useless_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message) as caught:
        read_kineto(path)
    assert caught.value.where == str(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(InputFileError, match="cannot read the file"):
            read_kineto(path)


def test_other_tools_are_named(tmp_path: Path) -> None:
    path = tmp_path / "et.json"
    path.write_text('{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}')
    with pytest.raises(SourceFormatError, match="PyTorch execution trace"):
        read_kineto(path)


@given(traces(), st.data())
def test_damaged_bytes_never_crash(trace: tuple[list[Any], str], data: st.DataObject) -> None:
    text = bytearray(trace[1].encode(errors="replace"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        piece = data.draw(
            st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"]", b"\xff", b"\n", b","])
        )
        text[at : at + data.draw(st.integers(0, 3))] = piece
    try:
        file = read_text(bytes(text), data.draw(st.integers(5, 400)))
    except (InputFileError, MixedRanksError):
        return
    assert len(file.events) == file.counts["kept"] <= file.counts["events"]
