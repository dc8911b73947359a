"""Operations of one rank in issue order: the common form of GPU and CPU traces.

`device` and `host` produce it, `edges` fills in the dependencies, `spans` turns it into
nodes at the wanted grain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import polars as pl

from prismtrace.converters.kineto.carried import CommOp
from prismtrace.schema import Kind, Phase

__all__ = ["IssuedOps", "expand_batches"]


@dataclass
class IssuedOps:
    """Parallel lists, one entry an operation, in issue order.

    A coalesced launch appears as several entries with one `batch` number and equal times.
    """

    name: list[str] = field(default_factory=list)
    kind: list[Kind] = field(default_factory=list)
    stream: list[str] = field(default_factory=list)
    """Label of the stream, e.g. ``stream 7`` or ``thread 0``."""
    start_ns: list[int] = field(default_factory=list)
    dur_ns: list[int] = field(default_factory=list)
    issue_ns: list[int] = field(default_factory=list)
    """When it was issued: its launch, else the launch before it on its stream. Ascending."""
    launch_ns: list[int | None] = field(default_factory=list)
    launch_tid: list[int | None] = field(default_factory=list)
    correlation: list[int | None] = field(default_factory=list)
    nbytes: list[int | None] = field(default_factory=list)
    comm: list[CommOp | None] = field(default_factory=list)
    batch: list[int | None] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    """Row of the source event in `KinetoFile.events`."""
    step: list[int | None] = field(default_factory=list)
    microbatch: list[int | None] = field(default_factory=list)
    phase: list[Phase | None] = field(default_factory=list)
    deps: list[Collection[int]] = field(default_factory=list)
    """Positions that must end before the operation starts, program order included."""

    def __len__(self) -> int:
        return len(self.name)

    def end_ns(self, position: int) -> int:
        """End of an operation."""
        return self.start_ns[position] + self.dur_ns[position]

    def append(
        self,
        *,
        name: str,
        kind: Kind,
        stream: str,
        start_ns: int,
        dur_ns: int,
        row: int,
        issue_ns: int,
        launch_ns: int | None = None,
        launch_tid: int | None = None,
        correlation: int | None = None,
        nbytes: int | None = None,
        comm: CommOp | None = None,
        batch: int | None = None,
    ) -> None:
        """Add an operation at the end; step, microbatch, phase and deps are filled in later."""
        self.name.append(name)
        self.kind.append(kind)
        self.stream.append(stream)
        self.start_ns.append(start_ns)
        self.dur_ns.append(dur_ns)
        self.row.append(row)
        self.issue_ns.append(issue_ns)
        self.launch_ns.append(launch_ns)
        self.launch_tid.append(launch_tid)
        self.correlation.append(correlation)
        self.nbytes.append(nbytes)
        self.comm.append(comm)
        self.batch.append(batch)
        self.step.append(None)
        self.microbatch.append(None)
        self.phase.append(None)
        self.deps.append(())


def expand_batches(ops: pl.DataFrame, comms: Mapping[int, list[CommOp]]) -> IssuedOps:
    """GPU operations as `IssuedOps`; a kernel that carries several operations becomes a batch.

    Args:
        ops: what `gpu_operations` returns.
        comms: what `communications` returns.
    """
    row_of: list[int] = []
    carried: list[CommOp | None] = []
    batch: list[int | None] = []
    batches = 0
    for row in range(ops.height):
        found = comms.get(row)
        if found is None:
            row_of.append(row)
            carried.append(None)
            batch.append(None)
        else:
            row_of += [row] * len(found)
            carried += found
            batch += [batches if len(found) > 1 else None] * len(found)
            batches += len(found) > 1
    rows = ops[row_of] if batches else ops
    crossing = (pl.col("cat") == "gpu_memcpy") & pl.col("name").str.contains("DtoH|HtoD")
    rows = rows.with_columns(crossing=crossing, label=pl.format("stream {}", "stream"))
    local = {True: Kind.MEMCPY, False: Kind.COMPUTE}
    return IssuedOps(
        name=rows["name"].to_list(),
        kind=[
            local[copy] if comm is None else comm.kind
            for copy, comm in zip(rows["crossing"], carried, strict=True)
        ],
        stream=rows["label"].to_list(),
        start_ns=rows["start_ns"].to_list(),
        dur_ns=rows["dur_ns"].to_list(),
        issue_ns=rows["issue_ns"].to_list(),
        launch_ns=rows["launch_ns"].to_list(),
        launch_tid=rows["launch_tid"].to_list(),
        correlation=rows["correlation"].to_list(),
        nbytes=[
            own if comm is None else comm.nbytes
            for own, comm in zip(rows["bytes"], carried, strict=True)
        ],
        comm=carried,
        batch=batch,
        row=rows["row"].to_list(),
        step=[None] * rows.height,
        microbatch=[None] * rows.height,
        phase=[None] * rows.height,
        deps=[()] * rows.height,
    )
