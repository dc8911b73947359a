"""`prismreplay collect` with recorded, supplied and folded tensors, on a small program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import prismtrace as pt
from tests.end_to_end.graphs import describe_difference

PROGRAM = Path(__file__).parent / "programs" / "tiny_moe.py"
MOCK = ("--mock-router", "shares.toml")
ALONE = ("--tensors", "builtin:independent?vocabulary=64")

DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(2):
    model(torch.randn(8, 4)).square().mean().backward()
"""


class Runs:
    """Runs of the program on 4 ranks, in one folder."""

    def __init__(self, folder, env):
        self.folder, self.env = folder, env
        (folder / "shares.toml").write_text("imbalance = [0.5, 2.0]\n")
        (folder / "early.toml").write_text(
            'otherwise = "error"\n[[rule]]\nstep = 0\nproduce = "own"\n'
        )

    def collect(self, name, *options, ep=2):
        return subprocess.run(
            [sys.executable, "-m", "prismreplay.cli", "collect", "--world-size", "4", "--devices", "2", "--json",
             "-o", f"{name}.parquet", *options, "--", PROGRAM, f"{name}-results", str(ep)],
            cwd=self.folder, env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def succeed(self, name, *options):
        done = self.collect(name, *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def results(self, name):
        return {
            p.name: json.loads(p.read_text())
            for p in sorted((self.folder / f"{name}-results").iterdir())
        }

    def graph(self, name):
        return self.folder / f"{name}.parquet"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, command_env):
    made = Runs(tmp_path_factory.mktemp("runs"), command_env)
    made.recorded = made.succeed("all", "--record-tensors", "all")
    made.mocked = made.succeed("mocked", *MOCK)
    return made


def test_a_recording_lets_every_rank_run_alone_to_the_same_end(runs):
    recording = runs.recorded["recording"]
    assert recording["complete"]
    assert recording["tensors"] > 50
    alone = runs.succeed("alone", "--tensors", "all.tensors")
    assert (alone["rounds"], alone["collectives"], alone["context_switches"]) == (1, 0, 4)
    assert runs.results("alone") == runs.results("all")
    assert describe_difference(runs.graph("all"), runs.graph("alone")) is None


def test_rules_and_a_mock_router_give_the_graph_without_any_partner(runs):
    alone = runs.succeed("ruled", *ALONE, *MOCK)
    # Flags that one rank sends to others are performed for real; nothing else is.
    assert alone["rounds"] <= 3
    assert describe_difference(runs.graph("mocked"), runs.graph("ruled")) is None


def test_one_replica_stands_for_all(runs):
    folded = runs.succeed("folded", "--fold", "dp", "--no-check-replicas", *MOCK)
    assert (folded["folded_ranks"], folded["checked_ranks"]) == (2, [])
    found, full = pt.open(runs.graph("folded")), pt.open(runs.graph("mocked"))
    assert found.header.symmetry == {2: 0, 3: 1}
    assert found.header.groups == full.header.groups
    assert found.nodes.collect().equals(
        full.nodes.filter(pl.col("rank") < 2).collect(), null_equal=True
    )


def test_replicas_that_exchange_tokens_are_not_folded(runs):
    done = runs.collect("wrong", "--fold", "ep", *MOCK)
    assert done.returncode == 1
    assert "all_to_all_single carries data between ranks 0 and 1" in done.stderr
    assert "expert parallelism" in done.stderr


def test_what_no_rule_is_about_is_told_with_the_program_line(runs):
    done = runs.collect("early", "--tensors", "early.toml", *MOCK)
    assert done.returncode == 1
    # What comes after the optimizer has stepped belongs to the next step.
    assert "no rule says what all_reduce gives" in done.stderr
    assert "tiny_moe.py:66 in main" in done.stderr
    assert not runs.graph("early").exists()


def test_plain_data_parallelism_is_folded(runs):
    # DistributedDataParallel looks at what it gathers before there is any inner group.
    program = runs.folder / "ddp.py"
    program.write_text(DDP)
    words = ("--world-size", "6", "--fold", "dp", "-o", "ddp.parquet", "--json", "--", program)
    done = subprocess.run(
        [sys.executable, "-m", "prismreplay.cli", "collect", "--devices", "2", *words],
        cwd=runs.folder, env=runs.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["folded_ranks"], report["checked_ranks"]) == (5, [5])
    found = pt.open(runs.graph("ddp"))
    assert found.header.ranks == (0,)
    assert found.nodes.filter(kind="all_reduce").collect().height >= 2
