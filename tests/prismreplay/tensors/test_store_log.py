"""What ranks did with the store, written, read and played again."""

from __future__ import annotations

import pytest

from prismreplay.errors import TensorRecordingError
from prismreplay.tensors.store_log import (
    FILE,
    StoreEntry,
    StoreReplay,
    read_store_log,
    write_store_log,
)

LOG = (
    StoreEntry(0, "set", ("id", b"\x00\xff")),
    StoreEntry(1, "add", ("arrived", 1)),
    StoreEntry(2, "get", ("id", 1800.0)),
    StoreEntry(2, "add", ("arrived", 1)),
    StoreEntry(0, "add", ("arrived", 1)),
    StoreEntry(2, "wait", (["all"], 5.0)),
)


def test_it_comes_back(tmp_path):
    write_store_log(tmp_path, LOG)
    assert read_store_log(tmp_path) == LOG


def test_nothing_is_nothing(tmp_path):
    assert read_store_log(tmp_path) == ()


def test_damage_is_told(tmp_path):
    (tmp_path / FILE).write_text("[1, 2\n")
    with pytest.raises(TensorRecordingError, match="damaged"):
        read_store_log(tmp_path)


def test_virtual_ranks_are_where_they_were():
    replay = StoreReplay(LOG, [2])
    assert list(replay.before(2, "get", ("id", 1800.0))) == [LOG[0], LOG[1]]
    assert list(replay.before(2, "add", ("arrived", 1))) == []
    assert list(replay.before(2, "wait", (["all"], 5.0))) == [LOG[4]]


def test_what_was_not_recorded_finds_everything_done():
    replay = StoreReplay(LOG, [2])
    assert list(replay.before(2, "get", ("other", 1800.0))) == [LOG[0], LOG[1], LOG[4]]
