"""`convert` for operation-level logs: Parquet or CSV, any number of ranks and steps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from prismtrace import __version__
from prismtrace.converters.ops.instances import Instances, match_operations
from prismtrace.converters.ops.linking import STREAMS, Links, link_operations, rows_of_streams
from prismtrace.converters.ops.mapping import load_mapping
from prismtrace.converters.ops.reading import Operations, read_operations
from prismtrace.converters.parts import disk_errors
from prismtrace.errors import ValidationError
from prismtrace.output import refuse_inputs
from prismtrace.ranks import format_ranks
from prismtrace.schema import (
    ClockDomain,
    TraceHeader,
    TraceKind,
    TransferSource,
)
from prismtrace.trace import Trace, conform, node_ids, node_schema, write_nodes

if TYPE_CHECKING:
    from prismtrace.converters.pipeline import ConvertReport

__all__ = ["convert_operations", "operations_trace"]

PathLike = str | os.PathLike[str]


def convert_operations(
    paths: Sequence[Path],
    output: PathLike,
    *,
    mapping: PathLike | None = None,
    strict: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Convert the operation-level log of a job; see `prismtrace.converters.convert`."""
    from prismtrace.converters.pipeline import ConvertReport

    target = Path(output)
    refuse_inputs(target, [*paths, mapping])
    trace, counts, matched = operations_trace(paths, mapping=mapping)
    repairs = trace.header.policies
    if strict and repairs:
        raise ValidationError(
            "--strict: the input needed repairs or assumptions: "
            + ", ".join(f"{name} {number}" for name, number in repairs.items()),
            hint="leave out --strict to accept them; they are counted in the trace's header",
        )
    with disk_errors(target):
        write_nodes(trace.header, trace.nodes, target)
    if progress is not None:
        progress(sum(path.stat().st_size for path in paths))
    return ConvertReport(
        output=target,
        world_size=trace.header.world_size,
        ranks=trace.header.ranks,
        missing_ranks=(),
        nodes=counts["rows"],
        events=counts["rows"],
        groups=len(trace.header.groups),
        steps=trace.header.steps,
        matched=matched,
        edges={
            name.removeprefix("edge-"): number
            for name, number in sorted(counts.items())
            if name.startswith("edge-") and number
        },
        repairs=repairs,
    )


def operations_trace(
    paths: Sequence[Path], *, mapping: PathLike | None = None
) -> tuple[Trace, Counter[str], dict[str, int]]:
    """The trace of a log in memory, counts of rows, edges and assumptions, matched instances.

    Raises:
        TraceError: the log, or the file of the mapping, cannot be used.
    """
    rules = load_mapping(mapping)
    operations = read_operations(paths, rules)
    links = link_operations(operations)
    instances = match_operations(operations, rows_of_streams(operations)[1])
    counts = links.counts
    counts["rows"] = operations.rows
    header = _header(paths, operations, instances, counts)
    nodes = _nodes(operations, links, instances)
    return (
        Trace(header=header, nodes=conform(nodes.lazy(), nodes.schema, where=str(paths[0]))),
        counts,
        {name: number for name, number in instances.matched.items() if number},
    )


def _header(
    paths: Sequence[Path], operations: Operations, instances: Instances, counts: Counter[str]
) -> TraceHeader:
    grid = operations.grid
    numbered = bool((grid.source == np.arange(grid.ranks)).all())
    policies = {
        "ended-before-last-member": instances.early_ends,
        "operations-overlap": counts["operations-overlap"],
        "ranks-renumbered": 0 if numbered else grid.ranks,
    }
    axes = {"pp": grid.pp_size, "dp": grid.dp_size}
    if grid.tp_size > 1:
        axes["tp"] = grid.tp_size
    extra: dict[str, object] = {
        # The names of the nodes say what sort of operation they are; steps are samples.
        "operation_level": True,
        "sampled_steps": operations.sampled,
    }
    if not numbered:
        extra["source_ranks"] = format_ranks(grid.source.tolist())
    return TraceHeader(
        kind=TraceKind.RECORDED,
        world_size=grid.ranks,
        ranks=tuple(range(grid.ranks)),
        axes=axes,
        groups=instances.groups,
        streams=dict(enumerate(STREAMS)),
        # One clock: the log's times were brought together by whoever wrote it.
        clock=(ClockDomain(id=0, ranks=tuple(range(grid.ranks)), source="operation log"),),
        steps=tuple(operations.steps.tolist()),
        created_by=f"prismtrace convert {__version__}",
        sources=tuple(path.name for path in paths),
        policies={name: number for name, number in policies.items() if number},
        extra=extra,
    )


def _nodes(operations: Operations, links: Links, instances: Instances) -> pl.DataFrame:
    schema = node_schema()
    rank = operations.rank
    first = np.searchsorted(rank, np.arange(operations.grid.ranks)).astype(np.int32)
    index = np.arange(operations.rows, dtype=np.int32) - first[rank]
    code = pl.col("operation").cast(pl.UInt32)

    def by_operation(name: str, values: Sequence[str]) -> pl.Expr:
        return pl.lit(pl.Series(name, values, dtype=schema[name])).gather(code).alias(name)

    def optional(name: str) -> pl.Expr:
        narrow = pl.col(name).cast(schema[name])
        return pl.when(narrow >= 0).then(narrow)

    source = pl.lit(TransferSource.MEASURED.value).cast(schema["transfer_source"])
    columns = {
        "operation": operations.operation,
        "rank": rank,
        "index": index,
        "stream": links.stream,
        "batch": links.batch,
        "step": operations.step,
        "microbatch": operations.microbatch,
        "chunk": operations.chunk,
        "group": instances.group,
        "seq": instances.seq,
        "peer": instances.peer,
        "start_ns": operations.start_ns,
        "end_ns": operations.end_ns,
        "transfer_ns": instances.transfer_ns,
        "deps": pl.Series(links.deps).cast(pl.List(pl.UInt32)),
        "dep_count": links.dep_count,
    }
    number = pl.Series(operations.steps).cast(schema["step"])
    return pl.DataFrame(columns).select(
        "rank",
        "index",
        "start_ns",
        id=node_ids(pl.col("rank"), pl.col("index")),
        kind=by_operation("kind", [rule.kind.value for rule in operations.rules]),
        name=by_operation("name", operations.names),
        phase=by_operation("phase", [rule.phase.value for rule in operations.rules]),
        stream=pl.col("stream").cast(schema["stream"]),
        step=pl.lit(number).gather(pl.col("step")),
        batch=optional("batch"),
        microbatch=optional("microbatch"),
        group=optional("group"),
        seq=optional("seq"),
        peer=optional("peer"),
        chunk=pl.col("chunk").cast(schema["chunk"])
        if operations.has_chunks
        else pl.lit(None, dtype=schema["chunk"]),
        dur_ns=pl.col("end_ns") - pl.col("start_ns"),
        transfer_ns=optional("transfer_ns"),
        transfer_source=pl.when(pl.col("transfer_ns") >= 0).then(source),
        real=pl.lit(value=True),
        deps=pl.col("deps").list.head("dep_count"),
    )
