"""Whatever comes in, a command ends well: a result, or one message that says what to do.

A refusal has exit code 1 (bad input) or 2 (wrong usage), nothing on stdout, one message with
place and hint on stderr, no traceback; the previous output stays, nothing else is left behind.
"""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from prismtrace.trace import open_trace
from prismtrace.validation import validate
from tests.end_to_end.commands import (
    assert_refused,
    changed,
    environment,
    profile,
    words_of,
    write_profiles,
)
from tests.prismtrace.kineto_events import document, kernel

# --- files that are no profiler trace -----------------------------------------------------

EVENT = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"pid":0,"tid":7,"args":{"stream":7}}'
NO_PROFILES = {
    "empty": b"",
    "zeros": bytes(100_000),
    "program": b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 40,
    "html": b"<html></html>",
    "object": b"{}",
    "list": b"[]",
    "huge-number": b"1e999999",
    "utf-16": '{"traceEvents":[]}'.encode("utf-16"),
    "events-null": b'{"traceEvents":null}',
    "events-object": b'{"traceEvents":{}}',
    "events-rubbish": b'{"traceEvents":[null,1,"a",[],{}]}',
    "cut": b'{"traceEvents":[' + EVENT + b"," + EVENT[:40],
    "nested": b'{"traceEvents":' + b"[" * 100_000,
    "digits": b'{"traceEvents":[' + EVENT.replace(b'"ts":1', b'"ts":' + b"9" * 5_000) + b"]}",
    "gzip-start": b"\x1f\x8b",
    "gzip-rubbish": b"\x1f\x8b" + b"\xff" * 5_000,
    "gzip-twice": gzip.compress(gzip.compress(b'{"traceEvents":[]}')),
    "operations": b"dp_rank,stage,step,optype\n\xff\xfe,,,\n",
}


@pytest.mark.parametrize("name", NO_PROFILES)
@pytest.mark.parametrize("recover", [[], ["--recover"]], ids=["plain", "recover"])
def test_no_profile(name: str, recover: list[str], call: Any, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd name\n é.json"
    path.write_bytes(NO_PROFILES[name])
    if recover and name == "cut":
        pytest.skip("one event can be read, and is")
    done = call("prismtrace", "convert", path, "-o", out, *recover)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert "é.json]" in done.err
    assert "\n  hint: " in done.err


def test_an_open_text_full_of_quotes_takes_no_hour(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"traceEvents":[' + EVENT + b',{"name":"' + rb"\"" * 100_000)
    words = ["prismtrace.cli", "convert", path, "-o", out, "--rank", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)], stderr=subprocess.PIPE, env=environment()
    )
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    assert process.returncode == 1


# --- profiles whose content makes no sense ------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        {"correlation": 7},
        {"correlation": "x"},
        {"stream": 2**70},
        {"dtype": "banana"},
        {"In msg nelems": 1e300},
        {"Group size": -1},
        {"Seq": -1},
        {"Process Group Name": "x" * 10_000},
        {"Process Group Ranks": "[0, 99999999999]"},
        {"In msg nelems": -1},
        {"Process Group Ranks": "[0]"},
        {"Process Group Ranks": "[0, 0]"},
    ],
    ids=repr,
)
def test_a_conversion_is_refused_or_valid(edit: Any, call: Any, tmp_path: Path) -> None:
    files = write_profiles(tmp_path / "in", profile(0), profile(1))
    for path in files:
        content = json.loads(path.read_text())
        for event in content["traceEvents"]:
            if event["cat"] == "kernel":
                event["args"] |= edit
        path.write_text(json.dumps(content))
    done = call("prismtrace", "convert", *files, "-o", tmp_path / "run.parquet")
    if done.code:
        assert_refused(done, "rank")
    else:
        found = validate(open_trace(tmp_path / "run.parquet"))
        assert [v for v in found if v.severity == "error"] == []


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, 1e15, -1e18, -5, None, "x"])
def test_odd_times(field: str, value: Any, call: Any, tmp_path: Path) -> None:
    files = write_profiles(tmp_path / "in", profile(0), profile(1))
    content = json.loads(files[1].read_text())
    content["traceEvents"][3][field] = value
    files[1].write_text(json.dumps(content))
    run = tmp_path / "run.parquet"
    done = call("prismtrace", "convert", *files, "-o", run)
    if done.code:
        assert_refused(done, files[1] if str(files[1]) in done.err else "0-1]")
        return
    assert call("prismtrace", "validate", run).code == 0
    merged = call("prismcalib", "merge", run, "-o", tmp_path / "aligned.parquet")
    if merged.code:
        assert_refused(merged, "rank")


@pytest.mark.parametrize("base", [0, -1, 2**63, 1.5, "x", None])
def test_odd_base_times(base: Any, call: Any, tmp_path: Path) -> None:
    documents = [{**profile(rank), "baseTimeNanoseconds": base} for rank in (0, 1)]
    files = write_profiles(tmp_path / "in", *documents)
    run = tmp_path / "run.parquet"
    assert call("prismtrace", "convert", *files, "-o", run).code == 0
    assert call("prismtrace", "validate", run).code == 0


