from __future__ import annotations

from pathlib import Path

import polars as pl

from prismtrace.converters.completing import one_after_another


def test_files_in_their_order_whatever_columns_they_have(tmp_path: Path) -> None:
    frames = [{"a": [1]}, {"a": [2]}, {"a": [3], "b": [True]}, {"b": [False], "a": [4]}]
    paths = [tmp_path / f"{number}.parquet" for number in range(len(frames))]
    for path, columns in zip(paths, frames, strict=True):
        pl.DataFrame(columns).write_parquet(path)
    found = one_after_another(paths).collect()
    assert found.rows() == [(1, None), (2, None), (3, True), (4, False)]
    assert one_after_another(paths[:1]).collect().rows() == [(1,)]
