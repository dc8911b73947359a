"""Collect: run every rank of a job on few devices and write its graph down."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prismreplay.collect import stale
from prismreplay.collect.coordinator import Coordinator, Counts
from prismreplay.collect.executor import Executor
from prismreplay.collect.gloo_order import FOLD_ORDER
from prismreplay.collect.gpu_room import Room, find_room, visible_gpus
from prismreplay.collect.gpu_turns import GpuTurns
from prismreplay.collect.gpus import DEVICES, Nvml, require_cuda_asleep
from prismreplay.collect.handover import Place
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.options import CollectOptions, CollectReport
from prismreplay.collect.pool import Job, Observed, RankProcess, preload, start_rank
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.scheduling import at_home, count_switches, in_turn, thrifty
from prismreplay.collect.scouting import scout
from prismreplay.collect.serving import Service
from prismreplay.collect.surroundings import limit_of_open_files, run_folder, uninterrupted
from prismreplay.collect.swapping import load_checkpoints
from prismreplay.errors import ProgramError
from prismreplay.tensors.choices import Recording
from prismreplay.tensors.folding import Folding, fold
from prismreplay.tensors.recording import RecordingSummary
from prismtrace.errors import PrismError
from prismtrace.output import writable_target
from prismtrace.recorder import SpanWriter, assemble
from prismtrace.schema import ProcessGroup, TraceHeader, TraceKind

__all__ = [
    "CollectOptions",
    "CollectReport",
    "collect",
    "usable_devices",
]


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
        ProgramError: the program cannot be started, or never communicates.
        RankFailedError: a rank failed.
        DeadlockError: ranks wait for what never comes.
        MismatchError: communications of two ranks do not fit.
        HandoverError: no space for tensors.
        OutputError: graph or logs cannot be written.
        SwapError: ranks do not fit on the GPUs, and cannot be moved off them.
    """
    begun = time.monotonic()
    program.check()
    target = writable_target(output)
    log_dir = options.log_dir or output.with_suffix(".logs")
    logs = RankLogs(log_dir, options.world_size, options.shown, options.quiet_stdout)
    logs.prepare()
    cleaned = stale.clean()
    room = find_room(min(options.devices, options.slots), options.gpu_bytes, options.host_bytes)
    with run_folder() as folder:
        job = Job(
            program=program,
            world_size=options.world_size,
            local_world_size=options.local_world_size or options.world_size,
            run=folder.name,
            place=Place(options.shm_dir),
            observe=functools.partial(_observe, folder, options, room is not None),
            mirror_above=options.mirror_above,
            gpus=() if room is None else tuple(gpu.token for gpu in room.gpus),
        )
        with limit_of_open_files(options.world_size) as limits:
            run = _Run(job.limited(limits), options, logs, folder, room)
            run.perform(target, progress)
        _require_communication(run.coordinator.counts, program, log_dir)
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
        recording=run.recorded,
        **run.folded(),
        policies=dict(made.policies),
        cleaned=cleaned,
        gpu=None if run.gpus is None else run.gpus.report,
        mirrored=run.coordinator.counts.mirrored,
    )


def _require_communication(counts: Counts, program: ProgramCall, log_dir: Path) -> None:
    if not counts.communications + counts.mirrored:
        raise ProgramError(
            "the program ended without any communication between its ranks",
            where=program.path,
            hint="it has to call torch.distributed.init_process_group and train in parallel; does "
            "it start ranks itself? Let it be one rank, as under torchrun; what it printed is in "
            f"{log_dir}",
        )


