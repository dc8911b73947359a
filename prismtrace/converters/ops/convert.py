"""`convert` for operation-level logs: Parquet or CSV, any number of ranks and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from prismtrace import __version__
from prismtrace.converters.ops.cutting import threads
from prismtrace.converters.ops.instances import Instances, match_operations
from prismtrace.converters.ops.linking import STREAMS, Links, link_operations
from prismtrace.converters.ops.mapping import load_mapping
from prismtrace.converters.ops.reading import Operations, read_operations
from prismtrace.converters.parts import disk_errors
from prismtrace.errors import ValidationError
from prismtrace.input_files import PathLike
from prismtrace.output import refuse_inputs
from prismtrace.ranks import format_ranks
from prismtrace.schema import (
    ClockDomain,
    TraceHeader,
    TraceKind,
    TransferSource,
)
from prismtrace.trace import Trace, node_ids, node_schema, write_nodes

if TYPE_CHECKING:
    from prismtrace.converters.pipeline import ConvertReport

__all__ = ["convert_operations", "operations_trace"]


def convert_operations(
    paths: Sequence[Path],
    output: PathLike,
    *,
    mapping: PathLike | None = None,
    strict: bool = False,
    skipped: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Convert the operation-level log of a job; see `prismtrace.converters.convert`.

    `skipped` files beside it, of other programs, were left out.
    """
    from prismtrace.converters.pipeline import ConvertReport

    target = Path(output)
    refuse_inputs(target, [*paths, mapping])
    trace, counts, matched = operations_trace(paths, mapping=mapping, skipped=skipped)
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
    paths: Sequence[Path], *, mapping: PathLike | None = None, skipped: int = 0
) -> tuple[Trace, Counter[str], dict[str, int]]:
    """The trace of a log in memory, counts of rows, edges and assumptions, matched instances.

    Raises:
        TraceError: the log, or the file of the mapping, cannot be used.
    """
    rules = load_mapping(mapping)
    operations = read_operations(paths, rules)
    parts = operations.parts()
    with threads() as pool:
        # Matching is across ranks, linking within them: neither needs the other.
        matching = pool.submit(match_operations, operations)
        links = list(pool.map(link_operations, parts))
        instances = matching.result()
    counts = sum((found.counts for found in links), Counter(rows=operations.rows))
    counts["skipped-json"] = skipped
    header = _header(paths, operations, instances, counts)
    return (
        Trace(header=header, nodes=_lazy_nodes(parts, links, instances)),
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
        "skipped-json": counts["skipped-json"],
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


def _lazy_nodes(
    parts: Sequence[Operations], links: Sequence[Links], instances: Instances
) -> pl.LazyFrame:
    """The node table, of which one part after the other is made when it is read."""
    batches = np.cumsum([0, *(found.batches for found in links)]).tolist()

    def read(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        for part, found, batch in zip(parts, links, batches, strict=False):
            nodes = _nodes(part, found, batch, instances)
            if predicate is not None:
                nodes = nodes.filter(predicate)
            if rows is not None:
                nodes = nodes.head(rows)
                rows -= nodes.height
            yield nodes if columns is None else nodes.select(columns)

    return register_io_source(read, schema=node_schema())


def _nodes(part: Operations, links: Links, batch: int, instances: Instances) -> pl.DataFrame:
    """Rows of a part, whose coalesced launches are numbered from `batch`."""
    schema = node_schema()
    begin, end = part.row, part.row + part.rows
    rank = part.ranks[part.segment]
    first = part.begins[:: len(part.steps)]
    index = np.arange(begin, end) - first[rank]
    code = pl.col("operation").cast(pl.UInt32)

    def by_operation(name: str, values: Sequence[str]) -> pl.Expr:
        return pl.lit(pl.Series(name, values, dtype=schema[name])).gather(code).alias(name)

    def optional(name: str) -> pl.Expr:
        narrow = pl.col(name).cast(schema[name])
        return pl.when(narrow >= 0).then(narrow)

    source = pl.lit(TransferSource.MEASURED.value).cast(schema["transfer_source"])
    columns = {
        "operation": part.operation,
        "rank": rank,
        "index": index,
        "stream": links.stream,
        "batch": links.batch,
        "step": part.segment % np.int32(len(part.steps)),
        "microbatch": part.microbatch,
        "chunk": part.chunk,
        "start_ns": part.start_ns,
        "end_ns": part.end_ns,
        "deps": pl.Series(links.deps).cast(pl.List(pl.UInt32)),
        "dep_count": links.dep_count,
        **instances.columns(begin, end),
    }
    number = pl.Series(part.steps).cast(schema["step"])
    known = {
        "id": node_ids(pl.col("rank"), pl.col("index")),
        "rank": pl.col("rank"),
        "index": pl.col("index").cast(schema["index"]),
        "kind": by_operation("kind", [rule.kind.value for rule in part.rules]),
        "name": by_operation("name", part.names),
        "stream": pl.col("stream").cast(schema["stream"]),
        "step": pl.lit(number).gather(pl.col("step")),
        "phase": by_operation("phase", [rule.phase.value for rule in part.rules]),
        "start_ns": pl.col("start_ns"),
        "dur_ns": pl.col("end_ns") - pl.col("start_ns"),
        "transfer_source": pl.when(pl.col("transfer_ns") >= 0).then(source),
        "real": pl.lit(value=True),
        "deps": pl.col("deps").list.head("dep_count"),
    }
    for name in ("batch", "microbatch", "group", "seq", "peer", "transfer_ns"):
        known[name] = optional(name)
    known["batch"] += pl.lit(batch, dtype=schema["batch"])
    if part.has_chunks:
        known["chunk"] = pl.col("chunk").cast(schema["chunk"])
    return pl.DataFrame(columns).select(
        known.get(name, pl.lit(None, dtype=dtype)).alias(name) for name, dtype in schema.items()
    )
