"""What a slice was made from, in digests: two slices belong to one job when these are equal.

Kept in the header of every slice, so that an interrupted campaign goes on where it stopped, and
never mixes the times of two programs. What the program imports is not looked into.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prismreplay.collect.programs import ProgramCall
from prismreplay.digests import file_digest, files_digest, texts_digest
from prismreplay.tensors.rules import RuleSet
from prismtrace import __version__
from prismtrace.headers import PathLike
from prismtrace.schema import TraceHeader

__all__ = ["KEY", "Fingerprint", "differences", "fingerprint_of", "recorded_fingerprint"]

KEY = "slicing"
"""Name of what a slice's header says under `extra`."""

Fingerprint = Mapping[str, str]
"""What -> its digest, or the thing itself where it is short."""


def fingerprint_of(
    program: ProgramCall,
    graph: Sequence[PathLike],
    rotation: Sequence[Sequence[int]],
    *,
    local_world_size: int,
    sources: Sequence[RuleSet | Path] = (),
    steps: str = "",
    arrivals: PathLike | None = None,
    comm_table: PathLike | None = None,
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What slices of a campaign are made from.

    Args:
        program: what the ranks run.
        graph: files of the bare graph.
        rotation: the ranks of every slice.
        local_world_size: ranks of one host, as the program sees it.
        sources: what virtual ranks send.
        steps: which steps the slices hold, as text.
        arrivals: the calibrated trace that says when virtual ranks arrive.
        comm_table: what communication takes of the ranks' processors.
        more: further things that matter, as short texts.

    Raises:
        InputFileError: a file cannot be read.
    """
    return {
        "program": _program(program),
        "arguments": texts_digest("\0".join(program.arguments)),
        "graph": files_digest(map(Path, graph)),
        "rotation": texts_digest(repr([tuple(part) for part in rotation])),
        "hosts": str(local_world_size),
        "tensors": texts_digest(*(_source(source) for source in sources)),
        "steps": steps,
        "arrivals": "early" if arrivals is None else file_digest(Path(arrivals)),
        "versions": f"prismllm-toolkit {__version__}, torch {_torch()}, python {platform.python_version()}",
        "machine": f"{_processor()} x {os.cpu_count()}",
        **({} if comm_table is None else {"comm_table": file_digest(Path(comm_table))}),
        **(more or {}),
    }


def differences(one: Fingerprint, other: Fingerprint) -> tuple[str, ...]:
    """Names of what differs."""
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def recorded_fingerprint(header: TraceHeader) -> Fingerprint | None:
    """What a slice says that it was made from; None if it was not made by `prismreplay slice`."""
    said = header.extra.get(KEY)
    found = said.get("fingerprint") if isinstance(said, dict) else None
    return found if isinstance(found, dict) else None


def _program(program: ProgramCall) -> str:
    if program.is_module or not Path(program.path).is_file():
        return program.path
    return f"{Path(program.path).name} {file_digest(Path(program.path))}"


def _source(source: RuleSet | Path) -> str:
    """Rules by what they say; recordings by their indices, which hold the tensors' digests."""
    if isinstance(source, RuleSet):
        return repr(source)
    parts = sorted(source.glob("*.json")) + sorted(source.glob("index-*.parquet"))
    return files_digest(parts)


def _torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    """The processor's name, as the kernel tells it."""
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
