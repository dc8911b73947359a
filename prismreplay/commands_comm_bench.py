"""The command `prismreplay comm-bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from prismreplay.command_options import Json
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.comm_bench.benchmark import BenchReport
    from prismreplay.comm_bench.spec import BenchSpec

__all__ = ["comm_bench"]


def comm_bench(
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="A table for `prismcalib merge --comm-table`; with .csv, the samples, which "
            "`prismcalib comm-table` puts together with others.",
        ),
    ] = Path("table.parquet"),
    nproc: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Start so many ranks here. Default: one for every member of the largest group; "
            "without --group-sizes, 2, or one for every GPU. Under a launcher such as torchrun "
            "its ranks take part, and none is started.",
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...",
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send and barrier "
            "by default; reduce, gather and scatter, too.",
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(metavar="FROM-TO|SIZE,...", help="Payloads, as nccl-tests counts them."),
    ] = "1K-64M",
    factor: Annotated[int, typer.Option(min=2, help="From one size of a range to the next.")] = 4,
    group_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Members of groups, each on as few hosts and on as many as there are. Default: "
            "powers of two, and all ranks.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Of the elements, as torch calls it.")
    ] = "float32",
    backend: Annotated[str, typer.Option(metavar="gloo|nccl", help="What communicates.")] = "gloo",
    rounds: Annotated[
        int, typer.Option(min=1, help="Samples of each operation, taken in turns with the others.")
    ] = 5,
    beside_computation: Annotated[
        bool,
        typer.Option(
            "--beside-computation",
            help="Have every rank's program compute until a collective has ended, as in a job. Where "
            "gloo's threads share its cores, both take longer then.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Measure how long communications take here, over the real backend.

    Examples: prismreplay comm-bench --nproc 4 --sizes 1K-16M -o table.parquet

    torchrun --nproc-per-node 8 -m prismreplay.cli comm-bench --backend nccl -o table.parquet
    """
    from prismreplay.comm_bench.benchmark import bench_communications, is_launched
    from prismreplay.errors import RankFailedError

    spec = _spec(kinds, sizes, factor, group_sizes, dtype, backend, rounds)
    if beside_computation and backend != "gloo":
        raise typer.BadParameter("only gloo shares the program's processor: --beside-computation")
    spec = replace(spec, computing=beside_computation)
    ranks = nproc or (None if is_launched() else _usual_ranks(spec))
    try:
        with console.progress("measuring communications", lines=ranks is not None):
            report = bench_communications(spec, output, ranks=ranks)
    except RankFailedError as error:
        if error.report:
            print(error.report, file=sys.stderr)
        raise
    if report is not None:
        _show(report, json=json)


def _spec(
    kinds: str | None,
    sizes: str,
    factor: int,
    group_sizes: str | None,
    dtype: str,
    backend: str,
    rounds: int,
) -> BenchSpec:
    from prismreplay.comm_bench.spec import BACKENDS, KINDS, USUAL_KINDS, BenchSpec, parse_sizes
    from prismtrace.schema import DType, Kind

    if backend not in BACKENDS:
        raise typer.BadParameter(f"{backend!r} is none of {', '.join(BACKENDS)}: --backend")
    if dtype not in list(DType):
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DType)}: --dtype")
    named = [name.strip() for name in kinds.split(",")] if kinds else list(USUAL_KINDS)
    unknown = [name for name in named if name not in KINDS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(KINDS)}: --kinds")
    try:
        wanted = parse_sizes(sizes, factor)
    except ValueError as error:
        raise typer.BadParameter(f"{error}: --sizes") from error
    return BenchSpec(
        kinds=tuple(dict.fromkeys(map(Kind, named))),
        sizes=wanted,
        group_sizes=_members(group_sizes),
        dtype=DType(dtype),
        backend=backend,
        rounds=rounds,
    )


def _members(text: str | None) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(name.isdecimal() and int(name) >= 2 for name in names):
        raise typer.BadParameter(f"{text!r} are no numbers of members such as 2,4: --group-sizes")
    return tuple(map(int, names))


def _usual_ranks(spec: BenchSpec) -> int:
    if spec.group_sizes:
        return max(spec.group_sizes)
    if spec.backend == "nccl":
        import torch

        return max(2, int(torch.cuda.device_count()))
    return 2


def _show(report: BenchReport, *, json: bool) -> None:
    times = report.table.times
    if json:
        console.print_json(
            {
                "output": str(report.output),
                "backend": report.backend,
                "ranks": report.ranks,
                "hosts": report.hosts,
                "operations": times.to_dicts(),
                "skipped": report.skipped,
            }
        )
        return
    from prismcalib.comm_logs import bus_factor
    from prismcalib.durations import format_ns
    from prismtrace.schema import Kind

    rows = [
        (
            row["kind"],
            row["ranks"],
            row["hosts"],
            f"{row['bytes']:,}",
            format_ns(row["time_ns"]),
            f"{format_ns(row['least_ns'])} - {format_ns(row['most_ns'])}",
            f"{row['bytes'] * bus_factor(Kind(row['kind']), row['ranks']) / row['time_ns']:.3f}",
        )
        for row in times.iter_rows(named=True)
    ]
    _print_table(report, rows)
    for kind, reason in report.skipped.items():
        print(f"not measured: {kind}, which {report.backend} cannot do ({reason})")
    if report.output.suffix == ".csv":
        print(f"next: prismcalib comm-table {quote(str(report.output))} -o table.parquet")
    else:
        print(
            f"next: prismcalib merge slices/*.parquet --comm-table {quote(str(report.output))} "
            "--ranks-per-host N -o job.parquet"
        )
    console.announce_output(report.output)


def _print_table(report: BenchReport, rows: Sequence[Sequence[object]]) -> None:
    ranks, hosts = console.counted(report.ranks, "rank"), console.counted(report.hosts, "host")
    console.table(
        f"{report.backend}, {ranks} on {hosts}; times are medians, least and most of "
        "the rounds' medians",
        ("kind", "members", "hosts", "bytes", "time", "least - most", "bus GB/s"),
        rows,
    )
