"""Conversions that go on after an interruption, and those that a cluster reads for."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prismtrace import __version__, cli
from prismtrace.converters import convert, first_pass, kept
from prismtrace.converters.files import convert_file
from prismtrace.converters.kept import count_kept, load_part, make_part, part_key
from prismtrace.converters.rank_trace import RankOptions
from prismtrace.errors import InputFileError, OutputError, RankError, SourceFormatError
from tests.prismtrace.kineto_jobs import Job


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return Job(tp=2, dp=2, torch="2.5").write(tmp_path / "in")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "run.parquet"


@pytest.fixture
def expected(files: list[Path], tmp_path: Path) -> bytes:
    convert(files, tmp_path / "plain.parquet")
    return (tmp_path / "plain.parquet").read_bytes()


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read from here on."""
    names: list[str] = []

    def reading(path: Path, *arguments: Any) -> Any:
        names.append(path.name)
        return convert_file(path, *arguments)

    convert_file = kept.convert_file
    monkeypatch.setattr(kept, "convert_file", reading)
    return names


@pytest.mark.parametrize("options", [{"jobs": 2}, {"resume": True}, {"jobs": 2, "resume": True}])
def test_the_same_bytes_however_it_is_read(
    options: dict[str, Any], files: list[Path], out: Path, expected: bytes
) -> None:
    convert(files, out, **options)
    assert out.read_bytes() == expected
    assert list(out.parent.iterdir()) == [out]


