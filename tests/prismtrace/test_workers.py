from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

from prismtrace.converters.workers import run_tasks
from prismtrace.errors import InputFileError, RankError


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of functions that worker processes can import."""
    (tmp_path / "worker_tasks.py").write_text(
        "import os, signal, sys, time\n"
        "from prismtrace.errors import RankError\n"
        "def double(n): return 2 * n\n"
        "def slow(n): time.sleep(0.05 * (3 - n)); return n\n"
        "def environment(_): return os.environ['POLARS_MAX_THREADS'], os.getpgrp()\n"
        "def noisy(n): print('hello'); return n\n"
        "def fail(n): raise RankError(f'bad {n}', where='here', hint='do that')\n"
        "def die(_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "class Odd(Exception):\n"
        "    def __reduce__(self): raise TypeError\n"
        "def odd(_): raise Odd('strange')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("worker_tasks")


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_in_order(tasks: ModuleType, jobs: int) -> None:
    assert list(run_tasks(tasks.double, [(n,) for n in range(5)], jobs)) == [0, 2, 4, 6, 8]
    assert list(run_tasks(tasks.slow, [(n,) for n in range(3)], jobs)) == [0, 1, 2]


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_come_back_whole(tasks: ModuleType, jobs: int) -> None:
    with pytest.raises(RankError, match="bad 1") as caught:
        list(run_tasks(tasks.fail, [(1,), (2,)], jobs))
    assert (caught.value.where, caught.value.hint) == ("here", "do that")


def test_a_worker_that_is_killed(tasks: ModuleType) -> None:
    with pytest.raises(InputFileError, match="worker process died") as caught:
        list(run_tasks(tasks.die, [("a.json",), ("b.json",)], 2))
    assert caught.value.where == "a.json"
    assert "--jobs" in (caught.value.hint or "")


def test_errors_that_cannot_travel(tasks: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Odd: strange"):
        list(run_tasks(tasks.odd, [(1,), (2,)], 2))


def test_what_a_task_prints_does_not_disturb(
    tasks: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert list(run_tasks(tasks.noisy, [(n,) for n in range(3)], 2)) == [0, 1, 2]
    assert "hello" not in capfd.readouterr().out


def test_workers_share_the_cores_and_leave_the_terminal(
    tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLARS_MAX_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    (found, *_) = run_tasks(tasks.environment, [(1,), (2,)], 2)
    assert found[0] == "4"
    assert found[1] != os.getpgrp()


def test_no_worker_outlives_a_failure(tasks: ModuleType) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("the kernel does not list child processes")
    before = children()
    with pytest.raises(RankError):
        list(run_tasks(tasks.fail, [(1,), (2,), (3,)], 2))
    assert children() <= before
