"""What a process has before ranks are forked from it, and what is said of their failures."""

from __future__ import annotations

import errno
import os
import sys
import types

import pytest

pytest.importorskip("torch")

from prismreplay.collect import pool


def test_the_folder_that_an_import_makes_goes_unless_it_is_used(tmp_path, monkeypatch):
    folder = tmp_path / "torchinductor_me"
    folders = types.SimpleNamespace(default_cache_dir=lambda: str(folder))
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.cache_dir_utils", folders)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    pool._remove_empty_cache()  # there is none
    folder.mkdir()
    pool._remove_empty_cache()
    assert not folder.exists()
    (folder / "kernel").mkdir(parents=True)
    pool._remove_empty_cache()
    assert (folder / "kernel").exists()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    (folder / "kernel").rmdir()
    pool._remove_empty_cache()
    assert folder.exists()


def test_a_program_whose_output_finds_no_space_has_a_hint():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "free some space" in (pool._failure(error)[4] or "")
    assert pool._failure(OSError(errno.EACCES, "no"))[4] is None