def test_a_base_time_at_the_end_of_int64(call: Any, out: Path, tmp_path: Path) -> None:
    documents = [{**profile(rank), "baseTimeNanoseconds": 2**63 - 1} for rank in (0, 1)]
    files = write_profiles(tmp_path / "in", *documents)
    assert_refused(call("prismtrace", "convert", *files, "-o", out), files[0])


@pytest.mark.parametrize(
    ("world_size", "place"),
    [(1, "1.json"), (-1, "1.json"), (10**12, "0.json")],
)
def test_odd_world_sizes(world_size: int, place: str, call: Any, out: Path, tmp_path: Path) -> None:
    documents = [profile(rank, world_size=world_size) for rank in (0, 1)]
    files = write_profiles(tmp_path / "in", *documents)
    assert_refused(call("prismtrace", "convert", *files, "-o", out), place)


@pytest.mark.parametrize("apart_s", [11, 365 * 86_400], ids=["11 s", "a year"])
def test_clocks_far_apart(apart_s: int, call: Any, tmp_path: Path) -> None:
    files = write_profiles(tmp_path / "in", profile(0), profile(1, apart_s * 1e6))
    run, aligned = tmp_path / "run.parquet", tmp_path / "aligned.parquet"
    assert call("prismtrace", "convert", *files, "-o", run).code == 0
    done = call("prismcalib", "merge", run, "-o", aligned, "--json")
    clocks = json.loads(done.out)["clock"]["domains"]
    assert [clock["offset_ns"] for clock in clocks] == [0, -apart_s * 10**9]
    for reader in ("critical-path", "predict"):
        assert call("prismcalib", reader, aligned).code == 0
    kept = call("prismcalib", "merge", run, "-o", tmp_path / "no.parquet", "--clock", "keep")
    assert_refused(kept, "clock")


def test_clocks_too_far_apart(call: Any, recorded: Path, out: Path, tmp_path: Path) -> None:
    first = pl.when(pl.col("rank") == 0).then(2**62 + 2**61).otherwise(-(2**62) - 2**61)
    path = changed(
        recorded,
        tmp_path / "a.parquet",
        lambda rows, _: rows.with_columns(start_ns=pl.col("start_ns") - 10**18 + first),
    )
    assert_refused(call("prismcalib", "merge", path, "-o", out), "rank")


def test_one_event_and_no_time_at_all(call: Any, tmp_path: Path) -> None:
    still = profile(1)
    for event in still["traceEvents"]:
        event |= {"ts": 5, "dur": 0}
    documents = {"one": [document(kernel("k", 1, 1))], "still": [{**still}, profile(0)]}
    for name, files in documents.items():
        run, aligned = tmp_path / f"{name}.parquet", tmp_path / f"{name}-aligned.parquet"
        paths = write_profiles(tmp_path / name, *files)
        assert call("prismtrace", "convert", *paths, "-o", run).code == 0
        assert call("prismtrace", "validate", run).code == 0
        for reader in ("merge", "critical-path", "predict"):
            source = run if reader == "merge" else aligned
            assert call(*words_of(reader, source, aligned)).code in {0, 1}


# --- traces that are none, or broken ------------------------------------------------------

HEADERS = {
    "of the next version": lambda _, h: h.update(format_version="2.0.0"),
    "of no version": lambda _, h: h.update(format_version=None),
    "of half a version": lambda _, h: h.update(format_version="1"),
    "cut": lambda *_: "{",
    "empty": lambda *_: "",
    "null": lambda *_: "null",
    "of another kind": lambda _, h: h.update(kind="banana"),
    "with a negative world": lambda _, h: h.update(world_size=-1),
    "with falling ranks": lambda _, h: h.update(ranks="5-1"),
    "with a group twice": lambda _, h: h.update(groups=h["groups"] * 2),
    "with a group outside": lambda _, h: h["groups"][0].update(ranks="0-7"),
    "nested": lambda *_: "[" * 100_000,
    "with a billion ranks": lambda _, h: h.update(ranks="0-999999999999", world_size=10**12),
}


@pytest.mark.parametrize("edit", [pytest.param(edit, id=name) for name, edit in HEADERS.items()])
@pytest.mark.parametrize("reader", ["info", "validate", "export", "merge", "predict", "check"])
def test_headers(
    reader: str, edit: Any, call: Any, recorded: Path, out: Path, tmp_path: Path
) -> None:
    path = changed(recorded, tmp_path / "a.parquet", edit)
    assert_refused(call(*words_of(reader, path, out)), path)


