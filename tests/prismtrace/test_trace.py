from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import prismtrace as pt
from prismtrace.errors import (
    FormatVersionError,
    InputFileError,
    OutputError,
    SourceFormatError,
    ValidationError,
)
from prismtrace.output import atomic_output
from prismtrace.schema import ProcessGroup
from prismtrace.trace import METADATA_KEY, Trace, node_schema, open_trace, write, write_nodes
from prismtrace.validation import validate


def write_raw(path, frame, header):
    """A file as a foreign writer might make it: nothing is checked."""
    frame.write_parquet(path, metadata={METADATA_KEY: json.dumps(header)})


def raw_header(trace, **changes):
    return {**json.loads(trace.header.model_dump_json()), **changes}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- reading --------------------------------------------------------------------------


def test_a_trace_comes_back_as_it_was_written(job, tmp_path):
    write(job, tmp_path / "run.parquet")
    back = pt.open(tmp_path / "run.parquet")
    assert back.header == job.header
    assert back.paths == (tmp_path / "run.parquet",)
    assert_frame_equal(back.collect(), job.collect())
    assert back.collect().schema == node_schema()


@pytest.mark.parametrize("how", ["file", "text", "folder", "glob", "list"])
def test_ways_to_open(how, job, tmp_path):
    for rank in (0, 1):
        write(job.ranks([rank]), tmp_path / f"part-{rank}.parquet")
    source = {
        "file": tmp_path / "part-0.parquet",
        "text": str(tmp_path / "part-0.parquet"),
        "folder": tmp_path,
        "glob": str(tmp_path / "part-*.parquet"),
        "list": [tmp_path / "part-0.parquet", str(tmp_path / "part-1.parquet")],
    }[how]
    trace = Trace.open(source)
    if how in {"file", "text"}:
        assert trace.collect()["rank"].unique().to_list() == [0]
    else:
        assert_frame_equal(trace.collect(), job.collect())
        assert validate(trace) == []


def test_brackets_in_a_file_name_are_no_pattern(job, tmp_path):
    path = tmp_path / "run[1].parquet"
    write(job, path)
    assert open_trace(path).collect().height == 7


def test_opening_reads_no_rows(job, tmp_path, monkeypatch):
    write(job, tmp_path / "run.parquet")
    monkeypatch.setattr(pl.LazyFrame, "collect", lambda *_, **__: pytest.fail("rows were read"))
    assert open_trace(tmp_path / "run.parquet").header.world_size == 2


def test_ranks_selects_rows_and_keeps_the_header(job):
    part = job.ranks([1, 1])
    assert part.collect()["rank"].to_list() == [1, 1, 1]
    assert part.header == job.header


def test_nullable_columns_may_be_absent(make_trace, tmp_path):
    trace = make_trace({}, {})
    required = ["id", "rank", "index", "kind", "stream", "real", "deps"]
    write_raw(tmp_path / "a.parquet", trace.collect().select(required), raw_header(trace))
    assert_frame_equal(open_trace(tmp_path / "a.parquet").collect(), trace.collect())


def test_files_with_different_extra_columns(make_trace, tmp_path):
    one, two = make_trace({}, {"rank": 1}), make_trace({"rank": 0}, {"rank": 1})
    write(one.ranks([0]), tmp_path / "0.parquet")
    extra = two.nodes.filter(pl.col("rank") == 1).with_columns(x_note=pl.lit("n"))
    write_nodes(two.header, extra, tmp_path / "1.parquet")
    assert open_trace(tmp_path).collect()["x_note"].to_list() == [None, "n"]


def test_texts_and_other_integer_widths_are_understood(make_trace, tmp_path):
    trace = make_trace({"name": "gemm", "phase": "forward"})
    loose = trace.collect().cast({"rank": pl.Int64, "stream": pl.UInt8, "deps": pl.List(pl.Int64)})
    loose = loose.cast({"kind": pl.String, "phase": pl.Categorical, "name": pl.String})
    write_raw(tmp_path / "a.parquet", loose, raw_header(trace))
    assert_frame_equal(open_trace(tmp_path / "a.parquet").collect(), trace.collect())


def test_values_that_do_not_fit_are_counted_by_validation(make_trace, tmp_path):
    trace = make_trace({"step": 1}, {"step": 2})
    step = pl.Series("step", [2**31, -1], dtype=pl.Int64)
    kind = pl.Series("kind", ["computation", "compute"])
    write_raw(tmp_path / "a.parquet", trace.collect().with_columns(step, kind), raw_header(trace))
    found = {v.rule: v.count for v in validate(open_trace(tmp_path / "a.parquet", exact=False))}
    assert found == {"step-out-of-range": 2, "kind-unknown": 1}


def test_later_minor_versions_are_read(make_trace, tmp_path):
    trace = make_trace({})
    header = raw_header(trace, format_version="1.7.2", invented_later=[1])
    write_raw(tmp_path / "a.parquet", trace.collect(), header)
    assert open_trace(tmp_path / "a.parquet").header.format_version == "1.7.2"


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.0.0", "0.9", "", None])
def test_other_major_versions_are_refused(version, make_trace, tmp_path):
    trace = make_trace({})
    header = raw_header(trace, format_version=version)
    write_raw(tmp_path / "a.parquet", trace.collect(), header)
    with pytest.raises(FormatVersionError, match=r"this version reads 1\.x") as caught:
        open_trace(tmp_path / "a.parquet")
    assert caught.value.where == str(tmp_path / "a.parquet")