class _Run:
    """One run, from the first fork to the end of the last rank."""

    def __init__(
        self,
        job: Job,
        options: CollectOptions,
        logs: RankLogs,
        folder: Path,
        room: Room | None = None,
    ) -> None:
        self.started = 0.0
        self.gpus: GpuTurns | None = None
        self.coordinator: Coordinator
        self.service: Service
        self.recorded: RecordingSummary | None = None
        self._folding: Folding | None = None
        self._recording: Recording | None = None
        self._job = job
        self._options = options
        self._logs = logs
        self._folder = folder
        self._room = room

    def perform(self, target: Path, progress: Callable[[int, str], None] | None) -> None:
        """Run all ranks to their end; on failure, write what steps they have finished."""
        if self._room is not None:
            require_cuda_asleep("the command began")
        preload()
        if self._room is not None:
            require_cuda_asleep("torch's parts were imported")
        self._fold()
        ranks: list[RankProcess] = []
        pipes: list[int] = []
        try:
            for rank in self._ranks:
                streams, reads = self._logs.open(rank)
                pipes += reads
                ranks.append(start_rank(self._job, rank, streams, self._descriptors(ranks)))
            stale.note_groups(self._folder, [one.pid for one in ranks])
        finally:
            self.coordinator = self._coordinator()
            self.service = Service(self.coordinator, ranks, self._logs, progress)
            self.service.watch_output(pipes)
            self._use_gpus(ranks)
            self._run_ranks(target, complete=len(ranks) == len(self._ranks))

    def _run_ranks(self, target: Path, *, complete: bool) -> None:
        import torch

        # What belongs to ranks is forked; from here on this process may have threads.
        torch.set_num_threads(1)
        self.started = time.monotonic()
        try:
            if complete:
                self._use_tensors(target)
                self.service.run()
                self._finish_tensors()
        except BaseException as error:
            with uninterrupted():
                if isinstance(error, KeyboardInterrupt):
                    self.service.tell_standing()
                self.service.stop()
                self._save_recording()
            self._save_finished_steps(target)
            raise
        with uninterrupted():
            self.service.stop()

    def _coordinator(self) -> Coordinator:
        return Coordinator(
            self._ranks,
            self._options.slots,
            Executor(self._job.place),
            policy=thrifty
            if self._room is None
            else at_home(thrifty, len(self._room.gpus), self._is_on_gpu),
            stands_for=None if self._folding is None else self._folding.absent,
            patient=True,
        )

    def _use_gpus(self, ranks: Sequence[RankProcess]) -> None:
        if self._room is None:
            return
        self.gpus = GpuTurns(
            self._room,
            {one.rank: one.pid for one in ranks},
            self.service.tell,
            meter=Nvml.load(),
            load_swapper=load_checkpoints,
        )
        self.service.use_gpus(self.gpus)

    def _is_on_gpu(self, rank: int) -> bool:
        return self.gpus is not None and self.gpus.is_in(rank)

    # --- tensors ----------------------------------------------------------------------

    @property
    def _ranks(self) -> Sequence[int]:
        """Ranks that have processes."""
        return range(self._options.world_size) if self._folding is None else self._folding.running

    def _fold(self) -> None:
        """If replicas stand for each other: find out which."""
        choices = self._options.tensors
        if choices.fold is not None:
            groups = scout(self._job, self._folder)
            world = self._options.world_size
            self._folding = fold(groups, choices.fold, world, check=choices.check_replicas)

    def folded(self) -> dict[str, Any]:
        """What the report says of it."""
        folding = self._folding
        if folding is None:
            return {}
        return {
            "folded_ranks": len(folding.symmetry),
            "checked_ranks": tuple(sorted(folding.checked)),
            "uneven_all_to_all": folding.varying["all_to_all"],
        }

    def _use_tensors(self, target: Path) -> None:
        """Made only now: they may import what starts threads."""
        choices, world = self._options.tensors, self._options.world_size
        supplier = choices.make_supplier(world, self._folding)
        if supplier is not None:
            self.coordinator.use(Executor(self._job.place, supplier))
        about = {"program": self._job.program.path, "fold_order": FOLD_ORDER}
        self._recording = choices.make_recording(target, world, about)
        if self._recording is not None:
            self.coordinator.watch(self._recording.see)
            self.coordinator.watch_store(self._recording.see_store)

    def _finish_tensors(self) -> None:
        if self._folding is not None:
            self._folding.finish()
        if self._recording is not None:
            self.recorded = self._recording.close(complete=True)
            self._recording = None

    def _save_recording(self) -> None:
        """After a failure: keep what was recorded."""
        if self._recording is None:
            return
        with contextlib.suppress(PrismError, OSError):
            kept = self._recording.close(complete=False)
            if kept is not None:
                print(f"the tensors recorded so far are in {kept.folder}", file=sys.stderr)

    def _descriptors(self, ranks: list[RankProcess]) -> list[int]:
        ends = [number for one in ranks for number in (one.channel.fileno(), one.pidfd)]
        return [*ends, *self._logs.descriptors]

    # --- the graph --------------------------------------------------------------------

    def assemble(self, target: Path) -> Any:
        """Write the graph of all ranks."""
        from prismreplay.runtime.axes import axis_of

        spools: Any = self._folder
        if self._folding is not None:
            spools = [
                path
                for rank in self._folding.representatives
                if (path := _spool(self._folder, rank)).exists()
            ]
        return assemble(spools, target, header=self._header(), axis_of=axis_of)

    def _header(self) -> TraceHeader:
        from prismtrace import __version__

        folding = self._folding
        folded: dict[str, Any] = {}
        if folding is not None:
            folded["symmetry"] = dict(folding.symmetry)
            folded["groups"] = tuple(
                ProcessGroup(id=number, name=group.name, desc=group.desc, ranks=group.ranks)
                for number, group in enumerate(folding.groups)
            )
        if self.gpus is not None:
            used = self.gpus.report.rank_bytes > 0
            folded["extra"] = {DEVICES: "gpus" if used else "cpus"}
        return TraceHeader(
            **folded,
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
        except Exception:  # noqa: BLE001  what went wrong before is what has to be told
            return
        if not made.steps or set(made.missing_ranks) - set(self._header().symmetry or ()):
            partial.unlink(missing_ok=True)
            return
        print(
            f"the {len(made.steps)} steps that all ranks finished are in {partial}", file=sys.stderr
        )


def _spool(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.spool"


def _observe(folder: Path, options: CollectOptions, on_gpus: bool, rank: int) -> Observed:
    """In a rank: what turns its communications into its graph."""
    from prismreplay.runtime.annotations import make_recorder

    options.tensors.prepare_rank()
    writer = SpanWriter(_spool(folder, rank), rank=rank, world_size=options.world_size)
    # On GPUs as `record` does, so that the graphs can be compared.
    recorder = make_recorder(writer, cuda=on_gpus)
    return Observed(
        recorder,
        finish=recorder.finish,
        flush=writer.flush,
        step=lambda: recorder.position.step,
    )


def usable_devices() -> int:
    """What `--devices` is by default: the GPUs, else the CPU cores that this process may use."""
    return len(visible_gpus()) or len(os.sched_getaffinity(0))
