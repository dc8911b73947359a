"""Results take their place whole, and take no place that is not a file's."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from prismtrace.converters.parts import disk_errors
from prismtrace.errors import OutputError
from prismtrace.output import atomic_output, output_error, refuse_inputs
from tests.full_disks import room_for


def write(path: Path, text: str = "new") -> None:
    with atomic_output(path) as temporary:
        temporary.write_text(text)


def test_permissions_of_a_replaced_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    write(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "new"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_stays(make: object, tmp_path: Path) -> None:
    path = tmp_path / "a"
    make(path)  # type: ignore[operator]
    before = path.lstat()
    with pytest.raises(OutputError) as caught:
        write(path)
    assert (caught.value.where, caught.value.hint is not None) == (str(path), True)
    assert path.lstat() == before


def test_a_long_name_leaves_room_for_a_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".parquet")
    write(path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_an_input_is_not_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("")
    other.hardlink_to(path)
    refuse_inputs(tmp_path / "new", [path, None])
    with pytest.raises(OutputError, match="one of the inputs"):
        refuse_inputs(other, [None, tmp_path / "missing", path])


def test_no_inodes_is_told_apart_from_no_space(tmp_path: Path, monkeypatch: object) -> None:
    disk = os.statvfs(tmp_path)
    values = list(disk)
    values[5:8] = [10, 0, 0]  # files, free ones, those free for this user
    full = os.statvfs_result(values)
    monkeypatch.setattr(os, "statvfs", lambda _: full)  # type: ignore[attr-defined]
    assert "no more files" in str(output_error(tmp_path / "a", errno.ENOSPC).hint)


ROWS = pl.DataFrame({"a": range(3_000), "b": [f"name {number}" for number in range(3_000)]})
WRITERS: dict[str, Callable[[Path], object]] = {
    "parquet": ROWS.write_parquet,
    "parquet sink": ROWS.lazy().sink_parquet,
    "csv": ROWS.write_csv,
    "csv sink": ROWS.lazy().sink_csv,
    "text": lambda path: path.write_text("x" * 20_000),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_full_somewhere_in_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    WRITERS[name](path)
    before = path.read_bytes()
    # The last bytes of a Parquet file are its footer, and what Polars says then is another thing.
    for size in [*range(0, len(before), len(before) // 16), len(before) - 1]:
        with (
            room_for(size),
            pytest.raises(OutputError, match="too large") as caught,
            atomic_output(path) as temporary,
        ):
            WRITERS[name](temporary)
        assert (caught.value.where, [path]) == (str(path), list(tmp_path.iterdir()))
        with room_for(size), pytest.raises(OutputError), disk_errors(path):
            WRITERS[name](tmp_path / "b")
        (tmp_path / "b").unlink()
    assert path.read_bytes() == before


def test_errors_that_are_not_the_disk_s_stay(tmp_path: Path) -> None:
    for told in ("parquet: Invalid thrift: transport error", "no such column"):
        with pytest.raises(pl.exceptions.ComputeError), atomic_output(tmp_path / "a"):
            raise pl.exceptions.ComputeError(told)
    assert list(tmp_path.iterdir()) == []
