"""The entry point that torch calls: nothing without the variable, a role at the first group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra `replay`")

from prismreplay.local_ranks import with_paths
from prismreplay.runtime.bootstrap import ROLE_VARIABLE

REPO = Path(__file__).resolve().parents[3]

FACTORY = """
class Role:
    wants_real_groups = True
    def join(self, group):
        print("joined", group.key, group.ranks, flush=True)
    def submit(self, op, inputs, outputs, call):
        print(op.call.value, op.payload_bytes, flush=True)
        return Pending(call())
class Pending:
    def __init__(self, work):
        self.wait, self.done, self.source = work.wait, work.is_completed, None
class Observer:
    joined = issued = waiting = waited = lambda *_: 0
def start(rank, world_size):
    print("started", rank, world_size, flush=True)
    return Role(), Observer()
"""

PROGRAM = """
import torch
from prismreplay.runtime import bootstrap
bootstrap.autoload()
print("imported", flush=True)
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(2)
dist.all_reduce(tensor)
dist.destroy_process_group()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print(tensor.tolist())
dist.destroy_process_group()
"""


def run(tmp_path, **variables):
    (tmp_path / "given.py").write_text(FACTORY)
    environment = {name: value for name, value in os.environ.items() if name != ROLE_VARIABLE}
    environment = with_paths({**environment, **variables}, REPO, tmp_path)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_happens_without_the_variable(tmp_path):
    answer = run(tmp_path)
    assert (answer.stdout, answer.returncode) == ("imported\n[1.0, 1.0]\n", 0), answer.stderr


def test_the_role_starts_with_the_first_group(tmp_path):
    answer = run(tmp_path, **{ROLE_VARIABLE: "given:start"})
    assert answer.stdout.splitlines() == [
        "imported",
        "started 0 1",
        "joined 0/0 (0,)",
        "all_reduce 8",
        "joined 1/0 (0,)",
        "[1.0, 1.0]",
    ], answer.stderr


def test_a_missing_role_is_told_where_the_group_is_made(tmp_path):
    answer = run(tmp_path, **{ROLE_VARIABLE: "no_such_module:start"})
    assert answer.returncode == 1
    assert answer.stdout == "imported\n"
    assert "No module named 'no_such_module'" in answer.stderr


def test_the_module_loads_nothing():
    code = "import sys; import prismreplay; before = set(sys.modules)\n"
    code += "import prismreplay.runtime.bootstrap; print(set(sys.modules) - before)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() in (
        "{'prismreplay.runtime', 'prismreplay.runtime.bootstrap'}",
        "{'prismreplay.runtime.bootstrap', 'prismreplay.runtime'}",
    )
