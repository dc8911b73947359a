"""Made-up jobs, and the operations that their programs make."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

import prismcalib
import prismtrace as pt
from prismcalib import synth
from prismreplay.plan import OpKey
from prismreplay.runtime.operations import Call, Group, Op
from prismtrace.schema import LOCAL_KINDS


def job(steps: int = 3, **options) -> pt.Trace:
    """A calibrated job of two stages, two replicas and two tensor-parallel ranks."""
    steady = {"jitter": 0.0, "step_jitter": 0.0, "comm_jitter": 0.0, "moe_imbalance": 0.0}
    spec = synth.JobSpec(
        **{"pp": 2, "tp": 2, "dp": 2, "microbatches": 2, "layers_per_stage": 1, **options},
        **steady,
        end_spread_ns=0,
        steps=steps,
    )
    return prismcalib.merge(synth.generate(spec)).trace


PLANNED = [
    {"microbatches": 4, "layers_per_stage": 2, **shape}
    for shape in (
        {},
        {"pp": 4, "tp": 1, "dp": 2},
        {"pp": 2, "schedule": "interleaved", "chunks": 2, "layers_per_stage": 4},
        {"pp": 1, "tp": 2, "dp": 4, "ep": 2},
    )
]
"""Shapes of jobs for which plans are made."""


def operations(trace: pt.Trace, sandbox: list[int]) -> list[tuple[int, OpKey, int, int]]:
    """(arrival, key, rank, ready) of the communications of some ranks, in time order."""
    rows = trace.collect().filter(pl.col("rank").is_in(sandbox) & pl.col("seq").is_not_null())
    found = []
    for row in rows.iter_rows(named=True):
        sender = receiver = -1
        if row["kind"] in ("send", "recv"):
            ends = (row["rank"], row["peer"])
            sender, receiver = ends if row["kind"] == "send" else ends[::-1]
        key = OpKey(row["group"], row["seq"], sender, receiver)
        found.append((row["start_ns"], key, row["rank"], row["start_ns"] + row["wait_ns"]))
    return sorted(found)


def program(trace: pt.Trace, rank: int) -> Iterator[tuple[dict, Op]]:
    """Rows of the communications of a rank in order, with the operations behind them."""
    local = [kind.value for kind in LOCAL_KINDS]
    rows = trace.collect().filter((pl.col("rank") == rank) & ~pl.col("kind").is_in(local))
    for row in rows.sort("index").iter_rows(named=True):
        yield row, operation(trace, row)


def operation(trace: pt.Trace, row: dict, **changed) -> Op:
    """What a program calls to make a row of the graph."""
    found = next(group for group in trace.header.groups if group.id == row["group"])
    group = Group(found.name, tuple(found.ranks), found.ranks.index(row["rank"]), "nccl")
    message = row["kind"] in ("send", "recv")
    return Op(
        **{
            "call": Call(row["kind"]),
            "group": group,
            "seq": row["seq"],
            "inputs": (),
            "outputs": (),
            "payload_bytes": row["bytes"] or 0,
            "peer": row["peer"] if message else None,
            "root": None if message else row["peer"],
            "batch": row["batch"],
            "site": "train.py:7 in main",
            **changed,
        }
    )