@pytest.mark.parametrize("column", ["id", "rank", "index", "kind", "stream", "real", "deps"])
def test_a_missing_column_is_named(column, make_trace, tmp_path):
    trace = make_trace({})
    write_raw(tmp_path / "a.parquet", trace.collect().drop(column), raw_header(trace))
    with pytest.raises(ValidationError, match=f"column '{column}' is missing"):
        open_trace(tmp_path / "a.parquet")


def test_a_column_of_the_wrong_type_is_named(make_trace, tmp_path):
    trace = make_trace({})
    frame = trace.collect().cast({"start_ns": pl.Float64})
    write_raw(tmp_path / "a.parquet", frame, raw_header(trace))
    with pytest.raises(ValidationError, match="'start_ns' has type Float64, expected Int64"):
        open_trace(tmp_path / "a.parquet")


def test_unknown_columns_are_refused(make_trace, tmp_path):
    trace = make_trace({})
    frame = trace.collect().with_columns(start=pl.lit(1))
    write_raw(tmp_path / "a.parquet", frame, raw_header(trace))
    with pytest.raises(ValidationError, match="unknown column 'start'") as caught:
        open_trace(tmp_path / "a.parquet")
    assert caught.value.hint == "own columns start with x_"


def test_foreign_parquet_files_are_refused(tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(SourceFormatError, match="without PrismTrace header"):
        open_trace(tmp_path / "a.parquet")


@pytest.mark.parametrize("header", ["{", "[1]", '"text"', "7", "null"])
def test_a_header_that_is_no_object(header, make_trace, tmp_path):
    make_trace({}).collect().write_parquet(tmp_path / "a.parquet", metadata={METADATA_KEY: header})
    with pytest.raises(ValidationError, match="header is broken"):
        open_trace(tmp_path / "a.parquet")


def test_the_broken_part_of_a_header_is_named(make_trace, tmp_path):
    trace = make_trace({})
    groups = [{"id": 0, "name": "a", "ranks": "0-z"}]
    write_raw(tmp_path / "a.parquet", trace.collect(), raw_header(trace, groups=groups))
    with pytest.raises(ValidationError, match=r"at \$\.groups\.0\.ranks"):
        open_trace(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"", b"{}", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_files_that_are_no_parquet(content, tmp_path):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputFileError, match="not a readable Parquet file") as caught:
        open_trace(tmp_path / "a.parquet")
    assert "a.parquet" in str(caught.value)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.99])
def test_truncated_files(kept, job, tmp_path):
    path = tmp_path / "run.parquet"
    write(job, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InputFileError, match="truncated"):
        open_trace(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.parquet", "no such file"),
        ("absent-*.parquet", "no file matches"),
        ("empty", r"holds no \.parquet file"),
        ([], "no trace file was given"),
    ],
)
def test_nothing_there(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputFileError, match=message) as caught:
        open_trace(source)
    assert caught.value.hint


def test_files_with_different_headers_are_no_trace(make_trace, tmp_path):
    write(make_trace({}), tmp_path / "a.parquet")
    write(make_trace({}, kind="recorded"), tmp_path / "b.parquet")
    with pytest.raises(
        ValidationError, match=r"different headers: kind \(slice and recorded\)"
    ) as c:
        open_trace(tmp_path)
    assert c.value.where == f"{tmp_path / 'a.parquet'} and {tmp_path / 'b.parquet'}"


def test_what_differs_between_headers_is_named_but_not_copied(make_trace, tmp_path):
    for name, sources in (("a", ()), ("b", ("rank0.json.gz", "rank1.json.gz", "rank2.json.gz"))):
        (tmp_path / name).mkdir()
        trace = make_trace({})
        header = trace.header.model_copy(
            update={"sources": sources, "world_size": 2 + len(sources)}
        )
        write(Trace(header=header, nodes=trace.nodes), tmp_path / name / "run.parquet")
    files = [tmp_path / name / "run.parquet" for name in "ab"]
    with pytest.raises(ValidationError, match=r": world_size \(2 and 5\), sources \[") as caught:
        open_trace(files)
    assert caught.value.where == f"{files[0]} and {files[1]}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(job, tmp_path):
    path = tmp_path / "run.parquet"
    write(job, path)
    path.chmod(0)
    with pytest.raises(InputFileError):
        open_trace(path)


# --- tables ---------------------------------------------------------------------------


def test_groups_one_after_the_other(job):
    assert [group.name for group in job.groups] == ["world"]
    assert len(job.groups) == 1


def test_a_trace_is_shown_in_a_line(job, tmp_path):
    assert repr(job) == "<calibrated Trace, ranks 0-1 of 2, 1 process groups>"
    pt.write(job, tmp_path / "a.parquet")
    assert repr(pt.open(tmp_path / "a.parquet")).endswith(
        "1 process groups, " + str(tmp_path / "a.parquet>")
    )


