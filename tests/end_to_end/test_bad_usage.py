"""Odd options and paths, full disks, closed streams, signals: a command ends well, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from prismtrace.trace import open_trace
from prismtrace.validation import validate
from tests.end_to_end.commands import (
    READERS,
    Done,
    assert_refused,
    changed,
    environment,
    start,
    words_of,
)
from tests.prismtrace.kineto_jobs import Job

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


@pytest.mark.parametrize("reader", ["validate", "critical-path"])
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
    merged = f"-m{output}"
    assert call("prismcalib", "merge", f"-o{merged}", "--", output).code == 0
    # A timeline may take its own place, a recording may not be lost.
    assert call("prismcalib", "merge", f"-o{merged}", "--", merged).code == 0
    assert call("prismcalib", "merge", f"-o{output}", "--", output).code == 1
    assert call("prismcalib", "critical-path", "--", merged).code == 0
    assert sorted(path.name for path in Path().iterdir()) == sorted([*names, output, merged])


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


STOPPED = (
    "stopped: nothing is written, and nothing is kept of what was read; with --resume it is, and "
    "the same command goes on from there"
)


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
    assert (stdout, stderr.strip()) == ("", STOPPED)
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
