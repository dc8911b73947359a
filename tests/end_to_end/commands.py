"""Commands as a person calls them, and small inputs to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.trace import METADATA_KEY
from tests.prismtrace.kineto_events import ALL_REDUCE, document, launched, metadata


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def assert_refused(done: Done, place: object, *, code: int = 1) -> None:
    """One message with its place and a hint, and nothing else."""
    assert done.code == code, done
    assert done.out == ""
    if code == 2:
        assert str(place) in done.err
        return
    # A warning about the name of the output may come first.
    message, *hint = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert message.startswith("error: ")
    assert "'NoneType' object" not in message
    assert str(place) in message.rpartition(" [")[2]
    assert len(hint) == 1
    assert hint[0].startswith("  hint: ")


def profile(rank: int, shift_us: float = 0, *, world_size: int = 2, **changed: Any) -> Any:
    """Five computations and all-reduces of one rank; `changed` arguments of the latter."""
    return document(
        *(
            launched("gemm", at, at + 3, 5, 100 + i)
            + launched(ALL_REDUCE, at + 4, at + 9, 4, 200 + i, 20, **metadata(), **changed)
            for i, at in enumerate(shift_us + 10.0 * i for i in range(5))
        ),
        rank=rank,
        world_size=world_size,
        groups={"0": [0, 1]},
    )


def write_profiles(folder: Path, *documents: Any) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number}.json" for number in range(len(documents))]
    for path, content in zip(paths, documents, strict=True):
        path.write_text(json.dumps(content))
    return paths


def changed(path: Path, target: Path, edit: Callable[[pl.DataFrame, dict[str, Any]], Any]) -> Path:
    """A copy of a trace after `edit(rows, header)`, which returns rows, header text, or None."""
    header = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    rows = pl.read_parquet(path)
    result = edit(rows, header)
    rows = result if isinstance(result, pl.DataFrame) else rows
    text = result if isinstance(result, str) else json.dumps(header)
    rows.write_parquet(target, metadata={METADATA_KEY: text})
    return target


READERS = {
    "info": ("prismtrace", "info"),
    "validate": ("prismtrace", "validate"),
    "export": ("prismtrace", "export", "-o"),
    "merge": ("prismcalib", "merge", "-o"),
    "critical-path": ("prismcalib", "critical-path"),
    "predict": ("prismcalib", "predict"),
    "check": ("prismcalib", "check"),
}


def words_of(reader: str, trace: Path, out: Path) -> list[object]:
    command, name, *output = READERS[reader]
    return [command, name, trace, *output, *([out] if output else [])]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    module, *rest = map(str, words)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {**streams, "env": environment(), "text": True, **options}
    return subprocess.Popen([sys.executable, "-m", f"{module}.cli", *rest], **options)