def test_a_world_beyond_all_numbers(call: Any, recorded: Path, tmp_path: Path) -> None:
    path = changed(recorded, tmp_path / "a.parquet", lambda _, h: h.update(world_size=10**30))
    assert_refused(call("prismcalib", "check", path), path)


def damaged(path: Path, target: Path) -> Path:
    """The header is whole, the rows are not."""
    content = bytearray(path.read_bytes())
    content[100:400] = b"\xaa" * 300
    target.write_bytes(content)
    return target


@pytest.mark.parametrize("reader", ["info", "validate", "export", "merge", "check"])
def test_damaged_rows(reader: str, call: Any, recorded: Path, out: Path, tmp_path: Path) -> None:
    path = damaged(recorded, tmp_path / "a.parquet")
    assert_refused(call(*words_of(reader, path, out)), path)


@pytest.mark.parametrize("reader", ["info", "export", "merge", "check"])
def test_an_unknown_kind(reader: str, call: Any, recorded: Path, out: Path, tmp_path: Path) -> None:
    path = changed(
        recorded, tmp_path / "a.parquet", lambda r, _: r.with_columns(kind=pl.lit("banana"))
    )
    assert_refused(call(*words_of(reader, path, out)), path)


ROWS = {
    "none": lambda r, _: r.head(0),
    "twice": lambda r, _: pl.concat([r, r]),
    "with holes": lambda r, _: r.gather_every(2),
    "of one rank": lambda r, _: r.filter(pl.col("rank") == 0),
    "without time": lambda r, _: r.with_columns(start_ns=pl.lit(None, dtype=pl.Int64)),
    "backwards": lambda r, _: r.with_columns(dur_ns=-pl.col("dur_ns")),
    "that last for ever": lambda r, _: r.with_columns(dur_ns=pl.lit(2**63 - 1)),
    "that wait for themselves": lambda r, _: r.with_columns(xdeps=pl.concat_list("id")),
    "that wait for nobody": lambda r, _: r.with_columns(xdeps=pl.lit([-5], pl.List(pl.Int64))),
    "of an unknown group": lambda r, _: r.with_columns(
        group=pl.when(pl.col("group") >= 0).then(99)
    ),
    "of one seq": lambda r, _: r.with_columns(seq=pl.when(pl.col("group") >= 0).then(3)),
}


@pytest.mark.parametrize(
    "edit",
    ROWS.values(),
    ids=ROWS,
)
def test_rows_that_cannot_be_merged(
    edit: Any, call: Any, recorded: Path, out: Path, tmp_path: Path
) -> None:
    path = changed(recorded, tmp_path / "a.parquet", edit)
    done = call("prismcalib", "merge", path, "-o", out)
    assert_refused(done, path if "no rows" in done.err else "")
    assert "]" in done.err.splitlines()[0]


def test_shuffled_rows_are_sorted(call: Any, recorded: Path, tmp_path: Path) -> None:
    path = changed(
        recorded,
        tmp_path / "a.parquet",
        lambda rows, _: rows.sample(fraction=1, shuffle=True, seed=1),
    )
    for source, target in ((recorded, "sorted.parquet"), (path, "shuffled.parquet")):
        assert call("prismcalib", "merge", source, "-o", tmp_path / target).code == 0
    sorted_, shuffled = (pl.read_parquet(tmp_path / f"{n}.parquet") for n in ("sorted", "shuffled"))
    assert sorted_.equals(shuffled)
    assert "unsorted" in call("prismtrace", "validate", path).out


@pytest.mark.parametrize("kind", ["bare", "slice", "recorded"])
@pytest.mark.parametrize("reader", ["critical-path", "predict"])
def test_no_timeline_yet(
    reader: str, kind: str, call: Any, recorded: Path, out: Path, tmp_path: Path
) -> None:
    path = changed(recorded, tmp_path / "a.parquet", lambda _, h: h.update(kind=kind))
    assert_refused(call(*words_of(reader, path, out)), path)


@pytest.mark.parametrize("reader", ["critical-path", "predict"])
@pytest.mark.parametrize(
    "edit",
    [{"dur_ns": pl.lit(None, dtype=pl.Int64)}, {"x_busy_ns": pl.lit("a")}],
    ids=["no time", "text in our own column"],
)
def test_a_broken_timeline(
    reader: str, edit: Any, call: Any, recorded: Path, out: Path, tmp_path: Path
) -> None:
    aligned = tmp_path / "aligned.parquet"
    call("prismcalib", "merge", recorded, "-o", aligned)
    path = changed(aligned, tmp_path / "a.parquet", lambda rows, _: rows.with_columns(**edit))
    assert_refused(call(*words_of(reader, path, out)), path)


def test_no_control_characters_are_printed(call: Any, recorded: Path, tmp_path: Path) -> None:
    path = changed(
        recorded, tmp_path / "a.parquet", lambda _, h: h.update(created_by="\x1b[2J\r\nranks: 9")
    )
    done = call("prismtrace", "info", path)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\nranks: 9" not in done.out
