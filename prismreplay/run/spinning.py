"""Named pieces of the program that count as faster or slower than they are, for planning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from prismcalib.predicates import RowPicker
from prismreplay.errors import PlanError
from prismreplay.run.clock import RunClock
from prismreplay.runtime.program_position import ProgramPosition
from prismtrace.schema import Kind
from prismtrace.trace import Trace

__all__ = ["Spin", "paces_of", "spin", "write_paces"]

_FILE = "paces.json"

Spin = tuple[str, float]
"""A predicate over the rows of the graph, and the factor of what it names."""


def paces_of(graph: Trace, sandbox: Sequence[int], spins: Sequence[Spin]) -> dict[str, float]:
    """Factors by the names of the program's ranges.

    Args:
        graph: of the job.
        sandbox: ranks that execute.
        spins: later ones count where several name a piece.

    Raises:
        PredicateError: a predicate is none.
        PlanError: it names no piece of the sandbox ranks' programs.
    """
    if not spins:
        return {}
    rows = graph.nodes.filter(pl.col("rank").is_in(list(sandbox))).collect()
    picker = RowPicker(rows, graph.header)
    paces: dict[str, float] = {}
    for where, factor in spins:
        picked = rows.filter(pl.Series(picker.pick(where)))
        computing = picked.filter(pl.col("kind").cast(pl.String) == Kind.COMPUTE.value)
        # Pieces without a range are called after their phase.
        named = pl.col("name").cast(pl.String) != pl.col("phase").cast(pl.String).fill_null("")
        names = computing.filter(named)["name"].cast(pl.String).drop_nulls().unique().to_list()
        if not names:
            raise PlanError(
                f"--spin {where}: no named piece of the sandbox ranks' programs fits",
                hint="name pieces in the program: with torch.profiler.record_function('attention')",
            )
        paces.update(dict.fromkeys(names, factor))
    return paces


def write_paces(folder: Path, paces: Mapping[str, float]) -> None:
    """Tell the ranks, which read it when they begin."""
    (folder / _FILE).write_text(json.dumps(paces), encoding="utf-8")


def spin(folder: Path, position: ProgramPosition, clock: RunClock) -> None:
    """In a rank: have its clock run at the pace of the range that the program is in."""
    paces: dict[str, float] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    if not paces:
        return
    inside: list[tuple[str, float]] = []
    begin, end = position.begin_range, position.end_range

    def begin_range(name: str) -> None:
        begin(name)
        if name in paces:
            inside.append((name, paces[name]))
            clock.run_at(paces[name])

    def end_range(name: str) -> None:
        for at in range(len(inside) - 1, -1, -1):
            if inside[at][0] == name:
                del inside[at]
                break
        end(name)
        clock.run_at(inside[-1][1] if inside else 1.0)

    changed: Any = position
    changed.begin_range, changed.end_range = begin_range, end_range
