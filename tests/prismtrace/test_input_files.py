"""What is no readable file is refused before anything waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prismtrace.errors import InputFileError
from prismtrace.input_files import is_text, require_readable


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("")
    require_readable(path)
    (tmp_path / "link").symlink_to(path)
    require_readable(tmp_path / "link")


def test_what_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    problems = {
        "fifo": "a pipe or a device",
        "": "a folder",
        "missing": "no such file",
        "fifo/x": "no such file",
        "loop": "cannot be read",
        "x" * 1_000: "cannot be read",
    }
    for name, problem in problems.items():
        with pytest.raises(InputFileError, match=problem) as caught:
            require_readable(tmp_path / name)
        assert caught.value.hint
    with pytest.raises(InputFileError, match="a pipe or a device"):
        require_readable("/dev/null")


def test_names() -> None:
    assert is_text("é☃")
    assert not is_text(os.fsdecode(b"\xff"))


def test_a_name_that_polars_would_spell_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_text("é")
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    assert not is_text("é")
    assert is_text("e")
