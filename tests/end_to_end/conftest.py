"""Commands in this process, and a job of two ranks to try them on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from prismtrace.converters import convert
from tests.end_to_end.commands import Done, profile, write_profiles
from tests.end_to_end.sandboxes import JOBS, make_truth


@pytest.fixture
def call(capsys: Any, monkeypatch: Any) -> Callable[..., Done]:
    """A command as a person calls it, without the cost of a process."""

    def run(command: str, *words: object) -> Done:
        monkeypatch.setattr(sys, "argv", [command, *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            import_module(f"{command}.cli").main()
        return Done(left.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """An output of an earlier run, which a failure leaves as it was, alone in its folder."""
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "result.parquet"
    path.write_bytes(b"previous")
    yield path
    assert path.read_bytes() == b"previous"
    assert [p.name for p in path.parent.iterdir()] == ["result.parquet"]


@pytest.fixture(scope="session")
def truths(
    tmp_path_factory: pytest.TempPathFactory, command_env: dict[str, str]
) -> Callable[[str], Path]:
    """Where what is true of a job of `JOBS` is, see `make_truth`; made once a session."""
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have folders of their own in that of the session.
    root = (base.parent if base.name.startswith("popen-") else base) / "true-jobs"

    def truth(name: str) -> Path:
        make_truth(root / name, JOBS[name], command_env)
        return root / name

    return truth


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_profiles(tmp_path_factory.mktemp("in") / "job", profile(0), profile(1))


@pytest.fixture(scope="module")
def recorded(profiles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.parquet"
    convert(profiles, path)
    return path
