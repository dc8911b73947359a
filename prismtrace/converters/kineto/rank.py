"""One profiler file becomes one rank's nodes, not yet matched with other ranks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.kineto.annotate import annotate
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.device import communications, gpu_operations
from prismtrace.converters.kineto.edges import link
from prismtrace.converters.kineto.host import host_operations
from prismtrace.converters.kineto.issued import IssuedOps, expand_batches
from prismtrace.converters.kineto.names import CommPatterns
from prismtrace.converters.kineto.reader import KinetoFile, read_kineto
from prismtrace.converters.kineto.spans import build_nodes
from prismtrace.converters.parts import disk_errors
from prismtrace.converters.placing import RankComms
from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.errors import InputFileError, RankError

__all__ = ["convert_rank", "find_rank"]

_RANK_IN_NAME = (r"rank[-_]?(\d+)", r"worker[-_]?(\d+)", r"_(\d+)\.json")
_LOST = ("truncated", "damaged-gzip", "dropped-unreadable", "dropped-no-time")


def find_rank(file: KinetoFile, given: int | None) -> int:
    """The file's rank: as given, else from its metadata, else from its name.

    Raises:
        RankError: none of them tells, or the name contradicts itself.
    """
    if given is not None:
        if given < 0:
            raise RankError(f"a rank is not negative: {given}", where=str(file.path))
        return given
    if file.metadata.rank is not None and file.metadata.rank >= 0:
        return file.metadata.rank
    for pattern in _RANK_IN_NAME:
        found = {int(number) for number in re.findall(pattern, file.path.name, re.IGNORECASE)}
        if len(found) == 1:
            return found.pop()
        if found:
            break
    silent = "the file does not say which rank it is (no distributedInfo, no rank in its name)"
    say_it = f"say it: --rank {file.path.name}=N"
    useless = _why_useless(file)
    if useless is not None:
        # Whoever only learned of the rank would look it up in vain.
        problem, remedy = useless
        silent, say_it = f"{problem}; besides, {silent}", f"{remedy}; then, if need be, {say_it}"
    raise RankError(silent, where=str(file.path), hint=say_it)


def convert_rank(
    path: Path,
    nodes_path: Path,
    options: RankOptions,
    given_rank: int | None = None,
) -> RankTrace:
    """Read one file and write its nodes (without group, seq and partner) to `nodes_path`.

    Raises:
        TraceError: the file cannot be read or used; see the subclasses.
    """
    file = read_kineto(path, keep_args=options.keep_args)
    _refuse_losses(file, options)
    rank = find_rank(file, given_rank)
    counts: Counter[str] = Counter(file.counts)
    ops = _operations(file, options, counts)
    annotate(ops, file, options.step_from, counts)
    extra = file.events.select("row", *[f"x_arg_{name}" for name in options.keep_args])
    unit = "kernel" if file.has_gpu else "operator"
    nodes, carried = build_nodes(ops, grain=options.grain, unit=unit, extra=extra)
    with disk_errors(nodes_path.parent.parent):
        nodes.write_parquet(nodes_path, compression="lz4")
    return RankTrace(
        path=path,
        rank=rank,
        world_size=file.metadata.world_size,
        host=file.metadata.host_name,
        groups=tuple(
            NamedGroup(group.name, group.desc, group.ranks) for group in file.metadata.groups
        ),
        comms=_compact(rank, file.metadata.host_name, carried, nodes, counts),
        streams=tuple(nodes.get_column("stream").unique(maintain_order=True)),
        steps=tuple(nodes.get_column("step").drop_nulls().unique().sort()),
        nodes=nodes_path,
        rows=nodes.height,
        counts={name: number for name, number in counts.items() if number},
    )


def _refuse_losses(file: KinetoFile, options: RankOptions) -> None:
    lost = {name: file.counts[name] for name in _LOST if file.counts.get(name)}
    if lost and not options.recover:
        what = ", ".join(f"{name} {number}" for name, number in lost.items())
        raise InputFileError(
            f"the file is damaged ({what}): events are missing",
            where=str(file.path),
            hint="copy it again, or use what can be read with --recover",
        )


def _operations(file: KinetoFile, options: RankOptions, counts: Counter[str]) -> IssuedOps:
    if file.has_gpu:
        ops = gpu_operations(file, counts)
        carried = communications(file, ops, CommPatterns.parse(options.comm_kernels), counts)
        issued = expand_batches(ops, carried)
        link(issued, file, counts)
        return issued
    useless = _why_useless(file)
    if useless is not None:
        raise InputFileError(useless[0], where=str(file.path), hint=useless[1])
    return host_operations(file, counts)


def _why_useless(file: KinetoFile) -> tuple[str, str] | None:
    """What no option can make good, and what to do; None if the file can be used."""
    if file.has_gpu:
        return None
    if file.events.filter(pl.col("name").str.starts_with("nccl:")).height:
        return (
            "the job communicates over NCCL but the file has no GPU events",
            "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    if not file.events.filter(pl.col("cat") == "cpu_op").height:
        return (
            "the file has neither GPU events nor CPU operators",
            "was the profiler's schedule active while the job trained?",
        )
    return None


def _compact(
    rank: int,
    host: str | None,
    carried: list[tuple[int, CommOp]],
    nodes: pl.DataFrame,
    counts: Counter[str],
) -> RankComms:
    """Communications with equal descriptions shared: matching holds those of all ranks."""
    steps = nodes.get_column("step")
    if counts["assumed-one-step"]:
        # A number that the file does not show must not count against other ranks.
        steps = pl.repeat(None, nodes.height, dtype=pl.Int32, eager=True)
    shared: dict[CommOp, CommOp] = {}
    index = np.array([position for position, _ in carried], dtype=np.int64)
    plain = [replace(comm, seq=None, local_seq=None, comms_id=None) for _, comm in carried]
    start = nodes.get_column("start_ns").to_numpy()[index]
    return RankComms(
        rank=rank,
        index=index,
        comm=[shared.setdefault(comm, comm) for comm in plain],
        start_ns=start,
        end_ns=start + nodes.get_column("dur_ns").to_numpy()[index],
        seq=[comm.seq for _, comm in carried],
        comms_id=[comm.comms_id for _, comm in carried],
        step=steps.gather(index).to_list(),
        host=host,
    )