def test_groups_are_shown_in_a_line(job):
    assert repr(job.groups) == "<1 process groups: 0: 'world'; as a table: .df>"
    many = [ProcessGroup(id=n, name=f"g{n}", ranks=(0, 1)) for n in range(9)]
    told = repr(replace(job, header=job.header.model_copy(update={"groups": tuple(many)})).groups)
    assert told.endswith("5: 'g5', ... 3 more; as a table: .df>")


def test_groups_as_a_table(job):
    assert job.groups.df.to_dicts() == [
        {"id": 0, "name": "world", "desc": "", "label": "world", "size": 2, "ranks": [0, 1]}
    ]


def test_edges_show_both_kinds(job):
    one = 1 << 32
    assert job.edges().rows() == [
        (0, 1, "directional", 0),
        (1, 2, "directional", 0),
        (0, 2, "directional", 7),
        (2, 3, "directional", 0),
        (1, 3, "directional", 0),
        (one, one | 1, "directional", 0),
        (one | 1, one | 2, "directional", 0),
        (1, one | 1, "sync", 0),
        (3, one | 2, "sync", 0),
    ]


def test_edges_from_other_ranks_take_the_last_lags(make_trace):
    trace = make_trace(
        {}, {}, {"rank": 1}, {"rank": 1, "deps": [1], "xdeps": [1, 0], "lag_ns": [5, 6, 7]}
    )
    target = (1 << 32) + 1
    assert [(src, lag) for src, dst, _, lag in trace.edges().rows() if dst == target] == [
        (1 << 32, 5),
        (1, 6),
        (0, 7),
    ]


# --- writing --------------------------------------------------------------------------


def test_calibrated_columns_are_stored_only_in_calibrated_traces(job, make_trace, tmp_path):
    write(make_trace({}), tmp_path / "plain.parquet")
    write(job, tmp_path / "aligned.parquet")
    stored = {p.stem: set(pl.read_parquet_schema(p)) for p in tmp_path.iterdir()}
    assert stored["aligned"] - stored["plain"] == {"wait_ns", "slack_ns", "critical"}


def test_a_trace_can_replace_the_file_it_is_read_from(job, tmp_path):
    path = tmp_path / "run.parquet"
    write(job, path)
    write(open_trace(path).ranks([1]), path)
    assert open_trace(path).collect().height == 3


def test_written_files_have_plain_permissions(job, tmp_path):
    write(job, tmp_path / "run.parquet")
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(job, tmp_path):
    path = tmp_path / "run.parquet"
    write(job, path)
    before = path.read_bytes()
    broken = job.nodes.with_columns(rank=pl.lit("seven").cast(pl.Int32))
    with pytest.raises(pl.exceptions.PolarsError):
        write_nodes(job.header, broken, path)
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["run.parquet"]


def test_an_interrupt_keeps_the_old_file(tmp_path):
    path = tmp_path / "result"
    path.write_text("old")

    def interrupted() -> None:
        with atomic_output(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["result"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing/run.parquet", "No such file"),
        ("file/run.parquet", "Not a directory"),
        ("folder", "is a folder"),
    ],
)
def test_paths_that_cannot_be_written(target, message, job, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=message) as caught:
        write(job, tmp_path / target)
    assert caught.value.where == str(tmp_path / target)
    assert caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(job, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        write(job, tmp_path / "run.parquet")


def test_a_read_only_folder_as_the_system_reports_it(job, tmp_path, monkeypatch):
    """The same for root, whom no permission stops."""

    def refused(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("prismtrace.output.tempfile.mkstemp", refused)
    with pytest.raises(OutputError, match="Read-only file system") as caught:
        write(job, tmp_path / "run.parquet")
    assert caught.value.hint == "choose a folder that you may write to"


FULL_DISK = """
    import resource, signal, sys
    import prismtrace as pt
    from prismtrace.exporting import export

    trace = pt.open(sys.argv[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        export(trace, sys.argv[2], to="node-link")
    except pt.TraceError as error:
        print(type(error).__name__, error.code)
"""


def test_a_file_that_may_not_grow(make_trace, tmp_path):
    """A size limit stands in for a full disk; the limit needs a process of its own."""
    rows = [{"name": f"{i * 2**40 // 7:x}", "mem_bytes": i**4} for i in range(3000)]
    source, target = tmp_path / "source.parquet", tmp_path / "target.parquet"
    write(make_trace(*rows), source)
    target.write_text("old")
    script = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(source), str(target)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.stdout == "OutputError output\n", done.stderr
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["source.parquet", "target.parquet"]


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB; only root may mount one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(make_trace, tiny_disk):
    rows = [{"name": f"{i * 2**40 // 7:x}", "mem_bytes": i**4} for i in range(20000)]
    with pytest.raises(OutputError, match="No space left") as caught:
        write(make_trace(*rows), tiny_disk / "run.parquet")
    assert "nothing was left behind" in caught.value.hint
    assert names_in(tiny_disk) == []
