"""Times of communications that somebody measured: logs of nccl-tests, tables of comm-bench.

nccl-tests prints, for one operation after the other, a table of sizes and times.  Its columns
and header lines changed over the years (before 2019 times are in ms, `root` comes and goes, the
name of the test is printed since 2025), so columns are found by their names.  Launchers put
their own text around and in front of it; whatever is no line of the table is skipped.

Everything ends as rows of one shape, `prismcalib.comm_samples.SCHEMA`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from prismcalib.comm_samples import (
    CSV_COLUMNS,
    SCHEMA,
    csv_rows,
    dtype_of,
    finite,
    plain_rows,
    sample_row,
    whole,
)
from prismcalib.errors import CommLogError
from prismtrace.errors import InputFileError
from prismtrace.schema import Kind

__all__ = ["Assumed", "Reading", "bus_factor", "read_comm_log"]

_TESTS = {
    "all_reduce": Kind.ALL_REDUCE,
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "broadcast": Kind.BROADCAST,
    "reduce": Kind.REDUCE,
    "gather": Kind.GATHER,
    "scatter": Kind.SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
    "sendrecv": Kind.SEND,
}
# Of these, the bus bandwidth is the plain one.
_ONE_SENDER = frozenset({Kind.BROADCAST, Kind.REDUCE, Kind.SEND})

_JSON = re.compile(r"\s*(\{|\[\s*[{\]])")
_PREFIX = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+: )")
_NAME = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|broadcast|sendrecv|alltoallv?|hypercube|"
    r"gather|scatter|reduce)_perf"
)
_START = re.compile(r"\bnThread +\d+ +nGpus +\d+\b")
_DEVICE = re.compile(r"^#?\s*Rank +(\d+)(?: +Group +(\d+))?(?: +Pid +\d+)? +on +(\S+) +device +\d+")
_MS_PER_UNIT = {"(us)": 1_000, "(ms)": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What a person says about a log that does not tell.

    Attributes:
        kind: of communication.
        ranks, hosts: how many took part.
    """

    kind: Kind | None = None
    ranks: int | None = None
    hosts: int | None = None


@dataclass(frozen=True, eq=False)
class Reading:
    """Measurements of one file.

    Attributes:
        path: the file.
        samples: columns of `prismcalib.comm_samples.SCHEMA`.
        skipped: lines that were measurements but are not used, by reason.
    """

    path: Path
    samples: pl.DataFrame
    skipped: Mapping[str, int]


