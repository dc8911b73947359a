"""Measure communications with ranks that are started here, or as one of a launcher's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prismreplay.collect.logs import RankLogs
from prismreplay.collect.programs import ProgramCall
from prismreplay.comm_bench.spec import BenchSpec, placements
from prismreplay.errors import RankFailedError
from prismreplay.local_ranks import run_ranks, with_paths
from prismtrace.output import output_error, refusal, writable_target

if TYPE_CHECKING:
    from prismcalib.comm_table import CommTable
    from prismreplay.comm_bench.measuring import Measured

__all__ = ["BenchReport", "bench_communications", "is_launched"]

RANK_MODULE = "prismreplay.comm_bench.rank"


@dataclass(frozen=True, eq=False)
class BenchReport:
    """What was measured and written to `output`."""

    output: Path
    backend: str
    ranks: int
    hosts: int
    table: CommTable
    skipped: dict[str, str]


def is_launched() -> bool:
    """Whether this process is a rank that torchrun, or something like it, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def bench_communications(
    spec: BenchSpec, output: Path, *, ranks: int | None = None
) -> BenchReport | None:
    """Measure and write: a table for `prismcalib merge`, or samples (.csv) for `comm-table`.

    Args:
        spec: what to measure.
        output: .csv, or a table.
        ranks: how many processes to start here. None: this one is a rank of a launcher.

    Returns:
        None on ranks of a launcher other than 0.

    Raises:
        CommBenchError: this machine cannot measure it.
        RankFailedError: a rank failed.
        OutputError: the output cannot be written.
    """
    from prismcalib.comm_logs import Reading
    from prismcalib.comm_samples import write_comm_samples
    from prismcalib.comm_table import CommTable
    from prismreplay.comm_bench.measuring import take_part

    writable_target(output)
    measured = take_part(spec) if ranks is None else _start(spec, ranks, output)
    if measured is None:
        return None
    table = CommTable.of([Reading(output, measured.samples, {})])
    source = f"comm-bench over {spec.backend}, {measured.ranks} ranks on {measured.hosts} host"
    source += "s" * (measured.hosts > 1) + ", beside computation" * spec.computing
    table = replace(table, sources=(source,))
    if output.suffix == ".csv":
        write_comm_samples(output, measured.samples)
    else:
        table.write(output)
    return BenchReport(
        output, spec.backend, measured.ranks, measured.hosts, table, measured.skipped
    )


def _start(spec: BenchSpec, ranks: int, output: Path) -> Measured:
    """Start ranks here, and read what rank 0 leaves."""
    from prismreplay.comm_bench.rank import read_result

    placements(["here"] * ranks, spec.group_sizes)  # what is wrong shows before they start
    folder = output.with_suffix(".ranks")
    result = folder / "result"
    program = ProgramCall(RANK_MODULE, (spec.to_json(), str(result.resolve())), is_module=True)
    logs = RankLogs(folder, ranks, (), errors_only=True)
    logs.prepare()
    try:
        run_ranks(program, ranks, _environment(), logs)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except RankFailedError as error:
        # On a full disk no rank can say why it failed: neither in its result nor in its log.
        number = refusal(result)
        if number is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        raise output_error(output, number) from error
    measured = read_result(result)
    shutil.rmtree(folder)
    return measured


def _environment() -> Mapping[str, str]:
    """As torchrun has it; ranks find this package where this process did."""
    ours = str(Path(__file__).resolve().parents[2])
    return with_paths({"OMP_NUM_THREADS": "1", **os.environ}, ours)
