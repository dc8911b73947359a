"""A slicing campaign on disk: which files there are, whose ranks they hold, what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prismcalib.errors import CoverageError, MergeInputError
from prismcalib.rows import absent_text, groups_lacking, ranks_text
from prismtrace.group_names import group_label
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.trace import PathLike, Trace, open_trace, read_headers, trace_files

__all__ = ["Campaign", "Missing", "Slice", "open_campaign"]

Missing = Literal["fail", "representative", "bare"]
"""What becomes of ranks that no slice measured: refused, times of a rank like them, or none."""


@dataclass(frozen=True)
class Slice:
    """One slice: its executions (repeats), and the ranks that are real in it."""

    index: int
    files: tuple[Path, ...]
    headers: tuple[TraceHeader, ...]
    real_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Campaign:
    """All slices of a job, and how ranks that none of them measured are made up for.

    Attributes:
        header: of the job; taken from the first slice.
        slices: by index.
        bare: the job without times, if given.
        base: an earlier result whose other ranks are kept, if given.
        kept: ranks taken from the base.
        folded: rank -> the rank that stands for it; it gets no rows of its own.
        twins: rank -> measured rank whose durations it gets.
        untimed: ranks taken from the bare graph with durations of 0.
    """

    header: TraceHeader
    slices: tuple[Slice, ...]
    bare: Trace | None = None
    base: Trace | None = None
    kept: tuple[int, ...] = ()
    folded: tuple[tuple[int, int], ...] = ()
    twins: tuple[tuple[int, int], ...] = ()
    untimed: tuple[int, ...] = ()

    @property
    def measured(self) -> frozenset[int]:
        """Ranks that are real in some slice."""
        return frozenset(rank for part in self.slices for rank in part.real_ranks)

    @property
    def place(self) -> dict[int, int]:
        """Folded ranks and what stands for them."""
        return dict(self.folded)


def open_campaign(
    paths: Sequence[PathLike],
    *,
    bare: Trace | PathLike | None = None,
    base: Trace | PathLike | None = None,
    missing: Missing = "fail",
    unfold: bool = False,
) -> Campaign:
    """Read the headers of all files and settle where every rank comes from.

    Ranks that no slice measured are, in this order: kept from the base; folded into the rank
    that the header's `symmetry` names (with `unfold`: given its durations); as `missing` says.

    Raises:
        MergeInputError: the files do not belong to one campaign.
        CoverageError: ranks of the job were measured by no slice.
        InputFileError, SourceFormatError, FormatVersionError, ValidationError: see `open_trace`.
    """
    files = trace_files(list(paths))
    headers = read_headers(files)
    graph_files = [
        path for path, header in zip(files, headers, strict=True) if header.kind == TraceKind.BARE
    ]
    if graph_files and bare is None:
        bare = open_trace(graph_files)
    parts = [
        (path, header)
        for path, header in zip(files, headers, strict=True)
        if header.kind != TraceKind.BARE
    ]
    slices = _group(parts, files)
    header = slices[0].headers[0]
    for part in slices:
        for path, other in zip(part.files, part.headers, strict=True):
            _require_same_job(header, slices[0].files[0], other, path)
    graph = _opened(bare, TraceKind.BARE, header, slices[0].files[0])
    earlier = _opened(base, TraceKind.CALIBRATED, header, slices[0].files[0])
    return _cover(header, slices, graph, earlier, missing, unfold=unfold)


def _group(parts: list[tuple[Path, TraceHeader]], files: Sequence[Path]) -> tuple[Slice, ...]:
    """Slices by index, their repeats by file name; a rank belongs to one slice only.

    `files` are all that were given, for the error text if none of them is a slice.
    """
    by_index: dict[int, list[tuple[Path, TraceHeader]]] = {}
    for path, header in parts:
        if header.kind != TraceKind.SLICE or header.slice is None:
            raise MergeInputError(
                f"a {header.kind} trace among slices",
                where=str(path),
                hint="merge slices with slices: a bare graph goes with --bare, an earlier result "
                "with --base",
            )
        by_index.setdefault(header.slice.index, []).append((path, header))
    if not by_index:
        raise MergeInputError(
            "no slice was given, only the bare graph",
            where=", ".join(str(path) for path in files),
            hint="name the slices too: what `prismreplay slice` wrote for this graph; dumps of a "
            "flight recorder become a recorded trace only with profiles beside them",
        )
    owner: dict[int, Path] = {}
    slices = []
    for index, found in sorted(by_index.items()):
        found.sort(key=lambda item: (item[0].name, os.fspath(item[0])))
        first_path, first = found[0]
        ranks = _real_ranks(first, first_path)
        for path, header in found[1:]:
            if _real_ranks(header, path) != ranks:
                raise MergeInputError(
                    f"two slices have the index {index} but other real ranks: "
                    f"{ranks_text(ranks)} in {first_path}, "
                    f"{ranks_text(_real_ranks(header, path))} in {path}",
                    where=str(path),
                    hint="files with the same index are repeats of one slice; these are of two "
                    "campaigns (`prismreplay slice -o`): merge the folders one by one",
                )
        twice = sorted(set(ranks) & set(owner))
        if twice:
            raise MergeInputError(
                f"ranks {ranks_text(twice)} are real in two slices: {owner[twice[0]].name} and "
                f"{first_path.name}",
                where=str(first_path),
                hint="leave one of them out, or, if they are repeats of one slice, give both the "
                "same slice index",
            )
        owner.update(dict.fromkeys(ranks, first_path))
        slices.append(
            Slice(index, tuple(path for path, _ in found), tuple(h for _, h in found), ranks)
        )
    return tuple(slices)


def _real_ranks(header: TraceHeader, path: Path) -> tuple[int, ...]:
    ranks = tuple(sorted(header.slice.real_ranks)) if header.slice else ()
    if not ranks:
        raise MergeInputError("the slice has no real rank", where=str(path))
    return ranks


def _require_same_job(
    first: TraceHeader, first_path: Path, other: TraceHeader, path: Path | str
) -> None:
    problem = None
    if other.world_size != first.world_size:
        problem = f"worlds of {first.world_size} and {other.world_size} ranks"
    elif other.axes != first.axes:
        problem = f"axes {_axes(first)} and {_axes(other)}"
    elif other.symmetry != first.symmetry:
        problem = "other symmetries"
    elif other.groups is not first.groups and other.groups != first.groups:
        known = {group.id: group for group in first.groups}
        named = [group for group in other.groups if known.get(group.id) != group]
        lost = set(known) - {group.id for group in other.groups}
        odd = named[:1] or [known[number] for number in sorted(lost)[:1]]
        name = group_label(odd[0].name, odd[0].desc, odd[0].ranks) if odd else "in other order"
        problem = f"other process groups (first: {name})"
    if problem is not None:
        raise MergeInputError(
            f"two files belong to different jobs, they have {problem}: "
            f"{first_path.name} and {Path(path).name}",
            where=str(path),
            hint="merge only files of one job",
        )


def _axes(header: TraceHeader) -> str:
    return " ".join(f"{name}={size}" for name, size in header.axes.items()) or "none"


def _opened(
    source: Trace | PathLike | None, kind: TraceKind, header: TraceHeader, first: Path
) -> Trace | None:
    if source is None:
        return None
    trace = source if isinstance(source, Trace) else open_trace(source)
    where = ", ".join(str(path) for path in trace.paths) or f"the {kind} trace"
    if trace.header.kind != kind:
        raise MergeInputError(f"a {trace.header.kind} trace where a {kind} one is due", where=where)
    own = trace.header
    if kind == TraceKind.CALIBRATED and own.symmetry != header.symmetry:
        # A result keeps only the ranks that it folded.
        own = own.model_copy(update={"symmetry": header.symmetry})
    _require_same_job(header, first, own, where)
    return trace


def _cover(
    header: TraceHeader,
    slices: tuple[Slice, ...],
    bare: Trace | None,
    base: Trace | None,
    missing: Missing,
    *,
    unfold: bool,
) -> Campaign:
    """Where the ranks that no slice measured come from."""
    measured = {rank for part in slices for rank in part.real_ranks}
    base_ranks = set() if base is None else set(base.header.ranks)
    kept = sorted(base_ranks - measured)
    have = measured | set(kept)
    symmetry = header.symmetry or {}
    alike = {
        rank: like for rank, like in sorted(symmetry.items()) if rank not in have and like in have
    }
    covered = have | alike.keys()
    if missing == "fail" and len(covered) < header.world_size:
        raise _absent_error(header, covered, measured, len(slices))
    absent = [rank for rank in range(header.world_size) if rank not in covered]
    twins = dict(alike) if unfold else {}
    untimed: list[int] = []
    if absent:
        lacking = set(absent) - (set() if bare is None else set(bare.header.ranks))
        if lacking:
            raise CoverageError(
                f"ranks {ranks_text(lacking)} were measured by no slice, and "
                + ("there is no bare graph to take" if bare is None else "the bare graph lacks")
                + " their rows"
                + (" from" if bare is None else ""),
                hint="give the bare graph of the whole job with --bare",
            )
        if missing == "bare":
            untimed = absent
        elif bare is not None:
            from prismcalib.structure import find_representatives

            twins |= find_representatives(bare, absent, sorted(measured))
    return Campaign(
        header=header,
        slices=slices,
        bare=bare,
        base=base,
        kept=tuple(kept),
        folded=() if unfold else tuple(sorted(alike.items())),
        twins=tuple(sorted(twins.items())),
        untimed=tuple(untimed),
    )


def _absent_error(
    header: TraceHeader, covered: set[int], measured: Iterable[int], slices: int
) -> CoverageError:
    groups = groups_lacking(covered, header)
    return CoverageError(
        f"{len(covered)} of {header.world_size} ranks measured: "
        f"ranks {absent_text(covered, header.world_size)} are real in no slice"
        + (f" (groups {groups})" if groups else ""),
        where=f"{slices} slices, real ranks {ranks_text(measured)}",
        hint="run the slices of these ranks, or say what to take instead with --missing",
    )
