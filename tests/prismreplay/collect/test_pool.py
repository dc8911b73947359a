"""What a process has before ranks are forked from it, and what is said of their failures."""

from __future__ import annotations

import errno
import os

import pytest

pytest.importorskip("torch")

from prismreplay.collect import failures, pool


def test_the_folder_that_an_import_makes_goes_unless_it_is_used(tmp_path, monkeypatch):
    folder = tmp_path / "torchinductor_me"

    def import_torch() -> None:
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv(pool._CACHE, str(folder))

    monkeypatch.delenv(pool._CACHE, raising=False)
    with pool._without_empty_cache():
        import_torch()
    assert not folder.exists()
    import_torch()
    with pool._without_empty_cache():  # it is the user's
        pass
    assert folder.exists()
    (folder / "kernel").mkdir()
    monkeypatch.delenv(pool._CACHE)
    with pool._without_empty_cache():
        import_torch()
    assert (folder / "kernel").exists()


def test_a_program_whose_output_finds_no_space_has_a_hint():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "free some space" in (failures.failure_message(error)[4] or "")
    assert failures.failure_message(OSError(errno.EACCES, "no"))[4] is None
