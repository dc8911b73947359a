from __future__ import annotations

import errno
from pathlib import Path

import polars as pl
import pytest

from prismtrace.converters.parts import disk_errors, workspace
from prismtrace.errors import OutputError


@pytest.mark.parametrize(
    ("error", "message", "full"),
    [
        (OSError(errno.ENOSPC, "x"), "No space left on device", True),
        (OSError(errno.EACCES, "x"), "Permission denied", False),
        (
            pl.exceptions.ComputeError("parquet: underlying IO error: x (os error 28)"),
            "No space left on device",
            True,
        ),
        (
            pl.exceptions.ComputeError("parquet: underlying IO error: x (os error 122)"),
            "quota exceeded",
            True,
        ),
        (
            pl.exceptions.ComputeError("parquet: File out of specification: transport error"),
            "No space left on device",
            True,
        ),
    ],
)
def test_errors_of_the_disk_in_any_wrapping(error: Exception, message: str, full: bool) -> None:
    with pytest.raises(OutputError, match=message) as caught, disk_errors(Path("here")):
        raise error
    assert caught.value.where == "here"
    assert ("free some space" in (caught.value.hint or "")) == full


def test_other_errors_pass() -> None:
    with pytest.raises(pl.exceptions.ComputeError), disk_errors(Path("here")):
        raise pl.exceptions.ComputeError("cannot cast")


def test_the_workspace_is_beside_the_result_and_goes(tmp_path: Path) -> None:
    def fail() -> None:
        with workspace(tmp_path / "run.parquet") as folder:
            (folder / "0.parquet").write_bytes(b"x")
            assert folder.parent == tmp_path
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_nothing_can_be_written_there(tmp_path: Path) -> None:
    for target, text in [(tmp_path, "is a folder"), (tmp_path / "absent" / "x", "No such file")]:
        with pytest.raises(OutputError, match=text) as caught, workspace(target):
            pass
        assert caught.value.hint
    assert list(tmp_path.iterdir()) == []
