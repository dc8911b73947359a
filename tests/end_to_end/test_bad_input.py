"""Whatever comes in, a command ends well: a result, or one message that says what to do.

A refusal has exit code 1 (bad input) or 2 (wrong usage), nothing on stdout, one message with
place and hint on stderr, no traceback; the previous output stays, nothing else is left behind.
What does not hold yet is marked as an expected failure with the reason.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from prismtrace.converters import convert
from prismtrace.trace import METADATA_KEY, open_trace
from prismtrace.validation import validate
from tests.prismtrace.kineto_events import ALL_REDUCE, document, kernel, launched, metadata
from tests.prismtrace.kineto_jobs import Job


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def failing(*values: Any, why: str, id: str | None = None) -> Any:
    return pytest.param(*values, marks=pytest.mark.xfail(strict=True, reason=why), id=id)


@pytest.fixture
def call(capsys: Any, monkeypatch: Any) -> Callable[..., Done]:
    """A command as a person calls it, without the cost of a process."""

    def run(command: str, *words: object) -> Done:
        monkeypatch.setattr(sys, "argv", [command, *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            import_module(f"{command}.cli").main()
        return Done(left.value.code or 0, *capsys.readouterr())

    return run


def assert_refused(done: Done, place: object, *, code: int = 1) -> None:
    """One message with its place and a hint, and nothing else."""
    assert done.code == code, done
    assert done.out == ""
    if code == 2:
        assert str(place) in done.err
        return
    # A warning about the name of the output may come first.
    message, *hint = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert message.startswith("error: ")
    assert "'NoneType' object" not in message
    assert str(place) in message.rpartition(" [")[2]
    assert len(hint) == 1
    assert hint[0].startswith("  hint: ")


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """An output of an earlier run, which a failure leaves as it was, alone in its folder."""
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "result.parquet"
    path.write_bytes(b"previous")
    yield path
    assert path.read_bytes() == b"previous"
    assert [p.name for p in path.parent.iterdir()] == ["result.parquet"]


# --- inputs to all tests ------------------------------------------------------------------


def profile(rank: int, shift_us: float = 0, *, world_size: int = 2, **changed: Any) -> Any:
    """Five computations and all-reduces of one rank; `changed` arguments of the latter."""
    return document(
        *(
            launched("gemm", at, at + 3, 5, 100 + i)
            + launched(ALL_REDUCE, at + 4, at + 9, 4, 200 + i, 20, **metadata(), **changed)
            for i, at in enumerate(shift_us + 10.0 * i for i in range(5))
        ),
        rank=rank,
        world_size=world_size,
        groups={"0": [0, 1]},
    )


def write_profiles(folder: Path, *documents: Any) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number}.json" for number in range(len(documents))]
    for path, content in zip(paths, documents, strict=True):
        path.write_text(json.dumps(content))
    return paths


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_profiles(tmp_path_factory.mktemp("in") / "job", profile(0), profile(1))


@pytest.fixture(scope="module")
def recorded(profiles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.parquet"
    convert(profiles, path)
    return path


def changed(path: Path, target: Path, edit: Callable[[pl.DataFrame, dict[str, Any]], Any]) -> Path:
    """A copy of a trace after `edit(rows, header)`, which returns rows, header text, or None."""
    header = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    rows = pl.read_parquet(path)
    result = edit(rows, header)
    rows = result if isinstance(result, pl.DataFrame) else rows
    text = result if isinstance(result, str) else json.dumps(header)
    rows.write_parquet(target, metadata={METADATA_KEY: text})
    return target


READERS = {
    "info": ("prismtrace", "info"),
    "validate": ("prismtrace", "validate"),
    "export": ("prismtrace", "export", "-o"),
    "merge": ("prismcalib", "merge", "-o"),
    "critical-path": ("prismcalib", "critical-path"),
    "predict": ("prismcalib", "predict"),
    "check": ("prismcalib", "check"),
}


def words_of(reader: str, trace: Path, out: Path) -> list[object]:
    command, name, *output = READERS[reader]
    return [command, name, trace, *output, *([out] if output else [])]


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
        assert_refused(done, files[1] if str(files[1]) in done.err else "group '0'")
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


# --- options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--rank", "²"],
        ["--rank", "="],
        ["--comm-kernel", "=all_reduce"],
        ["--comm-kernel", "[=all_reduce"],
        ["--jobs", "1.5"],
        ["--step-from", "("],
        ["--step-from", ""],
        ["--grain", "kernel", "--keep-arg", "\n"],
        ["--grain", "kernel", *["--keep-arg", "a"] * 2],
    ],
    ids=" ".join,
)
def test_usage_of_convert(words: list[str], call: Any, profiles: list[Path], out: Path) -> None:
    done = call("prismtrace", "convert", *profiles, "-o", out, *words)
    assert_refused(done, words[-2], code=2)


@pytest.mark.parametrize(
    "words",
    [
        ["prismcalib", "merge", "--max-residual", "-1ms"],
        ["prismcalib", "merge", "--max-residual", "1e3us"],
        ["prismcalib", "merge", "--max-residual", "nan s"],
        ["prismcalib", "merge", "--eager-below", "-1"],
        ["prismtrace", "export", "--ranks", "0-1/0"],
        ["prismtrace", "export", "--ranks", "0,"],
        ["prismcalib", "merge", "--max-residual", "9" * 400 + "s"],
        ["prismcalib", "merge", "--max-residual", "99999999999s"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_usage(words: list[str], call: Any, recorded: Path, out: Path) -> None:
    command, name, *options = words
    done = call(command, name, recorded, "-o", out, *options)
    assert_refused(done, "Invalid value", code=2)


@pytest.mark.parametrize("reader", [failing("validate", why="OverflowError"), "critical-path"])
def test_a_limit_beyond_int64(reader: str, call: Any, recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    if reader == "validate":
        changed(recorded, path, lambda rows, _: rows.with_columns(bytes=pl.lit(-1)))
    else:
        call("prismcalib", "merge", recorded, "-o", path)
    assert call(*READERS[reader], path, "--limit", 10**20).code in {0, 1, 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"a": "0-"}',
        '{"a": [-1]}',
        '{"a": [1e30]}',
        '{"a": [99999999999]}',
        '{"a": "0-2147483647/2147483647"}',
        '{"a": "0-1"',
        '{"a": [0, 0]}',
        "[]",
        '{"a": null}',
        '{"a": true}',
        '{"a": [0, 0.5]}',
        '{"a": [true, false]}',
        '{"a": [0, 1], "a": [0]}',
        '{"a": "0-99999999999"}',
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_groups_files(
    text: str, call: Any, profiles: list[Path], out: Path, tmp_path: Path
) -> None:
    path = tmp_path / "groups.json"
    path.write_text(text)
    done = call("prismtrace", "convert", *profiles, "-o", out, "--groups", path)
    assert done.code == 1
    assert " object " not in done.err
    assert_refused(done, path if str(path) in done.err else "rank")


# --- paths --------------------------------------------------------------------------------


def test_odd_names(call: Any, profiles: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["-a.json", "b c\n☃ [1].json"]
    for name, path in zip(names, profiles, strict=True):
        Path(name).write_bytes(path.read_bytes())
    output = "-é \n[bold]*.parquet"
    assert call("prismtrace", "convert", f"-o{output}", "--", *names).code == 0
    for reader in ("info", "validate"):
        assert call("prismtrace", reader, "--", output).code == 0
    assert call("prismcalib", "merge", f"-o{output}", "--", output).code == 0
    assert call("prismcalib", "critical-path", "--", output).code == 0
    assert sorted(path.name for path in Path().iterdir()) == sorted([*names, output])


@pytest.mark.parametrize("where", ["input", "output", "trace"])
def test_names_that_are_not_unicode(
    where: str, call: Any, profiles: list[Path], recorded: Path, tmp_path: Path
) -> None:
    odd, run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")), tmp_path / "run.parquet"
    odd.write_bytes((recorded if where == "trace" else profiles[0]).read_bytes())
    words = {
        "input": ["convert", odd, profiles[1], "-o", run],
        "output": ["convert", *profiles, "-o", odd.with_name(odd.name + "x")],
        "trace": ["info", odd],
    }
    done = call("prismtrace", *words[where])
    if where == "input":
        assert done.code == 0
    else:
        assert_refused(done, "udcff.json")


@pytest.mark.parametrize("name", ["loop", "loop/x", "missing", "*.none", "x" * 5_000, "fifo"])
def test_inputs_that_are_no_files(name: str, call: Any, out: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    assert_refused(call("prismtrace", "convert", tmp_path / name, "-o", out), name)


@pytest.mark.parametrize("reader", ["info", "merge", "critical-path", "check"])
@pytest.mark.parametrize(
    "name",
    [
        "loop",
        "/dev/null",
        "missing",
        "*.none",
        pytest.param("x" * 5_000, id="long"),
    ],
)
def test_traces_that_are_no_files(
    name: str, reader: str, call: Any, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = call(*words_of(reader, tmp_path / name, out))
    assert_refused(done, name)


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    words = [sys.executable, "-m", "prismtrace.cli", "info", str(tmp_path / "fifo")]
    done = subprocess.run(words, env=environment(), capture_output=True, check=False, timeout=3)
    assert done.returncode == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("reader", ["info", "merge", "check"])
def test_a_trace_that_may_not_be_read(
    reader: str, call: Any, recorded: Path, out: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(recorded.read_bytes())
    path.chmod(0)
    done = call(*words_of(reader, path, out))
    assert_refused(done, path)
    assert "Permission denied" in done.err


WRITERS = {
    "convert": lambda profiles, _: ["prismtrace", "convert", *profiles],
    "merge": lambda _, trace: ["prismcalib", "merge", trace],
    "export": lambda _, trace: ["prismtrace", "export", trace],
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "name",
    [
        "",
        "missing/x.parquet",
        "out/result.parquet/x.parquet",
        "/",
        pytest.param("x" * 300 + ".parquet", id="long"),
    ],
)
def test_outputs_that_cannot_be_written(
    name: str, writer: str, call: Any, profiles: Any, recorded: Path, tmp_path: Path
) -> None:
    target = tmp_path / name
    done = call(*WRITERS[writer](profiles, recorded), "-o", target)
    assert_refused(done, target)


@pytest.mark.parametrize("writer", WRITERS)
def test_special_files_stay(
    writer: str, call: Any, profiles: Any, recorded: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = call(*WRITERS[writer](profiles, recorded), "-o", tmp_path / "fifo")
    assert (tmp_path / "fifo").is_fifo()
    assert_refused(done, tmp_path / "fifo")


def test_an_export_does_not_replace_its_trace(call: Any, recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(recorded.read_bytes())
    assert_refused(call("prismtrace", "export", path, "-o", path), path)


def test_a_conversion_does_not_replace_its_groups(
    call: Any, profiles: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "groups.json"
    path.write_text('{"a": [0, 1]}')
    assert_refused(call("prismtrace", "convert", *profiles, "-o", path, "--groups", path), path)


def test_a_conversion_does_not_replace_an_input(
    call: Any, profiles: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(profiles[0].read_bytes())
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "same").hardlink_to(path)
    for name in ("a.json", "link", "same"):
        target = tmp_path / name
        assert_refused(call("prismtrace", "convert", path, "-o", target), target)
    assert path.read_bytes() == profiles[0].read_bytes()


# --- the machine --------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    module, *rest = map(str, words)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {**streams, "env": environment(), "text": True, **options}
    return subprocess.Popen([sys.executable, "-m", f"{module}.cli", *rest], **options)


def members_of_session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
)
def test_a_stopped_conversion_leaves_nothing(
    number: signal.Signals, jobs: int, out: Path, tmp_path: Path
) -> None:
    (file, *_) = Job(tp=1, dp=1, steps=20, layers=12).write(tmp_path / "in")
    for rank in range(1, 12):
        (tmp_path / "in" / f"rank{rank}.json").write_bytes(file.read_bytes())
    words = ["convert", tmp_path / "in", "-o", out, "--jobs", jobs]
    process = start("prismtrace", *words, start_new_session=True)
    while process.poll() is None and not list(out.parent.glob("*.parts/*")):
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    left = members_of_session(process.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    folders = list(out.parent.glob(".*"))
    for folder in folders:
        # The fixture `out` looks at the folder once more.
        subprocess.run(["rm", "-r", str(folder)], check=True)
    assert process.returncode in {128 + number, -number}
    assert (stdout, stderr.strip()) == ("", "")
    assert (left, folders) == ([], [])


def test_two_runs_into_one_output(profiles: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "run.parquet"
    runs = [start("prismtrace", "convert", *profiles, "-o", output) for _ in range(2)]
    for process in runs:
        _, stderr = process.communicate()
        assert (process.returncode, stderr) == (0, "")
    assert validate(open_trace(output)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.parquet"]


@pytest.mark.parametrize(
    ("stream", "command"),
    [(1, "info"), (2, "merge")],
    ids=["no stdout", "no stderr"],
)
def test_closed_streams(stream: int, command: str, recorded: Path, tmp_path: Path) -> None:
    words = words_of(command, recorded, tmp_path / "a.parquet")
    process = start(*words, preexec_fn=lambda: os.close(stream))
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_stdout(recorded: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start("prismtrace", "info", recorded, stdout=full)
        _, stderr = process.communicate()
    assert_refused(Done(process.returncode, "", stderr), "stdout")


BREAK_CACHE = """
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from prismcalib import array_engine
for value in vars(array_engine).values():
    if isinstance(value, Dispatcher):
        index = Path(value._cache._cache_file._index_path)
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_bytes(b"rubbish")
"""


def test_a_broken_cache_of_compiled_code(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    env = environment(NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    subprocess.run([sys.executable, "-c", BREAK_CACHE], env=env, check=True)
    words = ["merge", recorded, "-o", tmp_path / "a.parquet", "--engine", "array"]
    process = start("prismcalib", *words, env=env)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
