"""Ranks as plain processes: which one is told when several fail."""

from __future__ import annotations

import os
from textwrap import dedent

import pytest

from prismreplay.collect.logs import RankLogs
from prismreplay.collect.programs import ProgramCall
from prismreplay.errors import RankFailedError
from prismreplay.local_ranks import run_ranks


def run(tmp_path, program, ranks=2, shown=(0,)):
    path = tmp_path / "program.py"
    path.write_text("import os, time\nrank = int(os.environ['RANK'])\n" + dedent(program))
    logs = RankLogs(tmp_path / "logs", ranks, shown)
    logs.prepare()
    run_ranks(ProgramCall(str(path), ()), ranks, os.environ, logs)


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_failed_is_told_and_not_those_that_lost_it(tmp_path, first):
    program = f"""
        if rank == {first}:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        time.sleep(0.3)
        raise ValueError("no such layer")
    """
    with pytest.raises(RankFailedError, match=f"rank {1 - first} ended with exit code 1"):
        run(tmp_path, program)


def test_if_all_have_lost_somebody_the_first_is_told(tmp_path):
    program = 'raise RuntimeError("Connection reset by peer")'
    with pytest.raises(RankFailedError, match="rank 0 ended with exit code 1") as caught:
        run(tmp_path, program, shown=())
    assert "reset by peer" in caught.value.report


def test_a_rank_that_waits_for_ever_does_not_hide_a_failure(tmp_path):
    with pytest.raises(RankFailedError, match="rank 1 ended with exit code 5"):
        run(tmp_path, "time.sleep(600) if rank == 0 else os._exit(5)")
