"""Programs that go wrong under `prismreplay collect`: it ends at once and says why."""

from __future__ import annotations

from importlib import util
from textwrap import dedent

import pytest

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)

BEGINNING = """
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ones = torch.ones(4)
    dist.all_reduce(ones)
"""

# Name -> program, what the message has to say.
PROGRAMS = {
    "mismatched-kind": (
        "dist.all_reduce(ones) if rank else dist.broadcast(ones, 0)",
        ["all_reduce", "broadcast", "program.py:10"],
    ),
    "mismatched-size": (
        "dist.all_reduce(torch.ones(4 + rank // 2))",
        ["all_reduce", "program.py:10"],
    ),
    "mismatched-dtype": (
        "dist.all_reduce(ones.double() if rank == 2 else ones)",
        ["float64", "float32", "program.py:10"],
    ),
    "ends-early": (
        "if rank == 2: sys.exit(0)\ndist.all_reduce(ones)",
        ["rank 2", "ended", "program.py:11"],
    ),
    "exits-with-a-code": (
        "if rank == 2: sys.exit(3)\ndist.all_reduce(ones)",
        ["rank 2", "3"],
    ),
    "raises": (
        "if rank == 2: raise ValueError('no such layer')\ndist.all_reduce(ones)",
        ["rank 2", "ValueError: no such layer", "program.py"],
    ),
    "is-killed": (
        "import os\nif rank == 2: os.kill(os.getpid(), 9)\ndist.all_reduce(ones)",
        ["rank 2", "SIGKILL"],
    ),
    "waits-in-a-circle": (
        "dist.recv(ones, (rank + 1) % 4)",
        ["recv", "rank 0", "rank 3", "program.py:10"],
    ),
    "waits-for-a-key": (
        "dist.distributed_c10d._get_default_store().wait(['nobody sets this'])",
        ["nobody sets this"],
    ),
    "has-no-space": (
        "if rank == 2: __import__('resource').setrlimit(1, (100, -1))\ndist.all_reduce(ones)",
        ["cannot write the result: File too large", "rank 2", "free some space"],
    ),
    "unsupported-operation": (
        "dist.all_reduce(torch.eye(3).to_sparse())",
        ["sparse", "program.py:10"],
    ),
}


def _write(path, program):
    path.write_text(dedent(BEGINNING) + program + "\n")
    return path


def _collect(run_command, program):
    return run_command(
        "prismreplay", "collect", "--world-size", 4, "--devices", 2, "-o", "bare.parquet",
        "--", program,
    )  # fmt: skip


@pytest.mark.parametrize(("program", "words"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_failing_program_ends_with_its_cause(program, words, tmp_path, run_command):
    done = _collect(run_command, _write(tmp_path / "program.py", program))
    assert done.returncode == 1, done
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert done.stderr.count("error: ") == 1


def test_a_program_that_never_communicates_is_told_so(tmp_path, run_command):
    path = tmp_path / "program.py"
    path.write_text("print('hello')\n")
    done = _collect(run_command, path)
    assert done.returncode == 1
    assert "communicat" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, ["program.py"]), ("def broken(:\n", ["program.py:1", "no valid Python"])],
    ids=["missing", "no-python"],
)
def test_a_program_that_cannot_start_is_told_so(content, words, tmp_path, run_command):
    path = tmp_path / "program.py"
    if content is not None:
        path.write_text(content)
    done = _collect(run_command, path)
    assert done.returncode in {1, 2}
    assert [word for word in words if word not in done.stderr] == [], done.stderr