@dataclass
class _Run:
    """One table of a log."""

    name: str | None
    devices: list[tuple[int, int, str]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    unit_ns: int = 1_000
    rows: list[dict[str, Any]] = field(default_factory=list)


def read_comm_log(path: str | os.PathLike[str], *, assumed: Assumed | None = None) -> Reading:
    """Read a log of nccl-tests (text or JSON), or a CSV or JSON table of comm-bench.

    Raises:
        InputFileError: the file cannot be read.
        CommLogError: it holds no measurement, does not tell what was measured, or contradicts
            itself; `where` names file and line.
    """
    assumed = assumed or Assumed()
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputFileError(
            f"cannot read the file: {error.strerror or error}",
            where=str(file),
            hint="check the path",
        ) from error
    skipped: Counter[str] = Counter()
    if _JSON.match(text):
        rows = list(_json_rows(text, file, assumed, skipped))
    elif "time_ns" in text.lstrip("\ufeff \n").partition("\n")[0]:
        rows = list(csv_rows(text, file))
    else:
        rows = list(_text_rows(text, file, assumed, skipped))
    if not rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise CommLogError(
            "no measured time found" + (f" ({reasons})" if reasons else ""),
            where=str(file),
            hint="expected is the output of nccl-tests (all_reduce_perf and so on; text, or "
            f"JSON by -J), or a CSV with the columns {', '.join(CSV_COLUMNS)}",
        )
    return Reading(file, pl.DataFrame(rows, schema=SCHEMA), dict(skipped))


# --- text of nccl-tests -----------------------------------------------------------------


def _text_rows(
    text: str, path: Path, assumed: Assumed, skipped: Counter[str]
) -> Iterator[dict[str, Any]]:
    runs = _text_runs(text, path.stem, skipped)
    found = [run for run in runs if run.rows]
    for run in found:
        yield from _finish(run, path, assumed, skipped)


def _text_runs(text: str, file_name: str, skipped: Counter[str]) -> list[_Run]:
    named = _NAME.search(file_name)
    name = named[1] if named else None
    runs = [_Run(name)]
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", raw)
        run = runs[-1]
        if _START.search(line):
            runs.append(_Run(name))
        elif found := _DEVICE.search(line):
            run.devices.append((int(found[1]), int(found[2] or 0), found[3]))
        elif "algbw" in line and line.lstrip().startswith("#"):
            run.columns = line.replace("#", " ", 1).split()
            run.unit_ns = _MS_PER_UNIT["(ms)" if run.columns[0] == "bytes" else "(us)"]
        elif "(us)" in line or "(ms)" in line:
            run.unit_ns = next(ns for unit, ns in _MS_PER_UNIT.items() if unit in line)
        elif run.columns and line.split()[:1] and line.split()[0].isdecimal():
            row = _table_row(line.split(), run.columns)
            if row is None:
                skipped["cut short"] += 1
            else:
                run.rows.append({**row, "line": number})
        elif called := _NAME.search(line):
            name = called[1]
            if not run.rows and not run.columns:
                run.name = name
    return runs


def _table_row(cells: list[str], columns: list[str]) -> dict[str, Any] | None:
    """The cells that matter, by name; those of the in-place half end in _in."""
    wanted = [column for column in columns if column != "timestamp"]
    if len(cells) < len(wanted):
        return None
    row: dict[str, Any] = {}
    for column, cell in zip(wanted, cells, strict=False):
        name = {"bytes": "size", "N": "count", "op": "redop"}.get(column, column)
        name = "wrong" if name in ("#wrong", "error", "res") else name
        row[f"{name}_in" if name in row else name] = cell
    return row


def _finish(
    run: _Run, path: Path, assumed: Assumed, skipped: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Measurements of one table, once everything about it is known."""
    where = f"{path}:{run.rows[0]['line']}"
    if assumed.kind is None and run.name is not None and run.name not in _TESTS:
        skipped[f"of {run.name}_perf, which no operation of a trace is like"] += len(run.rows)
        return
    kind = _kind(run.name, assumed, where)
    ranks, hosts = _spread(run, assumed, where)
    _check_bandwidths(run, kind, ranks, where)
    for row in run.rows:
        place = f"{path}:{row['line']}"
        size, dtype = whole(row["size"], place), dtype_of(row["type"], place)
        if size == 0:
            skipped["of no bytes"] += 1
            continue
        for half, in_place in (("", False), ("_in", True)):
            if "cputime" in row:
                skipped["of the CPU only"] += 1
            elif f"time{half}" not in row:
                continue
            elif _wrong(row.get(f"wrong{half}")):
                skipped["with wrong results"] += 1
            else:
                time = finite(row[f"time{half}"])
                if time is None or not time > 0:
                    skipped["without a time"] += 1
                    continue
                yield sample_row(
                    kind, dtype, ranks, hosts, size, round(time * run.unit_ns), in_place
                )


def _kind(name: str | None, assumed: Assumed, where: str) -> Kind:
    kind = assumed.kind or _TESTS.get(name or "")
    if kind is None:
        raise CommLogError(
            "the log does not name the test",
            where=where,
            hint="say which it was with --kind, e.g. --kind all_reduce",
        )
    return kind


def _spread(run: _Run, assumed: Assumed, where: str) -> tuple[int, int]:
    """Ranks and hosts that took part in one operation."""
    numbers = Counter(rank for rank, _, _ in run.devices)
    if numbers and max(numbers.values()) > 1:
        rank, times = numbers.most_common(1)[0]
        raise CommLogError(
            f"{times} processes call themselves rank {rank}: each ran a test of its own",
            where=where,
            hint="nccl-tests has to be built with MPI=1 to test several processes",
        )
    # With NCCL_TESTS_SPLIT several groups run at once; the table is that of the first.
    first = min(run.devices, default=(0, 0, ""))[1]
    members = [device for device in run.devices if device[1] == first]
    ranks = assumed.ranks or len(members)
    hosts = assumed.hosts or len({host for _, _, host in members})
    if not ranks or not hosts:
        raise CommLogError(
            "the log does not list the devices",
            where=where,
            hint="say how many there were: --ranks 8 --hosts 1",
        )
    if ranks < 2:
        raise CommLogError(
            "the test ran on one device only, so nothing was transferred",
            where=where,
            hint="start it with -g 8, or with one process per device and nccl-tests built "
            "with MPI=1",
        )
    if hosts > ranks:
        raise CommLogError(f"{ranks} ranks cannot be spread over {hosts} hosts", where=where)
    return ranks, hosts


def bus_factor(kind: Kind, ranks: int) -> float:
    """Bytes over the slowest link for one byte of payload, as nccl-tests defines bus bandwidth."""
    if kind in _ONE_SENDER or kind == Kind.RECV:
        return 1.0
    return (2 if kind == Kind.ALL_REDUCE else 1) * (ranks - 1) / ranks


def _check_bandwidths(run: _Run, kind: Kind, ranks: int, where: str) -> None:
    """Bus bandwidth over bandwidth depends on the kind and number of ranks: both are checked."""
    pairs = [(finite(row.get("algbw")), finite(row.get("busbw"))) for row in run.rows]
    # Few digits say too little.
    ratios = sorted(bus / alg for alg, bus in pairs if alg and bus and alg >= 1)
    if not ratios:
        return
    ratio, expected = ratios[len(ratios) // 2], bus_factor(kind, ranks)
    if abs(ratio - expected) > 0.02 * expected:
        raise CommLogError(
            f"the bandwidths are not those of {kind} on {ranks} ranks: bus bandwidth is "
            f"{ratio:.3f} of the algorithm's where {expected:.3f} is due",
            where=where,
            hint="the log was cut or is of another test: name what was run with --kind, --ranks "
            "and --hosts",
        )


def _wrong(cell: Any) -> bool:
    count = finite(cell)
    # Old versions print the largest relative difference instead of a count.
    return count is not None and count >= 1


# --- tables and JSON --------------------------------------------------------------------


def _json_rows(
    text: str, path: Path, assumed: Assumed, skipped: Counter[str]
) -> Iterator[dict[str, Any]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CommLogError(
            f"broken JSON: {error}", where=str(path), hint="was the test interrupted?"
        ) from error
    samples = content.get("samples") if isinstance(content, dict) else content
    if isinstance(samples, list) and all(isinstance(row, dict) for row in samples):
        places = ((f"{path} sample {at}", row) for at, row in enumerate(samples))
        yield from plain_rows(places)
        return
    if not isinstance(content, dict) or not isinstance(content.get("results"), list):
        raise CommLogError("JSON, but not of nccl-tests or comm-bench", where=str(path))
    yield from _finish(_json_run(content, path), path, assumed, skipped)


def _json_run(content: dict[str, Any], path: Path) -> _Run:
    config = content.get("config") or {}
    program = str((content.get("args") or [""])[0])
    called = _NAME.search(program) or _NAME.search(path.stem)
    per_process = int(config.get("nthreads") or 1) * int(config.get("ngpus") or 1)
    run = _Run(called[1] if called else None)
    for device in config.get("devices") or []:
        # Of every process only the first device is listed.
        first = int(device["rank"])
        group, host = int(device.get("group") or 0), str(device.get("hostname"))
        run.devices += [(first + place, group, host) for place in range(per_process)]
    for number, result in enumerate(content["results"], start=1):
        row = {"size": result.get("size"), "type": result.get("type"), "line": f"result {number}"}
        for half, end in (("out_of_place", ""), ("in_place", "_in")):
            part = result.get(half) or {}
            if "cpu_time" in part:
                row["cputime"] = part["cpu_time"]
            if "time" in part:
                row[f"time{end}"] = part["time"]
            row[f"wrong{end}"] = part.get("nwrong")
            row[f"algbw{end}"], row[f"busbw{end}"] = part.get("alg_bw"), part.get("bus_bw")
        run.rows.append(row)
    if not run.rows:
        raise CommLogError("the JSON holds no result", where=str(path))
    return run
