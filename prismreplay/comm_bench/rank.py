"""A rank that `benchmark` starts: ``python -m prismreplay.comm_bench.rank SPEC RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl

from prismreplay.comm_bench.measuring import Measured, take_part
from prismreplay.comm_bench.spec import BenchSpec

__all__ = ["main", "read_result"]

_NOTE = "prismreplay_comm_bench"


def main() -> None:
    """Measure; rank 0 leaves what was found."""
    spec, result = sys.argv[1:]
    measured = take_part(BenchSpec.of_json(spec))
    if measured is not None:
        note = {
            "ranks": measured.ranks,
            "hosts": measured.hosts,
            "skipped": measured.skipped,
        }
        measured.samples.write_parquet(Path(result), metadata={_NOTE: json.dumps(note)})


def read_result(path: Path) -> Measured:
    """What rank 0 has left."""
    note = json.loads(pl.read_parquet_metadata(path)[_NOTE])
    return Measured(pl.read_parquet(path), note["ranks"], note["hosts"], note["skipped"])


if __name__ == "__main__":
    main()
