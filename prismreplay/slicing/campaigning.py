"""A slicing campaign: all slices of a job, round by round, several at once where there is room."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prismreplay.collect import stale
from prismreplay.collect.gpus import Nvml, find_gpus, ran_on_cpus
from prismreplay.collect.programs import ProgramCall
from prismreplay.errors import SliceError
from prismreplay.slicing.cutting import cut_to_steps
from prismreplay.slicing.fingerprint import fingerprint_of
from prismreplay.slicing.placing import Places, gpu_places, places_of
from prismreplay.slicing.progress import Execution, executions, look, make_room
from prismreplay.slicing.rotation import rotate, ties_of, whole_groups
from prismreplay.slicing.settling import Round, difference
from prismreplay.slicing.task import SliceOutcome, SliceTask
from prismreplay.slicing.workers import Nursery, Worker
from prismreplay.tensors.choices import TensorChoices
from prismtrace.claiming import Claim
from prismtrace.output import output_error, refuse_inputs
from prismtrace.schema import TraceKind
from prismtrace.trace import Trace, open_trace

__all__ = ["Progress", "SliceOptions", "SlicingReport", "slice_job"]

Progress = Callable[[int, int, str], None]
"""Told how many executions are done, of how many, and what else there is to say."""


@dataclass(frozen=True)
class SliceOptions:
    """How to slice.

    Attributes:
        graph: the bare graph, as `collect` wrote it.
        sandbox_size: ranks that are real at a time.
        devices: on CPUs the cores to use; a slice takes one for each of its ranks and assistants
            and one for the emulator. Where there are GPUs, how many; a slice takes one for each rank.
        tensors: what virtual ranks send.
        repeats: executions of every slice.
        refine: rounds after the first at most, in which virtual ranks arrive when the round
            before says.
        tolerance: durations that change by this share or less have settled.
        warmup: first steps that are not typical, when rounds are compared.
        steps: first and last step to keep; None: all.
        only: run this slice again and no other.
        local_world_size: ranks of one host, as the program sees it; None: all.
        shown: ranks whose output is passed on.
        quiet_stdout: pass it on to stderr only.
        shm_dir: folder for tensors that ranks hand over; None: memory.
        comm_table: what communication with virtual ranks takes of a rank's own processor
            (`prismreplay.run.contention`), None: nothing; and for merging between rounds.
        ranks_per_host: for merging between rounds, see `prismcalib merge`.
        assistants: processes of each slice that play virtual ranks in real groups with the real
            ones (`prismreplay.run.reduced`).
    """

    graph: Path
    sandbox_size: int
    devices: int | None = None
    tensors: TensorChoices = field(default_factory=TensorChoices)
    repeats: int = 1
    refine: int = 0
    tolerance: float = 0.02
    warmup: int = 1
    steps: tuple[int, int] | None = None
    only: int | None = None
    local_world_size: int | None = None
    shown: tuple[int, ...] = ()
    quiet_stdout: bool = False
    shm_dir: Path | None = None
    comm_table: Path | None = None
    ranks_per_host: int | None = None
    assistants: int = 0


@dataclass(frozen=True)
class SlicingReport:
    """What a campaign did.

    Attributes:
        folder: where the slices are.
        graph: the bare graph that they fit: the job's own, or the part of it that was kept.
        world_size: ranks of the job.
        slices: the ranks of each.
        at_once: how many ran at a time.
        assistants: processes of each that played virtual ranks in real groups.
        timing_true: whether everybody had a core to itself.
        ran, kept: executions that were made now, and before an interruption.
        replaced: files of other jobs that were removed, with what differs.
        whole_groups: process groups that were measured as a whole.
        split_groups: those of which only a part was real at a time.
        outcomes: of the executions that were made now, in the last round.
        rounds: what changed from round to round.
        wall_s: what it took.
    """

    folder: Path
    graph: tuple[Path, ...]
    world_size: int
    slices: tuple[tuple[int, ...], ...]
    at_once: int
    timing_true: bool
    ran: int
    kept: int
    replaced: dict[str, tuple[str, ...]]
    whole_groups: int
    split_groups: int
    outcomes: tuple[SliceOutcome, ...]
    rounds: tuple[Round, ...]
    wall_s: float
    assistants: int = 0

    @property
    def settled(self) -> bool:
        """True when a round changed nothing that counts; also when there was only one."""
        return not self.rounds or self.rounds[-1].settled


def slice_job(
    program: ProgramCall,
    folder: Path,
    options: SliceOptions,
    *,
    perform: Callable[[SliceTask], SliceOutcome],
    prepare: Callable[[], object] = gc.collect,
    progress: Progress | None = None,
) -> SlicingReport:
    """Run all slices of a job that are not there yet.

    Args:
        program: what the ranks run.
        folder: for the slices; made if it is not there.
        options: how.
        perform: runs one slice, in a process of its own.
        prepare: imports what that needs, once.
        progress: told when an execution ends, and every few seconds.

    Raises:
        SliceError: the graph is none, or slice `only` is no part of it, or does not fit others.
        OutputError: the folder cannot be written, or another campaign writes there.
        WorkError: a slice failed, or its ranks did something else than the graph; those that were finished stay.
    """
    begun = time.monotonic()
    program.check()
    # Of a worker that finds it missing all that is known is that it ended.
    import safetensors  # noqa: F401

    stale.clean()
    with Nursery(prepare, perform) as nursery:
        campaign = _Campaign(program, folder, options, nursery, progress or (lambda *_: None))
        rounds = campaign.run()
    return replace(campaign.report(rounds), wall_s=time.monotonic() - begun)


_TELL_SECONDS = 5.0
"""How often progress is told while slices run."""


class _Campaign:
    def __init__(
        self,
        program: ProgramCall,
        folder: Path,
        options: SliceOptions,
        nursery: Nursery,
        progress: Progress,
    ) -> None:
        self._program = program
        self._folder = folder
        self._options = options
        self._nursery = nursery
        self._progress = progress
        self._bare = _bare(options.graph)
        self._rotation = rotate(self._bare.header.ranks, options.sandbox_size, ties_of(self._bare))
        self._wanted = executions(self._rotation, options.repeats)
        self._places = self._find_places()
        self._graph = tuple(self._bare.paths)
        self._outcomes: list[SliceOutcome] = []
        self._ran = self._kept = 0
        self._replaced: dict[str, tuple[str, ...]] = {}
        if options.only is not None and options.only >= len(self._rotation):
            raise SliceError(
                f"there is no slice {options.only}",
                where=f"{len(self._rotation)} slices, from 0",
                hint="slices are numbered as their files are",
            )

    def _find_places(self) -> Places:
        gpus = [gpu.token for gpu in find_gpus(Nvml.load())]
        if gpus and not ran_on_cpus(self._bare.header):
            return gpu_places(self._options.devices, self._rotation, gpus)
        return places_of(self._options.devices, self._rotation, assistants=self._options.assistants)

    def run(self) -> tuple[Round, ...]:
        """All rounds; what changed from one to the next."""
        # Another campaign would make the same slices, and take cores while these are timed.
        with contextlib.closing(Claim(self._folder, shared=self._options.only is not None)):
            return self._rounds()

    def _rounds(self) -> tuple[Round, ...]:
        steps = self._options.steps
        if steps is not None:
            kept = self._folder / "bare.parquet"
            refuse_inputs(kept, self._bare.paths)
            cut_to_steps(self._bare, steps, kept)
            self._graph = (kept,)
        if not self._options.refine:
            self._run_round(self._folder, None, steps)
            return ()
        changes: list[Round] = []
        before = self._timeline(0, None)
        for number in range(1, self._options.refine + 1):
            after = self._timeline(number, before)
            changes.append(difference(before, after, number, self._options.tolerance))
            before = after
            if changes[-1].settled:
                break
        self._publish(self._round_folder(len(changes)))
        return tuple(changes)

    def report(self, rounds: Sequence[Round]) -> SlicingReport:
        """What happened."""
        whole, split = whole_groups(self._rotation, self._bare.header.groups)
        return SlicingReport(
            folder=self._folder,
            graph=self._graph,
            world_size=self._bare.header.world_size,
            slices=self._rotation,
            at_once=self._places.at_once,
            timing_true=self._places.timing_true,
            ran=self._ran,
            kept=self._kept,
            replaced=self._replaced,
            whole_groups=len(whole),
            split_groups=len(split),
            outcomes=tuple(self._outcomes),
            rounds=tuple(rounds),
            wall_s=0.0,
            assistants=self._options.assistants,
        )

    # --- rounds -----------------------------------------------------------------------

    def _round_folder(self, number: int) -> Path:
        return self._folder / "rounds" / str(number)

    def _timeline(self, number: int, arrivals: Path | None) -> Path:
        """Run a round and merge it; the calibrated trace."""
        from prismcalib.merging import merge
        from prismcalib.slices import SliceOptions as MergeOptions

        folder = self._round_folder(number)
        result = folder / "calibrated.parquet"
        # With all steps: what comes later depends on when the virtual ranks began.
        ran = self._run_round(folder, arrivals, None)
        if ran or not result.is_file():
            self._progress(0, 0, f"merging round {number}")
            files = [folder / one.name for one in sorted(self._wanted)]
            options = MergeOptions(
                bare=self._bare,
                warmup=self._options.warmup,
                unfold=bool(self._bare.header.symmetry),
                comm_table=self._options.comm_table,
                ranks_per_host=self._options.ranks_per_host,
            )
            merge(files, slices=options).write(result)
        return result

    def _run_round(self, folder: Path, arrivals: Path | None, steps: tuple[int, int] | None) -> int:
        """Make the executions that are not in `folder`; how many."""
        _make(folder)
        options = self._options
        fingerprint = fingerprint_of(
            self._program,
            self._bare.paths,
            self._rotation,
            local_world_size=self._local_world_size,
            sources=options.tensors.sources,
            steps="all" if steps is None else "{}-{}".format(*steps),
            arrivals=arrivals,
            comm_table=options.comm_table,
            more={
                "routing": repr(options.tensors.routing),
                **({"assistants": str(options.assistants)} if options.assistants else {}),
            },
        )
        found = look(folder, self._wanted, fingerprint)
        self._replaced |= {path.name: unlike for path, unlike in found.foreign.items()}
        if options.only is not None:
            _require_fitting(found.foreign)
            due = [one for one in self._wanted if one.index == options.only]
        else:
            make_room(found)
            due = [one for one in self._wanted if one not in found.finished]
            self._kept += len(found.finished)
        tasks = [self._task(one, folder, fingerprint, arrivals, steps) for one in due]
        self._outcomes = self._run_all(tasks, len(self._wanted) - len(due))
        self._ran += len(tasks)
        return len(tasks)

    def _task(
        self,
        execution: Execution,
        folder: Path,
        fingerprint: dict[str, str],
        arrivals: Path | None,
        steps: tuple[int, int] | None,
    ) -> SliceTask:
        options = self._options
        logs = folder / "logs" / Path(execution.name).stem
        return SliceTask(
            program=self._program,
            execution=execution,
            graph=tuple(self._bare.paths),
            output=folder / execution.name,
            log_dir=logs,
            world_size=self._bare.header.world_size,
            local_world_size=self._local_world_size,
            tensors=options.tensors,
            fingerprint=fingerprint,
            shown=tuple(sorted(set(options.shown) & set(execution.ranks))),
            quiet_stdout=options.quiet_stdout,
            steps=steps,
            arrivals=arrivals,
            shm_dir=options.shm_dir,
            timing_true=self._places.timing_true,
            assistants=options.assistants,
            comm_table=options.comm_table,
        )

    @property
    def _local_world_size(self) -> int:
        return self._options.local_world_size or self._bare.header.world_size

    def _run_all(self, tasks: Sequence[SliceTask], done: int) -> list[SliceOutcome]:
        """Run tasks, as many at once as there is room for; the first failure ends all."""
        outcomes: list[SliceOutcome] = []
        total, waiting = done + len(tasks), list(tasks)
        places = self._places
        rooms = [
            (cores, places.gpus[number] if places.gpus else ())
            for number, cores in enumerate(places.rooms)
        ]
        running: dict[int, tuple[Worker, tuple[tuple[int, ...], tuple[str, ...]]]] = {}
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and rooms:
                    room = rooms.pop(0)
                    task = replace(waiting.pop(0), cores=room[0], gpus=room[1])
                    worker = self._nursery.start(task)
                    running[worker.pipe] = worker, room
                    selector.register(worker, selectors.EVENT_READ)
                names = ", ".join(f"{one.task.execution.index}" for one, _ in running.values())
                self._progress(done + len(outcomes), total, f"slice {names}")
                for key, _ in selector.select(_TELL_SECONDS):
                    worker, room = running.pop(key.fd)
                    selector.unregister(worker)
                    outcomes.append(worker.result())
                    rooms.append(room)
        self._progress(total, total, "done")
        return sorted(outcomes, key=lambda one: (one.index, one.repeat))

    def _publish(self, last: Path) -> None:
        """Show the slices of the last round as the campaign's."""
        for old in self._folder.glob("slice-*.parquet"):
            old.unlink()
        for name in sorted(one.name for one in self._wanted):
            source, target = last / name, self._folder / name
            if self._options.steps is not None:
                cut_to_steps(open_trace(source), self._options.steps, target)
                continue
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)


def _bare(path: Path) -> Trace:
    """The graph to slice.

    Raises:
        SliceError: it is no bare graph.
    """
    trace = open_trace(path)
    if trace.header.kind != TraceKind.BARE:
        raise SliceError(
            f"a {trace.header.kind.value} trace where a bare graph is due",
            where=str(path),
            hint="`prismreplay collect` makes one",
        )
    return trace


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(folder, error.errno or 0) from error


def _require_fitting(foreign: Any) -> None:
    """One slice alone must fit those that stay."""
    for path, unlike in foreign.items():
        raise SliceError(
            f"other slices in the folder were made otherwise ({', '.join(unlike)})",
            where=str(path),
            hint="run all slices again, without --only, or name another folder",
        )
