"""What a killed process left is removed by the next one; nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prismtrace import owners
from prismtrace.converters.parts import workspace
from prismtrace.output import atomic_output, own_prefix

KILLED = """
import os, signal, sys
from pathlib import Path
from prismtrace.converters.parts import workspace
from prismtrace.output import atomic_output
target = Path(sys.argv[1])
with workspace(target) as folder, atomic_output(target) as temporary:
    (folder / "part").write_text("much")
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(target: Path) -> list[Path]:
    """Files and folders of a process that was killed while it wrote `target`."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(target)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    return sorted(path for path in target.parent.iterdir() if path.name.startswith("."))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    target, other = tmp_path / "run [1].parquet", tmp_path / "run.parquet"
    assert len(killed(target)) == 2
    with atomic_output(other) as temporary:
        temporary.write_text("")
    assert len(list(tmp_path.iterdir())) == 3
    with atomic_output(target) as temporary:
        temporary.write_text("whole")
    assert sorted(tmp_path.iterdir()) == [target, other]
    assert len(killed(target)) == 2
    with workspace(target):
        assert len(list(tmp_path.iterdir())) == 3
    assert target.read_text() == "whole"


def test_what_is_not_known_to_be_dead_stays(tmp_path: Path) -> None:
    target = tmp_path / "a"
    place, pid, start = owners.mark().split("-")
    names = [
        f".a.{owners.mark()}.x.tmp",
        f".a.{'0' * 12}-{pid}-1.x.tmp",
        ".a.kept.parts",
        ".a.tmp",
        ".a.notes",
        f"{place}-{pid}-1.x",
    ]
    for name in names:
        (tmp_path / name).write_text("")
    gone = tmp_path / f".a.{place}-{pid}-{int(start) - 1}.x.tmp"
    gone.write_text("")
    assert own_prefix(target) == f".a.{owners.mark()}."
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    with atomic_output(target) as outer, atomic_output(target) as inner:
        assert outer.exists()
        inner.write_text("")


def test_a_folder_that_may_not_be_listed_is_no_failure(tmp_path: Path) -> None:
    owners.remove_left_over(tmp_path / "missing", ".a.")
