"""`convert`: profiler files of a job's ranks become one trace.

Two passes. Each file is read once, alone, and leaves its nodes in a temporary Parquet file
beside the output; what stays in memory is one short record per communication. Those are
matched across ranks, then the temporary files are completed and streamed into the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prismtrace import __version__
from prismtrace.converters.archives import naming_members
from prismtrace.converters.completing import complete_nodes
from prismtrace.converters.first_pass import (
    read_files,
    read_kept,
    require_processes,
    traces_by_rank,
)
from prismtrace.converters.flight.resolving import dumps_beside, groups_from_dumps
from prismtrace.converters.groups import GroupBook, groups_among, unlisted
from prismtrace.converters.inputs import PathLike, expand_inputs, given_ranks
from prismtrace.converters.kept import drop_kept, kept_folder
from prismtrace.converters.kineto.annotate import step_pattern
from prismtrace.converters.kineto.events import check_keep_args
from prismtrace.converters.matching import match
from prismtrace.converters.parts import disk_errors, workspace
from prismtrace.converters.pytorch_et.joining import apart, require_profiles
from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.converters.sniff import is_operation_level
from prismtrace.errors import (
    RankError,
    TraceError,
    ValidationError,
)
from prismtrace.output import refuse_inputs, utf8_text
from prismtrace.ranks import MOST_RANKS, name_ranks
from prismtrace.schema import ClockDomain, ProcessGroup, TraceHeader, TraceKind
from prismtrace.trace import write_nodes

__all__ = ["ConvertReport", "convert", "expand_inputs"]

# Counts that tell what was done, not what was wrong.
_INFORMATIVE = (
    "events",
    "kept",
    "outside-steps",
    "assumed-one-step",
    "shared-correlation",
    "coalesced-launch",
    "joined-execution-trace",
    "absent-column",
    "exported-as-local",
)
_INFORMATIVE_PREFIX = ("matched-", "edge-")
# Event kinds that conversion never uses; dropping them is no repair.
_UNUSED = (
    "dropped-flow",
    "dropped-critical-path-flow",
    "dropped-instant",
    "dropped-metadata",
    "dropped-trace-span",
    "dropped-python-function",
    "dropped-gpu-user-annotation",
    "dropped-overhead",
    "dropped-other-category",
    "dropped-other-phase",
    "dropped-unfinished-range",
    "dropped-call-without-kernel",
)

_MOST_STREAMS = 2**15


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did."""

    output: Path
    """The trace."""
    world_size: int
    """Ranks of the job, present or not."""
    ranks: tuple[int, ...]
    """Ranks that have rows."""
    missing_ranks: tuple[int, ...]
    """Ranks of the world that have none."""
    nodes: int
    """Rows of the trace."""
    events: int
    """Events, or lines of a log, that were read."""
    groups: int
    """How many process groups the trace lists."""
    steps: tuple[int, ...]
    """Numbers of the steps in the trace."""
    matched: dict[str, int]
    """How the members of instances found each other: by-comms-id, by-seq, by-order, p2p; or
    `alone`: only one member is in the inputs."""
    edges: dict[str, int]
    """Edges beside program order, by their source."""
    repairs: dict[str, int]
    """Everything that was repaired, dropped or assumed, and how many times."""
    processes: dict[int, str] = field(default_factory=dict)
    """Rank -> which process it is, where a file holds several."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        return {**asdict(self), "output": str(self.output)}


@naming_members()
def convert(
    inputs: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    ranks: Mapping[str, int] | None = None,
    rank_of_pid: Mapping[str, int] | None = None,
    grain: str = "communication",
    jobs: int = 1,
    comm_kernels: Sequence[str] = (),
    keep_args: Sequence[str] = (),
    groups: PathLike | None = None,
    step_from: str = "auto",
    unmatched: str = "refuse",
    recover: bool = False,
    strict: bool = False,
    mapping: PathLike | None = None,
    dask: str | None = None,
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Convert PyTorch profiler traces, one file a rank, or an operation-level log into one trace.

    Args:
        inputs: files, folders or glob patterns. Execution traces of PyTorch beside profiles tell
            groups and sizes that these do not; alone they become a bare trace. So do dumps of the
            flight recorder, which tell the groups of collectives.
        output: the Parquet file to write.
        ranks: file name, path or its end -> rank, for files that do not tell; of an Nsight Systems
            export with several processes the rank of the first.
        rank_of_pid: ``PID`` or ``FILE:PID`` -> rank, for such exports; processes that are not
            named are left out.
        grain: ``communication`` (what a stream computes between communications is one span)
            or ``kernel`` (a node for every kernel and copy).
        jobs: files read at a time, each by a process of its own; 0 means one per core.
        comm_kernels: rules ``REGEX=KIND`` for communication kernels that are not NCCL's.
        keep_args: kernel arguments to keep as columns ``x_arg_…`` (kernel grain).
        groups: JSON file of process groups (name -> ranks) for traces that name none.
        step_from: what marks the steps: ``profilerstep`` (``ProfilerStep#N`` ranges), ``whole``
            (a file is one step), ``auto`` (the former if there, else annotations such as
            ``step 3``, else the latter) or a pattern for names of annotations; its first group,
            if any, is the step's number, otherwise they are counted from 0.
        unmatched: ``refuse`` or ``keep`` communications that fit no group or no partner.
        recover: use what can be read of truncated or damaged files.
        strict: refuse when anything had to be repaired, dropped or assumed.
        mapping: TOML file that says what the columns of an operation-level log (Parquet or CSV)
            mean; of the options above only `strict` concerns such a log.
        dask: address of a Dask scheduler; its workers read the files, which they and the folder
            of `output` have to see under the same paths. The same bytes come out.
        resume: keep what was read of each file beside `output` until the conversion succeeds
            (`dask` does so too), and begin with what an earlier one left of the same files, read
            with the same options.
        progress: called with the number of input bytes done since the last call.

    Returns:
        A report; the trace is at `output`.

    Raises:
        TraceError: an input cannot be used, or ranks do not fit together.
        OutputError: the result cannot be written.
    """
    files = expand_inputs(inputs)
    paths: list[Path] = files
    if mapping is not None or is_operation_level(paths[0]):
        from prismtrace.converters.ops import convert_operations

        return convert_operations(
            paths,
            output,
            mapping=mapping,
            strict=strict,
            skipped=len(files.skipped),
            progress=progress,
        )
    given = given_ranks(paths, ranks or {})
    target = Path(output)
    keep_args = tuple(dict.fromkeys(keep_args))
    _check_options(grain, unmatched, keep_args, step_from)
    processes = tuple(sorted((rank_of_pid or {}).items()))
    refuse_inputs(target, [*paths, groups])
    paths, named = groups_among(paths, groups)
    dumps = dumps_beside(paths)
    paths, beside = apart([path for path in paths if path not in dumps], given)
    options = RankOptions(
        grain,
        step_from,
        tuple(comm_kernels),
        keep_args,
        recover,
        rank_of_pid=processes,
        execution_traces=beside,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(workspace(target))
        parts = folder
        if resume or dask is not None:
            parts = stack.enter_context(kept_folder(target.absolute(), resume=resume))
        tasks = [(path, options, given.get(path)) for path in paths]
        if parts == folder:
            read = read_files(tasks, folder, jobs)
        else:
            read = read_kept(tasks, parts, jobs, dask)
        traces = traces_by_rank(read, paths, progress)
        require_processes(traces, options)
        require_profiles(traces, beside)
        if groups is None:
            named = unlisted(named, [trace.groups for trace in traces])
        world_size = _world_size(traces, named.values())
        counts: Counter[str] = Counter()
        counts["skipped-json"] += len(files.skipped)
        for trace in traces:
            counts.update(trace.counts)
        traces = groups_from_dumps(traces, dumps, given, counts)
        book = GroupBook.build(
            world_size, {trace.rank: trace.groups for trace in traces}, named, counts
        )
        assignments, used = match(
            [trace.comms for trace in traces], book, keep_unmatched=unmatched == "keep"
        )
        repairs = _repairs(counts)
        if strict and repairs:
            raise ValidationError(
                "--strict: the input needed repairs or assumptions: "
                + ", ".join(f"{name} {number}" for name, number in repairs.items()),
                hint="leave out --strict to accept them; they are counted in the trace's header",
            )
        table, ids = book.table(used)
        others = [*sorted(dumps), *(Path(entry.path) for entry in beside)]
        sources = [*dict.fromkeys(trace.path for trace in traces), *others]
        header = _header(traces, sources, world_size, table, counts, repairs)
        streams = {label: number for number, label in header.streams.items()}
        with disk_errors(target):
            whole = complete_nodes(traces, assignments, ids, streams, folder)
            write_nodes(header, whole, target)
    drop_kept(target)
    return _report(target, header, traces, counts, repairs)


def _check_options(grain: str, unmatched: str, keep_args: tuple[str, ...], step_from: str) -> None:
    if grain not in ("communication", "kernel"):
        raise ValueError(f"grain is 'communication' or 'kernel', not {grain!r}")
    if unmatched not in ("refuse", "keep"):
        raise ValueError(f"unmatched is 'refuse' or 'keep', not {unmatched!r}")
    check_keep_args(keep_args)
    if keep_args and grain != "kernel":
        raise TraceError(
            "arguments of kernels can be kept only where every kernel is a node",
            hint="add --grain kernel",
        )
    step_pattern(step_from)


# --- what the job is ---------------------------------------------------------------------


def _world_size(traces: Sequence[RankTrace], groups: Iterable[Sequence[int]]) -> int:
    """Ranks of the job: as the files say, at least as many as any rank or group needs.

    Raises:
        RankError: files disagree, or a rank is outside the world.
    """
    said = {trace.world_size: trace.path for trace in reversed(traces) if trace.world_size}
    if len(said) > 1:
        text = ", ".join(f"{size} in {path.name}" for size, path in sorted(said.items()))
        raise RankError(
            f"files disagree about the world size: {text}",
            where=", ".join(str(path) for _, path in sorted(said.items())[:2]),
            hint="convert the files of one job only",
        )
    highest = max(trace.rank for trace in traces)
    if said:
        (size,) = said
        if size > MOST_RANKS:
            raise RankError(
                f"a world of {size} ranks; at most {MOST_RANKS} are believed",
                where=str(said[size]),
                hint="the file was changed or is damaged: record again",
            )
        if highest >= size:
            worst = next(trace for trace in traces if trace.rank == highest)
            same = [trace.rank for trace in traces if trace.path == worst.path]
            hint = "ranks count from 0; correct it with --rank FILE=N"
            if len(same) > 1:
                hint = (
                    f"the file holds {len(same)} processes, taken for {name_ranks(sorted(same))}: --rank "
                    "FILE=N is the rank of its first; name them one by one with --rank-of-pid PID=N"
                )
            raise RankError(
                f"rank {highest} is outside the world of {size} ranks, which the file tells",
                where=str(worst.path),
                hint=hint,
            )
        return size
    if highest >= MOST_RANKS:
        worst = next(trace for trace in traces if trace.rank == highest)
        raise RankError(
            f"rank {highest}; a job has at most {MOST_RANKS} ranks",
            where=str(worst.path),
            hint="correct it with --rank FILE=N",
        )
    listed = [max(group.ranks) for trace in traces for group in trace.groups if group.ranks]
    partners = [trace.highest_rank for trace in traces]
    size = max([highest, *partners, *listed, *(max(ranks) for ranks in groups if ranks)]) + 1
    if size > MOST_RANKS:
        raise RankError(
            f"a process group has rank {size - 1}; a job has at most {MOST_RANKS} ranks",
            where=", ".join(str(trace.path) for trace in traces[:2]),
            hint="the file was changed or is damaged: record again",
        )
    return size


# --- second pass --------------------------------------------------------------------------


def _header(
    traces: Sequence[RankTrace],
    sources: Sequence[Path],
    world_size: int,
    groups: tuple[ProcessGroup, ...],
    counts: Counter[str],
    repairs: dict[str, int],
) -> TraceHeader:
    labels = sorted({label for trace in traces for label in trace.streams}, key=_natural)
    if len(labels) > _MOST_STREAMS:
        raise ValidationError(
            f"the ranks use {len(labels)} different streams; a trace holds {_MOST_STREAMS}",
            hint="convert fewer ranks at a time",
        )
    informative = {
        name: number for name, number in sorted(counts.items()) if name not in repairs and number
    }
    processes = _processes(traces)
    return TraceHeader(
        kind=TraceKind.RECORDED if any(trace.timed for trace in traces) else TraceKind.BARE,
        world_size=world_size,
        ranks=tuple(trace.rank for trace in traces),
        groups=groups,
        streams=dict(enumerate(labels)),
        clock=_clock_domains(traces),
        steps=tuple(sorted({step for trace in traces for step in trace.steps})),
        created_by=f"prismtrace convert {__version__}",
        sources=tuple(utf8_text(path.name) for path in sources),
        policies=repairs,
        extra={"convert": informative} | ({"processes": processes} if processes else {}),
    )


def _processes(traces: Sequence[RankTrace]) -> dict[int, str]:
    return {trace.rank: utf8_text(trace.process) for trace in traces if trace.process}


def _natural(label: str) -> tuple[str, int]:
    text, _, number = label.rpartition(" ")
    return (text, int(number)) if number.lstrip("-").isdigit() else (label, 0)


def _clock_domains(traces: Sequence[RankTrace]) -> tuple[ClockDomain, ...]:
    """Ranks of one host share its clock, as far as one session timed them; see `RankFacts.clock`.

    A file that does not say stands for itself.
    """
    members: dict[tuple[str | int, str], list[RankTrace]] = {}
    for trace in traces:
        clock = trace.comms.host or trace.rank
        members.setdefault((clock, trace.source), []).append(trace)
    return tuple(
        ClockDomain(
            id=number,
            ranks=tuple(trace.rank for trace in together),
            host=together[0].host,
            source=source,
        )
        for number, ((_, source), together) in enumerate(members.items())
    )


def _repairs(counts: Counter[str]) -> dict[str, int]:
    return {
        name: number
        for name, number in sorted(counts.items())
        if number
        and name not in (*_INFORMATIVE, *_UNUSED)
        and not name.startswith(_INFORMATIVE_PREFIX)
    }


def _report(
    target: Path,
    header: TraceHeader,
    traces: Sequence[RankTrace],
    counts: Counter[str],
    repairs: dict[str, int],
) -> ConvertReport:
    present = set(header.ranks)

    def strip(prefix: str) -> dict[str, int]:
        return {
            name.removeprefix(prefix): number
            for name, number in sorted(counts.items())
            if name.startswith(prefix) and number
        }

    return ConvertReport(
        output=target,
        world_size=header.world_size,
        ranks=header.ranks,
        missing_ranks=tuple(rank for rank in range(header.world_size) if rank not in present),
        nodes=sum(trace.rows for trace in traces),
        events=counts["events"],
        groups=len(header.groups),
        steps=header.steps,
        matched=strip("matched-"),
        edges=strip("edge-"),
        repairs=repairs,
        processes=_processes(traces),
    )
