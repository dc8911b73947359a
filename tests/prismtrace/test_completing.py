from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl

from prismtrace.converters.completing import one_after_another

CHILD = Path(__file__).with_name("completing_child.py")
ROWS = 4096


def test_files_in_their_order_whatever_columns_they_have(tmp_path: Path) -> None:
    frames = [{"a": [1]}, {"a": [2]}, {"a": [3], "b": [True]}, {"b": [False], "a": [4]}]
    paths = [tmp_path / f"{number}.parquet" for number in range(len(frames))]
    for path, columns in zip(paths, frames, strict=True):
        pl.DataFrame(columns).write_parquet(path)
    found = one_after_another(paths).collect()
    assert found.rows() == [(1, None), (2, None), (3, True), (4, False)]
    assert one_after_another(paths[:1]).collect().rows() == [(1,)]


def test_the_whole_is_written_in_memory_that_does_not_grow_with_it(tmp_path: Path) -> None:
    """Some row groups are held while they are filled, however many there are."""
    peaks = [_peak(tmp_path, ranks) for ranks in (128, 512)]
    written = pl.read_parquet(tmp_path / "512.parquet", columns=["stream"]).to_series()
    assert written.to_list() == [0, 1] * (512 * ROWS // 2)
    # 1.2 times; held as a whole, it was 2.5 times.
    assert peaks[1] < 1.7 * peaks[0]


def _peak(folder: Path, ranks: int) -> int:
    words = [sys.executable, str(CHILD), str(folder), str(ranks), str(ROWS)]
    environment = os.environ | {"POLARS_MAX_THREADS": "2"}
    return int(subprocess.run(words, check=True, env=environment, stdout=subprocess.PIPE).stdout)
