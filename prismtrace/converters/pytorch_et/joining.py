"""An execution trace beside the profile of the same rank: it tells what the profile does not.

The profile has the times. Groups, sizes and numbers of communications come from the execution
trace where the profile says nothing of them; what both say is left as the profile has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import polars as pl

from prismtrace.converters.inputs import rank_in_name
from prismtrace.converters.kineto.reader import KinetoFile
from prismtrace.converters.kineto.records import COMM_SCHEMA
from prismtrace.converters.pytorch_et.reading import ExecutionTrace, Operator, read_execution_trace
from prismtrace.converters.rank_trace import Beside, RankTrace
from prismtrace.converters.sniff import SourceFormat, sniff
from prismtrace.errors import AlignmentError, RankError

__all__ = ["apart", "join", "require_profiles"]

# Columns of a communication that an execution trace can tell, in the order of `_row`.
_TOLD = (
    "collective",
    "dtype",
    "in_nelems",
    "out_nelems",
    "group_size",
    "pg_name",
    "pg_desc",
    "seq",
    "peer",
)


def apart(
    paths: Sequence[Path], given: Mapping[Path, int]
) -> tuple[list[Path], tuple[Beside, ...]]:
    """The inputs to read for themselves, and execution traces that lie beside them.

    Execution traces alone are read for themselves. A lone one beside a lone profile belongs
    to it.

    Args:
        paths: all inputs.
        given: ranks that the user gave files.

    Raises:
        RankError: a file does not tell its rank, or two are of one.
    """
    traces = [path for path in paths if sniff(path) is SourceFormat.PYTORCH_ET]
    others = [path for path in paths if path not in traces]
    if not others:
        return traces, ()
    found: dict[int | None, Beside] = {}
    for path in traces:
        rank = given.get(path, rank_in_name(path))
        if len(traces) == len(others) == 1 and path not in given:
            rank = None
        elif rank is None:
            raise RankError(
                "the execution trace does not say which rank it is (no rank in its name)",
                where=str(path),
                hint=f"say it: --rank {quote(path.name)}=N",
            )
        if rank in found:
            raise RankError(
                f"rank {rank} has two execution traces",
                where=f"{found[rank].path} and {path}",
                hint="give one per rank, or set ranks with --rank FILE=N",
            )
        state = path.stat()
        found[rank] = Beside(rank, str(path), state.st_size, state.st_mtime_ns)
    return others, tuple(found.values())


def require_profiles(traces: Sequence[RankTrace], beside: Sequence[Beside]) -> None:
    """Refuse execution traces beside no profile.

    Raises:
        RankError: there is one.
    """
    profiled = {trace.rank for trace in traces if trace.source == "kineto"}
    for entry in beside:
        if entry.rank not in profiled and (entry.rank is not None or not profiled):
            raise RankError(
                f"the execution trace of rank {entry.rank} lies beside no profiler trace of it"
                if entry.rank is not None
                else "the execution trace lies beside no profiler trace",
                where=entry.path,
                hint="pass the profiler trace of that rank, too, or execution traces only",
            )


def join(file: KinetoFile, path: Path, counts: Counter[str]) -> tuple[KinetoFile, ExecutionTrace]:
    """The profile with what the execution trace at `path` tells of its communications.

    Raises:
        InputFileError: the execution trace cannot be read.
        AlignmentError: it is of another run, for its communications are others.
    """
    trace = read_execution_trace(path)
    profiled = (
        file.events.filter(pl.col("name") == "record_param_comms")
        .select("row", "rf_id", "start_ns")
        .sort("start_ns", "row")
    )
    recorded = trace.records
    pairs = _by_number(profiled, recorded)
    if pairs is None:
        pairs = _by_order(file, profiled, recorded, path)
    counts["joined-execution-trace"] += len(pairs)
    told = pl.DataFrame(
        [_row(row, operator) for row, operator in pairs],
        schema={name: COMM_SCHEMA[name] for name in ("row", *_TOLD)},
        orient="row",
    )
    comms = file.comms.join(
        told, on="row", how="full", coalesce=True, suffix="_told", maintain_order="left_right"
    )
    comms = comms.with_columns(
        pl.coalesce(name, f"{name}_told").alias(name) for name in _TOLD
    ).select(list(COMM_SCHEMA))
    return replace(file, comms=comms.sort("row")), trace


def _row(row: int, operator: Operator) -> tuple[Any, ...]:
    comm = operator.comm
    if comm is None:
        return (row, *(None for _ in _TOLD))
    message = comm.collective in ("send", "recv")
    return (
        row,
        comm.collective,
        comm.dtype,
        comm.in_nelems,
        comm.out_nelems,
        comm.group_size,
        comm.pg_name,
        comm.pg_desc,
        comm.seq,
        comm.rank if message else None,
    )


def _by_number(
    profiled: pl.DataFrame, recorded: Sequence[Operator]
) -> list[tuple[int, Operator]] | None:
    """Pairs of equal ``Record function id`` (torch ≥ 2.4); null if the profile holds none.

    The execution trace may have been recorded for some of the steps only.
    """
    by_number = {operator.rf_id: operator for operator in recorded if operator.rf_id}
    rows = profiled.filter(pl.col("rf_id").fill_null(0) != 0).select("row", "rf_id").rows()
    if not rows:
        return None
    pairs = [(row, by_number[number]) for row, number in rows if number in by_number]
    return pairs or None


def _by_order(
    file: KinetoFile, profiled: pl.DataFrame, recorded: Sequence[Operator], path: Path
) -> list[tuple[int, Operator]]:
    """Pairs by order, where the names that both tell agree."""
    rows = profiled.get_column("row").to_list()
    names = dict(file.comms.select("row", "collective").rows())
    different = sum(
        names.get(row) not in (None, operator.comm.collective)
        for row, operator in zip(rows, recorded, strict=False)
        if operator.comm is not None
    )
    if len(rows) != len(recorded) or different:
        problem = (
            f"{different} of its {len(rows)} communications are others"
            if len(rows) == len(recorded)
            else f"it has {len(recorded)} communications, the profile {len(rows)}"
        )
        raise AlignmentError(
            f"the execution trace is of another run than the profile: {problem}",
            where=f"{path} beside {file.path}",
            hint="record both in one run, over the same steps",
        )
    return list(zip(rows, recorded, strict=True))
