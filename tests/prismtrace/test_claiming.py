"""A folder is one run's at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prismreplay.collect.logs import RankLogs
from prismtrace.claiming import Claim
from prismtrace.errors import OutputError


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "logs"
    first = Claim(folder)
    with pytest.raises(OutputError, match="another run is writing") as caught:
        Claim(folder)
    assert "name another output" in str(caught.value.hint)
    first.close()
    first.close()
    Claim(folder).close()
    assert list(folder.iterdir()) == []


def test_what_is_shared_is_shared_only_with_those_that_share_it(tmp_path: Path) -> None:
    first, second = Claim(tmp_path, shared=True), Claim(tmp_path, shared=True)
    with pytest.raises(OutputError, match="another run is writing"):
        Claim(tmp_path)
    first.close()
    second.close()
    alone = Claim(tmp_path)
    with pytest.raises(OutputError, match="another run is writing"):
        Claim(tmp_path, shared=True)
    alone.close()


def test_a_claim_ends_with_its_owner(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    del claim
    Claim(tmp_path).close()


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        Claim(tmp_path / "file")


def test_logs_of_a_run_under_way_stay(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, 1, ())
    logs.prepare()
    streams, _ = logs.open(0)
    os.write(streams.out, b"kept")
    os.close(streams.out)
    with pytest.raises(OutputError):
        RankLogs(tmp_path, 1, ()).prepare()
    assert logs.path(0).read_text() == "kept"
    logs.close()
    RankLogs(tmp_path, 1, ()).prepare()
    assert not logs.path(0).exists()
