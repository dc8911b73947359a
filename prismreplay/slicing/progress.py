"""Which executions a campaign consists of, and which of them are there already."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prismreplay.errors import SliceError
from prismreplay.slicing.fingerprint import Fingerprint, differences, recorded_fingerprint
from prismtrace.errors import PrismError
from prismtrace.headers import read_header
from prismtrace.output import output_error
from prismtrace.schema import TraceKind

__all__ = ["Execution", "Found", "executions", "look", "make_room"]

_NAME = re.compile(r"slice-(\d{4,})(?:-(\d+))?\.parquet")


@dataclass(frozen=True, order=True)
class Execution:
    """One run of one slice. `repeat` counts from 0."""

    repeat: int
    index: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its file."""
        suffix = f"-{self.repeat}" if self.repeat else ""
        return f"slice-{self.index:04d}{suffix}.parquet"


@dataclass(frozen=True)
class Found:
    """What lies in the folder of a campaign.

    `finished` executions are there; `foreign` files are slices that do not belong to it, with
    what differs.
    """

    finished: tuple[Execution, ...]
    foreign: Mapping[Path, tuple[str, ...]]


def executions(rotation: Sequence[Sequence[int]], repeats: int = 1) -> tuple[Execution, ...]:
    """All executions, in the order in which they are made: all slices once, then again.

    What changes on the machine in the meantime then meets all slices alike.
    """
    return tuple(
        Execution(repeat, index, tuple(ranks))
        for repeat in range(repeats)
        for index, ranks in enumerate(rotation)
    )


def look(folder: Path, wanted: Sequence[Execution], fingerprint: Fingerprint) -> Found:
    """Which of the executions are in `folder`.

    Raises:
        SliceError: something that is no slice bears the name of one.
    """
    by_name = {one.name: one for one in wanted}
    finished, foreign = [], {}
    for path in _slices_in(folder):
        problem = _problem(path, by_name.get(path.name), fingerprint)
        if problem:
            foreign[path] = problem
        elif path.name in by_name:
            finished.append(by_name[path.name])
    return Found(tuple(sorted(finished)), foreign)


def make_room(found: Found) -> None:
    """Remove slices that do not belong to the campaign: merged with it, they would spoil it.

    Raises:
        OutputError: one cannot be removed.
    """
    for path in found.foreign:
        try:
            path.unlink()
        except OSError as error:
            raise output_error(path, error.errno or 0) from error


def _slices_in(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _problem(path: Path, execution: Execution | None, fingerprint: Fingerprint) -> tuple[str, ...]:
    """What keeps a file from being the execution; empty if it is."""
    try:
        header = read_header(path)
    except PrismError as error:
        raise SliceError(
            "a file that is no trace has the name of a slice",
            where=str(path),
            hint="move it away, or name another folder",
        ) from error
    said = recorded_fingerprint(header)
    if header.kind != TraceKind.SLICE or header.slice is None or said is None:
        raise SliceError(
            "a trace that this command did not write has the name of a slice",
            where=str(path),
            hint="move it away, or name another folder",
        )
    unlike = differences(fingerprint, said)
    if unlike:
        return unlike
    if execution is None:
        return ()  # one repeat more than is asked for now
    same = header.slice.index == execution.index and header.slice.real_ranks == execution.ranks
    return () if same else ("rotation",)
