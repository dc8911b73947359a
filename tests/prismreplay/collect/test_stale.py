"""What dead runs left is removed; what live ones have is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prismreplay.collect import stale
from prismtrace import owners

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where the kernel has it
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def dead_run() -> str:
    """The name of a run whose owner is gone."""
    with subprocess.Popen(SLEEP) as owner:
        name = stale.run_name(owner.pid)
        owner.kill()
    return name


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, start_new_session=True) as process:
        yield process
        process.kill()


def _gone(process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.poll() is not None


def test_the_folder_of_a_dead_run_is_removed(tmp_path: Path, dead_run: str) -> None:
    (tmp_path / dead_run / "inside").mkdir(parents=True)
    cleaned = stale.clean(tmp_path)
    assert cleaned.folders == (str(tmp_path / dead_run),)
    assert list(tmp_path.iterdir()) == []


def test_live_runs_and_other_names_are_left_alone(tmp_path: Path, dead_run: str) -> None:
    other_namespace = dead_run.replace("prismreplay-", "prismreplay-1")
    names = [stale.run_name(), "prismreplay-notes", other_namespace]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / dead_run).symlink_to(tmp_path / "prismreplay-notes")
    assert stale.clean(tmp_path).folders == ()
    assert all((tmp_path / name).is_dir() for name in names)


def test_a_number_that_is_used_again_does_not_keep_a_run_alive(tmp_path: Path) -> None:
    mine = stale.run_name()
    earlier = f"{mine.rpartition('-')[0]}-{(owners.start_time(os.getpid()) or 0) - 1}"
    (tmp_path / earlier).mkdir()
    assert len(stale.clean(tmp_path).folders) == 1


def test_processes_of_a_dead_run_are_ended(
    tmp_path: Path, dead_run: str, worker: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / dead_run
    folder.mkdir()
    stale.note_groups(folder, [worker.pid])
    assert worker.pid in stale.clean(tmp_path).processes
    assert _gone(worker)


def test_processes_of_a_live_run_are_left_alone(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / stale.run_name()
    folder.mkdir()
    stale.note_groups(folder, [worker.pid])
    assert worker.pid not in stale.clean(tmp_path).processes
    assert worker.poll() is None


def test_a_group_whose_number_is_used_again_is_left_alone(
    tmp_path: Path, dead_run: str, worker: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / dead_run
    folder.mkdir()
    (folder / "process-groups").write_text(f"{worker.pid} 1")
    assert worker.pid not in stale.clean(tmp_path).processes
    assert worker.poll() is None


def test_programs_that_carry_the_name_of_a_dead_run_are_ended(
    tmp_path: Path, dead_run: str
) -> None:
    for name, ends in ((dead_run, True), (stale.run_name(), False)):
        environment = {**os.environ, stale.RUN_VARIABLE: name}
        with subprocess.Popen(SLEEP, env=environment) as process:
            assert (process.pid in stale.clean(tmp_path).processes) == ends
            process.kill()


def test_trackers_of_shared_memory_clean_up_after_a_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\n"
        "from multiprocessing import shared_memory\n"
        "memory = shared_memory.SharedMemory(create=True, size=64)\n"
        "print(memory.name, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert (SHARED_MEMORY / name).exists()
        stale.end_groups([process.pid])
        assert _gone(process)
    deadline = time.monotonic() + 10
    while (SHARED_MEMORY / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (SHARED_MEMORY / name).exists()
    stale.end_groups([process.pid])  # nobody is left
