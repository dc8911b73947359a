"""Collect: run every rank of a job on few devices and write its graph down."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prismreplay.collect import stale
from prismreplay.collect.coordinator import Coordinator
from prismreplay.collect.executor import Executor
from prismreplay.collect.gloo_order import FOLD_ORDER
from prismreplay.collect.handover import Place
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.pool import Job, Observed, RankProcess, preload, start_rank
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.scheduling import count_switches, in_turn
from prismreplay.collect.serving import Service
from prismreplay.collect.supplying import Supplier
from prismreplay.errors import ReplayError
from prismreplay.runtime.operations import Op
from prismtrace.errors import PrismError
from prismtrace.output import output_error, writable_target
from prismtrace.recorder import SpanWriter, assemble
from prismtrace.schema import TraceHeader, TraceKind

__all__ = ["CollectOptions", "CollectReport", "Watcher", "collect"]

_RESERVED_FILES = 64
_FILES_PER_RANK = 4


class Watcher(Protocol):
    """Is shown every operation with its inputs, in the order in which they arrive."""

    def see(self, rank: int, op: Op, inputs: Any) -> None:
        """`inputs` is a `prismreplay.collect.handover.Parcel`."""


@dataclass(frozen=True)
class CollectOptions:
    """How to collect.

    Args:
        world_size: ranks of the job.
        devices: devices to run them on.
        per_device: ranks that compute on one device at a time.
        local_world_size: ranks of one host, as the program sees it; None: all.
        log_dir: where the output of ranks goes; None: beside the result.
        shown: ranks whose output is passed on.
        quiet_stdout: pass output on to stderr only.
        shm_dir: folder for the tensors that ranks hand over; None: memory.
        make_supplier: what answers communications without partners; called once ranks run.
        make_watcher: what is shown all communications; called once ranks run.
    """

    world_size: int
    devices: int = 1
    per_device: int = 1
    local_world_size: int | None = None
    log_dir: Path | None = None
    shown: Collection[int] = (0,)
    quiet_stdout: bool = False
    shm_dir: Path | None = None
    make_supplier: Callable[[], Supplier | None] | None = None
    make_watcher: Callable[[], Watcher | None] | None = None

    @property
    def slots(self) -> int:
        """Ranks that compute at a time."""
        return min(self.world_size, self.devices * self.per_device)


@dataclass(frozen=True)
class CollectReport:
    """What was run and written.

    `context_switches` were made; `naive_context_switches` would have been made, on the same
    program, by taking ranks in turn and swapping each out when it blocks (None: too long a
    program to count). `rounds` is the number of turns of the rank that needed most: 1 when every
    rank ran from start to end in one go. `most_running` ranks computed at a time.
    `peak_memory_bytes` counts what all ranks took together, shared pages in parts;
    `rank_memory_bytes` is the largest resident size of one rank, shared pages included.
    `supplied` communications were answered without partners; `unreceived` messages were sent to
    ranks that never received them. Times in seconds; `start_s` is part of `wall_s`.
    """

    output: Path
    world_size: int
    slots: int
    steps: tuple[int, ...]
    nodes: int
    groups: int
    collectives: int
    messages: int
    supplied: int
    unreceived: int
    context_switches: int
    naive_context_switches: int | None
    rounds: int
    most_running: int
    start_s: float
    wall_s: float
    peak_memory_bytes: int
    rank_memory_bytes: int
    log_dir: Path
    policies: dict[str, int] = field(default_factory=dict)
    cleaned: stale.Cleaned = field(default_factory=stale.Cleaned)


def collect(
    program: ProgramCall,
    output: Path,
    options: CollectOptions,
    *,
    progress: Callable[[int, str], None] | None = None,
) -> CollectReport:
    """Run `program` on all ranks and write its bare graph to `output`.

    Call it in a process without other threads: ranks are forked from it.

    Args:
        program: what each rank runs.
        output: the graph; a file that is there is replaced once the run has succeeded.
        options: how.
        progress: told twice a second how many ranks have ended, and what else there is to say.

    Raises:
        ProgramError: the program cannot be started.
        RankFailedError: a rank failed.
        DeadlockError: ranks wait for what never comes.
        MismatchError: communications of two ranks do not fit.
        HandoverError: no space for tensors.
        OutputError: graph or logs cannot be written.
    """
    begun = time.monotonic()
    program.check()
    target = writable_target(output)
    log_dir = options.log_dir or output.with_suffix(".logs")
    logs = RankLogs(log_dir, options.world_size, options.shown, options.quiet_stdout)
    logs.prepare()
    cleaned = stale.clean()
    with _run_folder() as folder:
        job = Job(
            program=program,
            world_size=options.world_size,
            local_world_size=options.local_world_size or options.world_size,
            run=folder.name,
            place=Place(options.shm_dir),
            observe=functools.partial(_observe, folder, options.world_size),
        )
        with os_limit_of_files(options.world_size) as limits:
            run = _Run(job.limited(limits), options, logs, folder)
            run.perform(target, progress)
        made = run.assemble(target)
    turns = run.coordinator.turns
    naive = count_switches(run.coordinator.program, options.slots, in_turn, keep=False)
    return CollectReport(
        output=output,
        world_size=options.world_size,
        slots=options.slots,
        steps=made.steps,
        nodes=made.nodes,
        groups=made.groups,
        collectives=run.coordinator.counts.collectives,
        messages=run.coordinator.counts.messages,
        supplied=run.coordinator.counts.supplied,
        unreceived=run.coordinator.unreceived(),
        context_switches=turns.switches,
        naive_context_switches=naive,
        rounds=max(turns.taken.values(), default=0),
        most_running=turns.most_running,
        start_s=run.started - begun,
        wall_s=time.monotonic() - begun,
        peak_memory_bytes=run.service.memory.peak_bytes,
        rank_memory_bytes=run.service.largest_rank_bytes,
        log_dir=log_dir,
        policies=dict(made.policies),
        cleaned=cleaned,
    )


class _Run:
    """One run, from the first fork to the end of the last rank."""

    def __init__(self, job: Job, options: CollectOptions, logs: RankLogs, folder: Path) -> None:
        self.started = 0.0
        self.coordinator: Coordinator
        self.service: Service
        self._job = job
        self._options = options
        self._logs = logs
        self._folder = folder

    def perform(self, target: Path, progress: Callable[[int, str], None] | None) -> None:
        """Run all ranks to their end; on failure, write what steps they have finished."""
        preload()
        ranks: list[RankProcess] = []
        pipes: list[int] = []
        try:
            for rank in range(self._options.world_size):
                streams, reads = self._logs.open(rank)
                pipes += reads
                ranks.append(start_rank(self._job, rank, streams, self._descriptors(ranks)))
            stale.note_groups(self._folder, [one.pid for one in ranks])
        finally:
            self.coordinator = self._coordinator()
            self.service = Service(self.coordinator, ranks, self._logs, self._ticker(progress))
            self.service.watch_output(pipes)
            self._run_ranks(target, complete=len(ranks) == self._options.world_size)

    def _run_ranks(self, target: Path, *, complete: bool) -> None:
        import torch

        # What belongs to ranks is forked; from here on this process may have threads.
        torch.set_num_threads(1)
        self.started = time.monotonic()
        try:
            if complete:
                self._use_suppliers()
                self.service.run()
        except BaseException:
            with _uninterrupted():
                self.service.stop()
            self._save_finished_steps(target)
            raise
        with _uninterrupted():
            self.service.stop()

    def _coordinator(self) -> Coordinator:
        return Coordinator(
            range(self._options.world_size), self._options.slots, Executor(self._job.place)
        )

    def _use_suppliers(self) -> None:
        """Made only now: they may import what starts threads."""
        options = self._options
        supplier = options.make_supplier() if options.make_supplier else None
        watcher = options.make_watcher() if options.make_watcher else None
        if supplier is not None:
            self.coordinator.use(Executor(self._job.place, supplier))
        if watcher is not None:
            self.coordinator.watch(watcher.see)

    def _ticker(self, progress: Callable[[int, str], None] | None) -> Callable[[int], None] | None:
        if progress is None:
            return None
        counts = self.coordinator.counts

        def tick(ended: int) -> None:
            done = counts.collectives + counts.messages + counts.supplied
            progress(ended, f"{done:,} communications")

        return tick

    def _descriptors(self, ranks: list[RankProcess]) -> list[int]:
        ends = [number for one in ranks for number in (one.channel.fileno(), one.pidfd)]
        return [*ends, *self._logs.descriptors]

    # --- the graph --------------------------------------------------------------------

    def assemble(self, target: Path) -> Any:
        """Write the graph of all ranks."""
        from prismreplay.runtime.axes import axis_of

        return assemble(self._folder, target, header=self._header(), axis_of=axis_of)

    def _header(self) -> TraceHeader:
        from prismtrace import __version__

        return TraceHeader(
            kind=TraceKind.BARE,
            world_size=self._options.world_size,
            ranks=(),
            fold_order=FOLD_ORDER,
            created_by=f"prismreplay collect {__version__}",
            sources=(self._job.program.path,),
        )

    def _save_finished_steps(self, target: Path) -> None:
        """After a failure: the graph of the steps that all ranks have finished, if there are any."""
        partial = target.with_suffix(".partial.parquet")
        try:
            made = self.assemble(partial)
        except (PrismError, OSError):
            return
        if not made.steps or made.missing_ranks:
            partial.unlink(missing_ok=True)
            return
        print(
            f"the {len(made.steps)} steps that all ranks finished are in {partial}", file=sys.stderr
        )


def _observe(folder: Path, world_size: int, rank: int) -> Observed:
    """In a rank: what turns its communications into its graph."""
    from prismreplay.runtime.annotations import make_recorder

    writer = SpanWriter(folder / f"rank{rank}.spool", rank=rank, world_size=world_size)
    recorder = make_recorder(writer)
    return Observed(recorder, finish=recorder.finish, flush=writer.flush)


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    """The folder of this run, named so that a later run can tell whether this one is alive."""
    folder = Path(tempfile.gettempdir()) / stale.run_name()
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise output_error(folder, error.errno or 0) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def os_limit_of_files(world_size: int) -> Iterator[tuple[int, int]]:
    """Allow this process the open files that `world_size` ranks take; yields the old limits.

    Raises:
        ReplayError: the machine does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_PER_RANK * world_size + _RESERVED_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ReplayError(
            f"{world_size} ranks need {wanted} open files; the machine allows {hard}",
            hint="raise the hard limit (ulimit -Hn), or collect a smaller job",
        )
    most = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield soft, hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C away while ranks are ended, which takes a second at most."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def usable_devices() -> int:
    """CPU cores that this process may use: what `--devices` is by default on CPUs."""
    return len(os.sched_getaffinity(0))
