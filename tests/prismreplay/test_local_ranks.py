"""Ranks as plain processes: which one is told when several fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from textwrap import dedent
from threading import Thread

import pytest

from prismreplay import local_ranks
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.stale import end_groups
from prismreplay.collect.surroundings import uninterrupted
from prismreplay.errors import RankFailedError
from prismreplay.local_ranks import run_command, run_ranks
from prismtrace.signals import stop_signals


def run(tmp_path, program, ranks=2, shown=(0,)):
    path = tmp_path / "program.py"
    path.write_text("import os, time\nrank = int(os.environ['RANK'])\n" + dedent(program))
    logs = RankLogs(tmp_path / "logs", ranks, shown)
    logs.prepare()
    run_ranks(ProgramCall(str(path), ()), ranks, os.environ, logs)


def running_in(folder):
    """Processes that run a program of this folder, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(folder / "program.py") in words:
            found.append(int(entry.name))
    return found


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


def test_an_interrupt_inside_of_popen_does_not_hang_the_end(tmp_path, monkeypatch):
    """Between taking its lock and the `try` that gives it back, as it once happened."""

    def interrupted(processes, *_):
        for process in processes:
            assert process._waitpid_lock.acquire(timeout=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(local_ranks, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "time.sleep(600)")
    assert not running_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_ranks_is_not_interrupted(tmp_path, monkeypatch, number):
    def killed(leaders):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        end_groups(leaders)

    monkeypatch.setattr(local_ranks, "end_groups", killed)
    with stop_signals() as stopped, pytest.raises(RankFailedError, match="rank 1"):
        run(tmp_path, "time.sleep(600) if rank == 0 else os._exit(5)")
    assert not stopped
    assert not running_in(tmp_path)


def test_what_came_while_ranks_were_ended_counts_afterwards():
    with stop_signals() as stopped, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            reached = True
        raise AssertionError("not stopped")
    assert reached
    assert stopped == [signal.SIGTERM]


def test_any_launcher_is_ended_with_what_it_started(tmp_path):
    (tmp_path / "program.py").write_text("import time\ntime.sleep(600)\n")
    launcher = f"{sys.executable} {tmp_path}/program.py & {sys.executable} {tmp_path}/program.py"

    def interrupt():
        limit = time.monotonic() + 60
        while len(running_in(tmp_path)) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_command(["sh", "-c", launcher], os.environ, quiet=True)
    assert not running_in(tmp_path)
    assert run_command(["sh", "-c", "exit 7"], os.environ, quiet=True) == 7
    assert run_command(["sh", "-c", "kill -9 $$"], os.environ, quiet=True) == -9
