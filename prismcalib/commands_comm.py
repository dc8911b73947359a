"""The commands `prismcalib comm-table` and `prismcalib coarsen`, and what `merge` says of costs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismtrace.console import print_json, progress, table

if TYPE_CHECKING:
    from prismcalib.coarsening import CoarsenReport
    from prismcalib.comm_costs import CostReport
    from prismcalib.comm_model import LinkFit
    from prismcalib.estimates import EstimateRange
    from prismtrace.schema import Kind

__all__ = ["coarsen", "comm_table", "print_costs", "print_range"]


def comm_table(
    logs: Annotated[
        list[Path],
        typer.Argument(
            readable=False, help="Output of nccl-tests (text, or JSON by -J), or CSV of comm-bench."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Table to write (.parquet), for merge.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Which operation was tested, where the logs do not say: all_reduce.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Ranks of a test, where the logs list no devices.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Hosts of a test, where the logs list no devices.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Turn logs of nccl-tests into a table that `merge` takes transfer times from.

    Example: prismcalib comm-table all_reduce_perf.log all_gather_perf.log -o table.parquet
    """
    from prismcalib.comm_logs import Assumed
    from prismcalib.comm_model import fit_comm_model
    from prismcalib.comm_table import read_comm_logs
    from prismtrace.output import refuse_inputs

    assumed = Assumed(kind=_kind(kind), ranks=ranks, hosts=hosts)
    with progress("reading logs"):
        times = read_comm_logs(logs, assumed=assumed)
    refuse_inputs(output, logs)
    times.write(output)
    curves, fits = times.curves(), fit_comm_model(times.measured()).fits
    if json:
        print_json(
            {
                "output": str(output),
                "sources": times.sources,
                "skipped": dict(times.skipped),
                "curves": curves.to_dicts(),
                "model": [fit.as_dict() for fit in fits],
            }
        )
        return
    from prismcalib.durations import format_ns

    columns = ("kind", "dtype", "ranks", "hosts", "sizes", "from bytes", "to bytes")
    table(
        f"{output}: {times.times.height} operations measured in {len(times.sources)} files",
        (*columns, "fastest", "slowest"),
        [(*row[:-2], *map(format_ns, row[-2:])) for row in curves.rows()],
    )
    for reason, count in times.skipped.items():
        print(f"not used: {count} lines {reason}")
    print()
    _print_fits(fits)


class GrainName(StrEnum):
    """Values of --grain."""

    EXACT = "exact"
    MICROBATCH = "microbatch"


