"""Ctrl-C while a command is still being loaded ends it without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Loaded in place of Typer, which takes the longest.
INTERRUPTING = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
raise SystemExit("not interrupted")
"""


def _start(command: str, path: Path, repo: Path) -> subprocess.Popen[str]:
    code = f"from prismtrace.starting import {command}; {command}()"
    folders = os.pathsep.join([str(path), str(repo), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code, "--version"],
        env={**os.environ, "PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", ["prismtrace", "prismcalib", "prismreplay"])
def test_ctrl_c_before_the_command_runs(command: str, tmp_path: Path, repo: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPTING)
    process = _start(command, tmp_path, repo)
    assert process.communicate() == ("", "")
    assert process.returncode == -signal.SIGINT


def test_a_caller_who_ignores_it_is_obeyed(tmp_path: Path, repo: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPTING)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = _start("prismtrace", tmp_path, repo)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert process.communicate() == ("", "not interrupted\n")


def test_importing_changes_no_handler() -> None:
    code = (
        "import signal; import prismtrace.starting, prismtrace.cli, prismcalib.cli;"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
