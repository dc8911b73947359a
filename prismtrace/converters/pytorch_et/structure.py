"""An execution trace without a profile: the structure of a rank's communication, without times.

A thread's operators between two communications become one node of computation. A communication
waits for what its thread did before it. What a thread does after a ``wait`` waits for the
communication of that number; where no waits are recorded, it waits for every communication.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

import numpy as np
import polars as pl

from prismtrace.converters.chakra.wire import Ints
from prismtrace.converters.dep_lists import lists_by_owner
from prismtrace.converters.inputs import rank_in_name
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.names import collective_kind, dtype_of
from prismtrace.converters.parts import disk_errors
from prismtrace.converters.placing import RankComms
from prismtrace.converters.pytorch_et.reading import CommRecord, Operator, read_execution_trace
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.errors import InputFileError, RankError
from prismtrace.schema import Kind

__all__ = ["convert_execution_trace"]


def convert_execution_trace(
    path: Path, nodes_path: Path, given_rank: int | None = None
) -> RankTrace:
    """Read one file and write its nodes (without group, seq and partner) to `nodes_path`.

    Raises:
        InputFileError: the file cannot be read, or records no communication.
        RankError: nothing tells its rank.
    """
    trace = read_execution_trace(path)
    rank = given_rank if given_rank is not None else rank_in_name(path)
    if rank is None or rank < 0:
        raise RankError(
            "the execution trace does not say which rank it is (no rank in its name)",
            where=str(path),
            hint=f"say it: --rank {quote(path.name)}=N",
        )
    if not trace.records:
        raise InputFileError(
            "the execution trace records no communication",
            where=str(path),
            hint="gloo records none; with NCCL, was the observer active while the job trained?",
        )
    counts: Counter[str] = Counter(trace.counts)
    graph = _Graph(has_waits=any(_waits(operator) for operator in trace.records), counts=counts)
    for operator in trace.operators:
        graph.add(operator)
    graph.end()
    nodes = graph.table()
    with disk_errors(nodes_path.parent.parent):
        nodes.write_parquet(nodes_path, compression="lz4")
    index = np.array(graph.comm_at, dtype=np.int64)
    nothing = np.zeros(len(index), dtype=np.int64)
    return RankTrace(
        path=path,
        rank=rank,
        world_size=trace.world_size,
        host=None,
        groups=trace.groups,
        comms=RankComms(
            rank=rank,
            index=index,
            comm=graph.comms,
            start_ns=nothing,
            end_ns=nothing,
            seq=[None] * len(index),
            comms_id=[None] * len(index),
            step=[None] * len(index),
        ),
        streams=tuple(nodes.get_column("stream").unique(maintain_order=True)),
        steps=(),
        nodes=nodes_path,
        rows=nodes.height,
        counts={name: number for name, number in counts.items() if number},
        source="pytorch-et",
        timed=False,
    )


def _waits(operator: Operator) -> bool:
    return operator.comm is not None and operator.comm.is_wait


@dataclass
class _Graph:
    """Nodes so far."""

    has_waits: bool
    counts: Counter[str]
    kind: list[str] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    stream: list[str] = field(default_factory=list)
    nbytes: list[int | None] = field(default_factory=list)
    dtype: list[str | None] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    dep: list[int] = field(default_factory=list)
    comm_at: list[int] = field(default_factory=list)
    comms: list[CommOp] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)
    """Operators that are counted, or belong to one that is."""
    work: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Thread -> its first operator since its last node, and how many there are."""
    last: dict[str, int] = field(default_factory=dict)
    """Stream -> its last node."""
    waited: dict[int, set[int]] = field(default_factory=dict)
    """Thread -> communications that its next computation waits for."""
    by_number: dict[tuple[str | None, int], int] = field(default_factory=dict)
    """(group, number) and (null, number) -> the communication."""

    def add(self, operator: Operator) -> None:
        """Take in the next operator."""
        comm = operator.comm
        if comm is None:
            nested = operator.parent in self.inside
            # Threads, ranges and the calls of collectives hold others, and are no work.
            if nested or operator.name.startswith("aten::"):
                self.inside.add(operator.id)
            if not nested and operator.name.startswith("aten::"):
                first, count = self.work.get(operator.tid, (operator.name, 0))
                self.work[operator.tid] = first, count + 1
        elif comm.is_wait:
            self._wait(operator.tid, comm)
            self.inside.add(operator.id)
        else:
            self.inside.add(operator.id)
            kind = collective_kind(comm.collective or "")
            if kind is not None:
                self._communicate(operator, comm, kind)

    def _wait(self, thread: int, comm: CommRecord) -> None:
        found = None
        if comm.seq is not None:
            found = self.by_number.get((comm.pg_name, comm.seq))
            if found is None:
                found = self.by_number.get((None, comm.seq))
        if found is None:
            self.counts["wait-for-nothing"] += 1
            return
        self._compute(thread)
        self.waited.setdefault(thread, set()).add(found)

    def _communicate(self, operator: Operator, comm: CommRecord, kind: Kind) -> None:
        thread = operator.tid
        self._compute(thread)
        deps = set(self.waited.get(thread, set()))
        before = self.last.get(f"cpu thread {thread}")
        if before is not None:
            deps.add(before)
        op = _comm_op(comm, kind)
        label = f"communication {comm.pg_name or ''}".rstrip()
        at = self._append(comm.collective or str(kind), kind, label, deps, op)
        self.comm_at.append(at)
        self.comms.append(op)
        if comm.seq is not None:
            self.by_number[comm.pg_name, comm.seq] = self.by_number[None, comm.seq] = at
        if not self.has_waits:
            self.waited.setdefault(thread, set()).add(at)

    def _compute(self, thread: int) -> None:
        """Make a node of what the thread has done since its last one."""
        if thread not in self.work:
            return
        first, count = self.work.pop(thread)
        name = first if count == 1 else f"{first} +{count - 1} operators"
        deps = self.waited.pop(thread, set())
        self._append(name, Kind.COMPUTE, f"cpu thread {thread}", deps, None)

    def _append(self, name: str, kind: Kind, stream: str, deps: set[int], op: CommOp | None) -> int:
        at = len(self.name)
        previous = self.last.get(stream)
        every = deps if previous is None else deps | {previous}
        self.owner += [at] * len(every)
        self.dep += sorted(every, reverse=True)
        self.name.append(name)
        self.kind.append(str(kind))
        self.stream.append(stream)
        self.nbytes.append(None if op is None else op.nbytes)
        self.dtype.append(None if op is None or op.dtype is None else str(op.dtype))
        self.last[stream] = at
        return at

    def end(self) -> None:
        """Nothing comes after."""
        for thread in list(self.work):
            self._compute(thread)

    def table(self) -> pl.DataFrame:
        """Columns of the nodes; `stream` is a label."""
        count = len(self.name)
        owner: Ints = np.array(self.owner, dtype=np.int64)
        distance = (owner - np.array(self.dep, dtype=np.int64)).astype(np.uint32)
        return pl.DataFrame(
            {
                "index": pl.int_range(count, dtype=pl.Int32, eager=True),
                "kind": self.kind,
                "name": self.name,
                "stream": self.stream,
                "step": pl.repeat(None, count, dtype=pl.Int32, eager=True),
                "bytes": pl.Series(self.nbytes, dtype=pl.Int64),
                "dtype": pl.Series(self.dtype, dtype=pl.String),
                "start_ns": pl.repeat(None, count, dtype=pl.Int64, eager=True),
                "dur_ns": pl.repeat(None, count, dtype=pl.Int64, eager=True),
                "deps": lists_by_owner(owner, distance, count),
            }
        )


def _comm_op(comm: CommRecord, kind: Kind) -> CommOp:
    dtype = dtype_of(comm.dtype)
    received = kind in (Kind.ALL_GATHER, Kind.RECV, Kind.GATHER)
    elements = comm.out_nelems if received and comm.out_nelems is not None else comm.in_nelems
    return CommOp(
        kind=kind,
        dtype=dtype,
        nbytes=None if elements is None or dtype is None else elements * dtype.itemsize,
        share=kind is Kind.ALL_GATHER and comm.out_nelems is None,
        group_name=comm.pg_name,
        group_desc=comm.pg_desc,
        group_size=comm.group_size,
        group_peer=comm.rank if kind.is_p2p else None,
    )