def coarsen(
    trace: Annotated[
        Path, typer.Argument(readable=False, help="Trace that `prismcalib merge` wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Trace to write (.parquet).")],
    grain: Annotated[
        GrainName,
        typer.Option(
            help="exact: merge rows that nothing from elsewhere separates; all times stay. "
            "microbatch: one computation and one communication for each part of a microbatch "
            "that a group runs by itself; the error is stated."
        ),
    ] = GrainName.EXACT,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Merge rows that need not be told apart: smaller traces, the same timeline.

    Example: prismcalib coarsen aligned.parquet --grain microbatch -o coarse.parquet
    """
    from prismcalib.coarsening import coarsen as coarsen_trace
    from prismtrace.headers import trace_files
    from prismtrace.output import refuse_inputs

    refuse_inputs(output, trace_files(trace))
    with progress("coarsening"):
        result = coarsen_trace(trace, grain=grain.value)
        result.write(output)
    if json:
        print_json({"output": str(output), **result.report.as_dict()})
    else:
        _print_coarse(result.report, output)


def _print_coarse(report: CoarsenReport, output: Path) -> None:
    from prismcalib.durations import format_ns

    sizes = {
        "rows": (report.rows_before, report.rows_after),
        "dependencies": (report.deps_before, report.deps_after),
        "communications": (report.instances_before, report.instances_after),
    }
    table(
        f"{output}: {report.grain} grain",
        ("", "before", "after", "of before"),
        [(name, *pair, f"{pair[1] / max(pair[0], 1):.1%}") for name, pair in sizes.items()],
    )
    print()
    print(f"largest change of any time: {format_ns(report.largest_error_ns)}")
    if report.uneven_ns:
        print(
            f"if ranks arrive otherwise: off by at most {format_ns(report.uneven_ns)} at each "
            "operation that was put together"
        )
    if report.probed_error is not None:
        print(
            f"with one rank's computation a tenth slower, the length is off by at most "
            f"{report.probed_error:.2%} (tried for a few ranks)"
        )


def print_costs(report: CostReport) -> None:
    """Where the transfers of a merge came from that no slice measured."""
    from prismtrace.schema import TransferSource

    lines = [
        ("from the table", report.from_table, ", ".join(report.table) or "none was given"),
        ("from the model", report.from_model, "latency and bandwidth of the links below"),
        ("extrapolated", report.extrapolated, "of these, beyond what was measured"),
        ("other data type", report.other_dtype, "of these, measured with another data type"),
    ]
    lines.append(("kept", report.kept, "estimates of the earlier result, with their doubts"))
    for name, count in report.left.items():
        such = ", such as barriers that no table has" if name == TransferSource.NONE.value else ""
        lines.append((name, count, f"kept as the slices saw them{such}: their error is unknown"))
    table(
        f"transfers that no slice measured, with {report.ranks_per_host} ranks per host",
        ("", "members", "meaning"),
        [line for line in lines if line[1]] or [("none", 0, "every transfer was measured")],
    )
    print()
    if report.from_model:
        _print_fits(report.fits)
        print()


_SOURCE_NAMES = {"none": "transfers that nobody knows"}


def print_range(found: EstimateRange) -> None:
    """How far a predicted step time may be off because of transfers that were not measured."""
    from prismcalib.durations import format_ns
    from prismtrace.schema import TransferSource

    print()
    rests = ", ".join(
        f"{_SOURCE_NAMES.get(name, name)} {share:.1%}"
        for name, share in found.shares.items()
        if share
    )
    if found.low_ns < found.high_ns:
        print(
            f"not all transfers were measured: the step lies between {format_ns(found.low_ns)} and "
            f"{format_ns(found.high_ns)}"
        )
    else:
        print("not all transfers were measured, and nothing tells how far the step is off")
    print(f"share of the critical path that rests on estimates: {rests or '0.0%'}")
    for name, share in found.unknown.items():
        if name == TransferSource.NONE.value:
            print(
                f"transfers of source {name} are taken as they were seen, {share:.1%} of the path: "
                "what they really take is not in the step time"
            )
        else:
            print(f"how far {name} is off nobody knows: {share:.1%} of the path is taken as it is")


def _print_fits(fits: tuple[LinkFit, ...]) -> None:
    from prismcalib.durations import format_ns

    if not fits:
        print(
            "latency and bandwidth are unknown: no class of links has three operations of two sizes"
        )
        return
    table(
        "latency and bandwidth that explain the measured times",
        (
            "links",
            "kind",
            "form",
            "latency of a step",
            "GB/s",
            "off by (rms)",
            "at most",
            "samples",
        ),
        [
            (
                fit.link,
                fit.kind or "all",
                fit.form,
                format_ns(round(fit.alpha_ns)),
                "unknown" if fit.gb_per_s is None else fit.gb_per_s,
                f"{fit.residual:.1%}",
                f"{fit.error:.1%}",
                fit.samples,
            )
            for fit in fits
        ],
    )
    if any(fit.gb_per_s is None for fit in fits):
        print(
            "GB/s unknown: times do not grow with the bytes, so nothing tells what larger operations "
            "than those measured take; measure larger ones (`prismreplay comm-bench`, then --comm-table)"
        )


def _kind(name: str | None) -> Kind | None:
    from prismtrace.schema import Kind

    if name is None:
        return None
    known = [kind.value for kind in Kind if kind.is_communication]
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--kind")
    return Kind(name)
