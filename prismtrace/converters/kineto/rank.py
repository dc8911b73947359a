"""One profiler file becomes one rank's nodes, not yet matched with other ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np
import polars as pl

from prismtrace.converters.groups import NamedGroup, united
from prismtrace.converters.inputs import rank_in_name
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
from prismtrace.converters.profile import Profile
from prismtrace.converters.rank_trace import RankFacts, RankOptions, RankTrace, beside_of
from prismtrace.errors import InputFileError, RankError

__all__ = ["convert_rank", "find_rank", "gpu_issued", "refuse_losses", "write_rank"]

_LOST = ("truncated", "damaged-gzip", "dropped-unreadable", "dropped-no-time")
_CUT_SHORT = "the file was cut short or damaged before them: copy it again, whole"


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
    named = rank_in_name(file.path)
    if named is not None:
        return named
    silent = "the file does not say which rank it is (no distributedInfo, no rank in its name)"
    say_it = f"say it: --rank {quote(file.path.name)}=N"
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
    refuse_losses(file, options)
    rank = find_rank(file, given_rank)
    counts: Counter[str] = Counter(file.counts)
    groups = tuple(
        NamedGroup(group.name, group.desc, group.ranks) for group in file.metadata.groups
    )
    beside = beside_of(options.execution_traces, rank)
    if beside is not None:
        from prismtrace.converters.pytorch_et.joining import join

        file, told = join(file, beside, counts)
        groups = united(groups, told.groups)
    ops = _operations(file, options, counts)
    annotate(ops, file, options.step_from, counts)
    found = RankFacts(
        rank=rank,
        world_size=file.metadata.world_size,
        host=file.metadata.host_name,
        clock=file.metadata.host_name,
        groups=groups,
        source="kineto",
    )
    unit = "kernel" if file.has_gpu else "operator"
    return write_rank(file, ops, found, nodes_path, options, counts, unit=unit)


def gpu_issued(profile: Profile, options: RankOptions, counts: Counter[str]) -> IssuedOps:
    """The operations of a profile with GPU events, with dependencies."""
    ops = gpu_operations(profile, counts)
    carried = communications(profile, ops, CommPatterns.parse(options.comm_kernels), counts)
    issued = expand_batches(ops, carried)
    link(issued, profile, counts)
    return issued


def write_rank(
    profile: Profile,
    ops: IssuedOps,
    facts: RankFacts,
    nodes_path: Path,
    options: RankOptions,
    counts: Counter[str],
    *,
    unit: str = "kernel",
) -> RankTrace:
    """Write the nodes of annotated operations to `nodes_path`; `counts` becomes the trace's."""
    extra = profile.events.select("row", *[f"x_arg_{name}" for name in options.keep_args])
    nodes, carried = build_nodes(ops, grain=options.grain, unit=unit, extra=extra)
    with disk_errors(nodes_path.parent.parent):
        nodes.write_parquet(nodes_path, compression="lz4")
    return RankTrace(
        path=profile.path,
        rank=facts.rank,
        world_size=facts.world_size,
        host=facts.host,
        groups=facts.groups,
        comms=_compact(facts, carried, nodes, counts),
        streams=tuple(nodes.get_column("stream").unique(maintain_order=True)),
        steps=tuple(nodes.get_column("step").drop_nulls().unique().sort()),
        nodes=nodes_path,
        rows=nodes.height,
        counts={name: number for name, number in counts.items() if number},
        source=facts.source,
    )


def refuse_losses(file: Profile, options: RankOptions) -> None:
    """Refuse a damaged file unless what can be read of it is wanted.

    Raises:
        InputFileError: events are missing.
    """
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
        return gpu_issued(file, options, counts)
    useless = _why_useless(file)
    if useless is not None:
        raise InputFileError(useless[0], where=str(file.path), hint=useless[1])
    return host_operations(file, counts)


def _why_useless(file: KinetoFile) -> tuple[str, str] | None:
    """What no option can make good, and what to do; None if the file can be used."""
    if file.has_gpu:
        return None
    cut_short = file.counts.get("truncated") or file.counts.get("damaged-gzip")
    if file.events.filter(pl.col("name").str.starts_with("nccl:")).height:
        return (
            "the job communicates over NCCL but the file has no GPU events",
            _CUT_SHORT
            if cut_short
            else "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    if not file.events.filter(pl.col("cat") == "cpu_op").height:
        return (
            "the file has neither GPU events nor CPU operators",
            _CUT_SHORT
            if cut_short
            else "was the profiler's schedule active while the job trained?",
        )
    return None


def _compact(
    facts: RankFacts,
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
        rank=facts.rank,
        index=index,
        comm=[shared.setdefault(comm, comm) for comm in plain],
        start_ns=start,
        end_ns=start + nodes.get_column("dur_ns").to_numpy()[index],
        seq=[comm.seq for _, comm in carried],
        comms_id=[comm.comms_id for _, comm in carried],
        step=steps.gather(index).to_list(),
        host=facts.clock,
    )
