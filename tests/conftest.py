"""What all tests share: where the recorded traces are, how to call our commands, markers."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from prismreplay.local_ranks import with_paths

REPO = Path(__file__).resolve().parent.parent

# A slow machine is no failure, and CI must not find a new counterexample on an unrelated change.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="contract tests write schemas/, docs/reference/cli.md and the frozen flags anew",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = _gpu_count()
    for item in items:
        if item.get_closest_marker("multi_gpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {gpus}"))
        elif item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "data_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.needs_data)


def _gpu_count() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    there = listing.stdout.count("UUID")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if shown is None else min(there, len(shown.split(",")) if shown else 0)


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of recorded traces: PRISM_TEST_DATA, else ../shared/data beside the checkout."""
    path = Path(os.environ.get("PRISM_TEST_DATA") or REPO.parent / "shared" / "data")
    if (path / "kineto").is_dir():
        return path
    reason = f"no recorded traces at {path}; set PRISM_TEST_DATA"
    if os.environ.get("PRISM_REQUIRE_DATA") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate"))


@pytest.fixture(scope="session")
def entry_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from, in which networkx finds our backend, installed or not."""
    folder = tmp_path_factory.mktemp("site")
    if not importlib.metadata.entry_points(group="networkx.backends", name="prismcalib"):
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        info = folder / "prismllm_backend-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: prismllm-backend\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "\n".join(
                f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in lines.items())
                for group, lines in project["entry-points"].items()
            )
        )
    return folder


@pytest.fixture(scope="session")
def command_env(tmp_path_factory: pytest.TempPathFactory, entry_points: Path) -> dict[str, str]:
    """An environment in which `prismtrace` and the other commands, and `python`, are ours."""
    folder = tmp_path_factory.mktemp("bin")
    calls = {name: f"-m {name}.cli" for name in ("prismtrace", "prismcalib", "prismreplay")}
    for name, call in {**calls, "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    told = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "100"}
    return with_paths(told, REPO, entry_points)


@pytest.fixture
def run_command(
    command_env: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Call a command as a person would, in `tmp_path`: `run_command("prismtrace", "info", x)`."""

    def run(*words: object, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)),
            cwd=cwd,
            env=command_env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