def test_two_at_once_do_not_take_each_other_s_parts(
    files: list[Path], out: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tried = kept.convert_file, []

    def reading(*arguments: Any) -> Any:
        if not tried:
            tried.append(True)
            with pytest.raises(OutputError, match="another run is writing"):
                convert(files, out, resume=True)
            convert(files, out)  # has parts of its own, and leaves others' alone
        return first(*arguments)

    monkeypatch.setattr(kept, "convert_file", reading)
    convert(files, out, resume=True)
    assert out.read_bytes() == expected
    assert list(out.parent.iterdir()) == [out]


def test_an_interrupted_conversion_goes_on(
    files: list[Path], out: Path, expected: bytes, read_files: list[str]
) -> None:
    whole = files[2].read_text()
    files[2].write_text(whole[: len(whole) // 2])
    with pytest.raises(InputFileError, match="damaged"):
        convert(files, out, resume=True)
    assert (read_files, count_kept(out)) == (["rank0.json", "rank1.json", "rank2.json"], 2)
    files[2].write_text(whole)
    read_files.clear()
    convert(files, out, resume=True)
    assert read_files == ["rank2.json", "rank3.json"]
    assert out.read_bytes() == expected
    assert list(out.parent.iterdir()) == [out]


def test_other_files_and_options_are_read_again(
    files: list[Path], out: Path, read_files: list[str]
) -> None:
    options = RankOptions()
    key = part_key(files[0], options, None)
    assert part_key(files[0], options, 3) != key
    assert part_key(files[0], RankOptions(grain="kernel"), None) != key
    os.utime(files[0], ns=(0, 0))
    assert part_key(files[0], options, None) != key
    with pytest.raises(RankError):
        convert(files, out, ranks={"rank1.json": 0}, resume=True)
    read_files.clear()
    convert(files, out, grain="kernel", resume=True)
    assert len(read_files) == len(files)


def test_without_resume_nothing_of_before_is_used(
    files: list[Path], out: Path, expected: bytes
) -> None:
    with pytest.raises(RankError):
        convert(files, out, ranks={"rank3.json": 0}, resume=True)
    assert count_kept(out) == 4
    convert(files, out)
    assert out.read_bytes() == expected
    assert count_kept(out) == 0
    with pytest.raises(RankError):
        convert(files, out, ranks={"rank3.json": 0})
    assert list(out.parent.iterdir()) == [out]


def test_a_killed_command_goes_on(files: list[Path], out: Path, expected: bytes) -> None:
    script = (
        "import sys, time\n"
        "from prismtrace.converters import convert, kept\n"
        "read = kept.convert_file\n"
        "def slowly(*words):\n"
        "    found = read(*words)\n"
        "    print('read', flush=True)\n"
        "    time.sleep(0.1)\n"
        "    return found\n"
        "kept.convert_file = slowly\n"
        "convert(sys.argv[2:], sys.argv[1], resume=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(out), *map(str, files)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    assert count_kept(out) >= 1
    convert(files, out, resume=True)
    assert out.read_bytes() == expected
    assert list(out.parent.glob("*kept*")) == []


def test_the_command_says_what_is_kept(files: list[Path], out: Path) -> None:
    whole = files[3].read_text()
    files[3].write_text(whole[:200])
    words = ["convert", *map(str, files), "-o", str(out), "--resume"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code != 0
    assert "3 of 4 files are read and kept: the same command with --resume" in done.stderr
    files[3].write_text(whole)
    assert CliRunner().invoke(cli.app, words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing is kept of what was read; with --resume it is"),
        (["--resume"], "2 of 4 files are read and kept: the same command with --resume"),
    ],
    ids=["without", "with"],
)
def test_who_stops_the_command_hears_what_is_kept(
    files: list[Path], out: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    def stopped(path: Path, *more: Any) -> Any:
        if path == files[2]:
            raise KeyboardInterrupt
        return convert_file(path, *more)

    for module in (first_pass, kept):
        monkeypatch.setattr(module, "convert_file", stopped)
    done = CliRunner().invoke(cli.app, ["convert", *map(str, files), "-o", str(out), *words])
    assert done.exit_code == 130
    assert message in done.stderr
    assert not out.exists()


# --- what may lie in the folder -----------------------------------------------------------------


@pytest.fixture
def part(files: list[Path], tmp_path: Path) -> tuple[Path, Path, str]:
    folder = tmp_path / "parts"
    folder.mkdir()
    make_part(files[0], folder, "key", RankOptions(), None, __version__)
    return files[0], folder, "key"


def test_a_part_holds_what_was_read(part: tuple[Path, Path, str]) -> None:
    (trace,) = load_part(*part)
    assert (trace.rank, trace.path) == (0, part[0])
    assert trace.nodes.exists()
    # Matching looks each description up once, by identity.
    assert len({id(comm) for comm in trace.comms.comm}) == len(set(trace.comms.comm))


class _Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", pickle.dumps(_Harm()), pickle.dumps(3), pickle.dumps((3,))],
    ids=["empty", "nonsense", "code", "number", "tuple"],
)
def test_a_foreign_record_is_refused(part: tuple[Path, Path, str], content: bytes) -> None:
    (part[1] / "key.record").write_bytes(content)
    with pytest.raises(OutputError, match="damaged"):
        load_part(*part)


def test_nodes_that_are_gone(part: tuple[Path, Path, str]) -> None:
    for path in part[1].glob("*.parquet"):
        path.unlink()
    with pytest.raises(OutputError, match="damaged"):
        load_part(*part)


def test_storage_that_is_not_shared(
    part: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_VISIBLE_S", 0)
    with pytest.raises(OutputError, match="not here") as caught:
        load_part(part[0], part[1], "other")
    assert "share" in caught.value.hint
    with pytest.raises(OutputError, match="does not see the folder"):
        make_part(part[0], part[1] / "none", "key", RankOptions(), None, __version__)


def test_another_version_on_the_cluster(part: tuple[Path, Path, str]) -> None:
    with pytest.raises(SourceFormatError, match=r"a worker runs prismtrace .*, this is 9\.9"):
        make_part(part[0], part[1], "key", RankOptions(), None, "9.9")


# --- clusters -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Any:
    distributed = pytest.importorskip(
        "distributed", reason="needs pip install 'prismllm-toolkit[dask]'"
    )
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    ) as started:
        yield started


def test_a_cluster_makes_the_same_bytes(
    cluster: Any, files: list[Path], out: Path, expected: bytes
) -> None:
    convert(files, out, dask=cluster.scheduler_address)
    assert out.read_bytes() == expected
    assert list(out.parent.iterdir()) == [out]


def test_errors_come_back_from_a_cluster(cluster: Any, files: list[Path], out: Path) -> None:
    files[1].write_text("{")
    with pytest.raises(InputFileError) as caught:
        convert(files, out, dask=cluster.scheduler_address)
    assert caught.value.where == str(files[1])
    assert caught.value.hint


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(cluster: Any, out: Path, tmp_path: Path) -> None:
    files = Job(tp=2, dp=4, pp=4, torch="2.5", microbatches=4).write(tmp_path / "in")
    convert(files, tmp_path / "plain.parquet")

    def kill_a_worker() -> None:
        deadline = time.monotonic() + 30
        while count_kept(out) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    convert(files, out, dask=cluster.scheduler_address)
    killer.join()
    assert out.read_bytes() == (tmp_path / "plain.parquet").read_bytes()


def test_no_cluster_there(files: list[Path], out: Path) -> None:
    pytest.importorskip("distributed", reason="needs pip install 'prismllm-toolkit[dask]'")
    with pytest.raises(InputFileError, match="no Dask scheduler answers") as caught:
        convert(files, out, dask="nonsense")
    assert caught.value.where == "nonsense"
