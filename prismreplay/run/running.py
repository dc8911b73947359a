"""Run: sandbox ranks execute the program for real, in a world whose other ranks are virtual."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from prismreplay.collect import stale
from prismreplay.collect.executor import Executor
from prismreplay.collect.gpu_room import visible_gpus
from prismreplay.collect.gpus import DEVICES, ran_on_cpus, require_cuda_asleep
from prismreplay.collect.handover import Files, Parcel, Place
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.messages import Channel
from prismreplay.collect.pool import Job, RankProcess, preload, start_rank
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.surroundings import limit_of_open_files, run_folder, uninterrupted
from prismreplay.errors import PlanError
from prismreplay.plan import Plan, PlannedWorld
from prismreplay.run.assistants import Assistant, Assistants, participant, start_assistant
from prismreplay.run.checking import require_equal
from prismreplay.run.contention import ProcessorCosts
from prismreplay.run.following import GraphFollower, Placed, followers_of
from prismreplay.run.hosts import WAIT_SECONDS
from prismreplay.run.hub import Hub, serve_store
from prismreplay.run.hybrid import HybridCoordinator, World
from prismreplay.run.ledger import Ledger
from prismreplay.run.marks import DeviceSummary, RankSummary, StepMark
from prismreplay.run.options import RunOptions, Timing
from prismreplay.run.ranks import observe_rank
from prismreplay.run.relaying import Proxies
from prismreplay.run.small_groups import MovedSummary
from prismreplay.run.timekeeping import Timekeeper
from prismreplay.run.virtual_members import VirtualMembers
from prismreplay.runtime.operations import Op
from prismreplay.tensors.prefetching import PrefetchReport
from prismreplay.tensors.store_log import StoreReplay, read_store_log
from prismtrace.output import writable_target
from prismtrace.ranks import format_ranks
from prismtrace.recorder import AssembleReport, assemble
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.trace import Trace

__all__ = ["RunOutcome", "run_sandbox"]

_MOST_THREADS = 4
"""That reduce beside each other; memory is not faster for more."""


@dataclass(frozen=True)
class RunOutcome:
    """What a run left. Times in seconds or ns, as their names say; `origin_ns` on the machine's
    monotonic clock, as all times of the trace. `devices` tells of ranks that had a GPU.
    """

    output: Path
    log_dir: Path
    made: AssembleReport
    coordinator: HybridCoordinator
    world: World
    marks: tuple[StepMark, ...]
    summaries: dict[int, RankSummary]
    origin_ns: int
    prefetched: PrefetchReport
    moved: tuple[MovedSummary, ...]
    devices: dict[int, DeviceSummary]
    start_s: float
    wall_s: float
    cleaned: stale.Cleaned


def run_sandbox(
    program: ProgramCall,
    graph: Trace,
    output: Path,
    options: RunOptions,
    timing: Callable[[], Timing] = Timing,
    *,
    progress: Callable[[int, str], None] | None = None,
    elsewhere: Mapping[int, Channel] | None = None,
) -> RunOutcome:
    """Run the sandbox ranks of a job and write their trace to `output`.

    Call it in a process without other threads: ranks are forked from it.

    Args:
        program: what each rank runs.
        graph: of the whole job, bare or calibrated; sandbox ranks are held to it.
        output: their trace; a file that is there is replaced once the run has succeeded.
        options: how.
        timing: makes what says when virtual ranks arrive; called once ranks are forked.
        progress: told twice a second how many ranks have ended, and what else there is to say.
        elsewhere: connections to sandbox ranks that run on other hosts.

    Raises:
        ProgramError: the program cannot be started.
        RankFailedError: a rank failed.
        PlanError: the program does something else than its graph.
        DeadlockError: ranks wait for what never comes.
        MismatchError: communications of two ranks do not fit.
        TensorRulesError, TensorRecordingError: of what virtual ranks contribute.
        OutputError: trace or logs cannot be written.
    """
    begun = time.monotonic()
    program.check()
    _check_sandbox(options.sandbox, graph.header.world_size)
    target = writable_target(output)
    log_dir = options.log_dir or output.with_suffix(".logs")
    shown = options.sandbox[:1] if options.shown is None else options.shown
    logs = RankLogs(log_dir, graph.header.world_size, shown, options.quiet_stdout)
    logs.prepare()
    cleaned = stale.clean()
    with run_folder() as folder:
        remote = dict(elsewhere or {})
        here = tuple(rank for rank in options.sandbox if rank not in remote)
        ledger = Ledger([*here, *map(participant, range(options.assistants))])
        gpus = () if ran_on_cpus(graph.header) else _gpus(options, here)
        if len(gpus) > 1:
            ledger.share_slots()
        if gpus and remote:
            raise PlanError(
                "sandbox ranks of several hosts run on CPUs, and this host has GPUs",
                hint="with CUDA_VISIBLE_DEVICES empty on all hosts, the program runs on CPUs",
            )
        job = Job(
            program=program,
            world_size=graph.header.world_size,
            local_world_size=options.local_world_size or graph.header.world_size,
            run=folder.name,
            place=Place(options.shm_dir),
            gpus=gpus,
            placed=here if gpus else (),
            observe=functools.partial(
                observe_rank,
                folder,
                replace(options, sandbox=here, gpus=gpus),
                graph.header.world_size,
                ledger,
            ),
        )
        with limit_of_open_files(len(options.sandbox)) as limits:
            run = _Run(job.limited(limits), graph, options, logs, folder, ledger)
            run.proxies = Proxies(remote, folder, ledger, job.place)
            run.perform(timing, progress)
        made = run.assemble(target)
    return RunOutcome(
        output=output,
        log_dir=log_dir,
        made=made,
        coordinator=run.coordinator,
        world=run.world,
        marks=tuple(run.hub.marks),
        summaries=run.hub.summaries,
        origin_ns=run.origin_ns,
        prefetched=run.prefetched,
        moved=tuple(run.hub.moved),
        devices=run.hub.devices,
        start_s=run.started - begun,
        wall_s=time.monotonic() - begun,
        cleaned=cleaned,
    )


def _check_sandbox(sandbox: Sequence[int], world_size: int) -> None:
    if not sandbox or max(sandbox) >= world_size or min(sandbox) < 0:
        raise PlanError(
            f"sandbox ranks {format_ranks(tuple(sandbox)) or 'none'} of a world of {world_size}",
            hint="name ranks of the job: --sandbox 0-1",
        )


def _gpus(options: RunOptions, here: Sequence[int]) -> tuple[str, ...]:
    """The GPUs of the sandbox ranks of this host.

    Raises:
        SwapError: CUDA was started in this process, which ranks are forked from.
        PlanError: GPUs, and something that is for CPUs.
    """
    found = tuple(gpu.token for gpu in visible_gpus())
    if options.gpus is not None:
        found = options.gpus if found else ()
    if not found:
        return ()
    require_cuda_asleep("the command began")
    if options.check is not None or options.assistants:
        raise PlanError(
            "checks of inputs and assistants are for ranks on CPUs, and there are GPUs",
            hint="with CUDA_VISIBLE_DEVICES empty, the program runs on CPUs",
        )
    return found[: len(here)]


class _Run:
    """One run, from the first fork to the end of the last rank."""

    def __init__(
        self,
        job: Job,
        graph: Trace,
        options: RunOptions,
        logs: RankLogs,
        folder: Path,
        ledger: Ledger,
    ) -> None:
        self.started = 0.0
        self.origin_ns = 0
        self.coordinator: HybridCoordinator
        self.world: World
        self.prefetched = PrefetchReport()
        self.hub: Hub
        self.proxies: Proxies
        self._job = job
        self._graph = graph
        self._options = options
        self._logs = logs
        self._folder = folder
        self._ledger = ledger

    def perform(
        self, timing: Callable[[], Timing], progress: Callable[[int, str], None] | None
    ) -> None:
        """Run all sandbox ranks to their end."""
        preload()
        ranks: list[RankProcess] = []
        assistants: list[Assistant] = []
        pipes: list[int] = []
        sandbox = self._options.sandbox
        try:
            for rank in sandbox:
                if rank in self.proxies:
                    ranks.append(self.proxies.start(rank, self._descriptors(ranks)))
                    continue
                streams, reads = self._logs.open(rank)
                pipes += reads
                ranks.append(start_rank(self._job, rank, streams, self._descriptors(ranks)))
            for number in range(self._options.assistants):
                inherited = self._descriptors([*ranks, *assistants])
                assistants.append(start_assistant(number, self._ledger, inherited))
            self.proxies.hang_up()
            stale.note_groups(
                self._folder, [*(one.pid for one in ranks), *(one.pid for one in assistants)]
            )
        finally:
            place = self._job.place
            executor = Executor(place, files=Files(place), threads=self._spare_cores())
            self.coordinator = HybridCoordinator(sandbox, self._job.world_size, executor)
            self.hub = Hub(self.coordinator, ranks, self._logs, self._ledger, progress)
            self.hub.watch_output(pipes)
            checks = self._options.check is not None
            helpers = Assistants(assistants, sandbox, self._ledger, place if checks else None)
            if assistants:
                self.hub.employ(helpers)
            try:
                complete = len(ranks) + len(assistants) == len(sandbox) + self._options.assistants
                self._run_ranks(timing, complete=complete)
            finally:
                with uninterrupted():
                    helpers.stop()
                    executor.close()

    def _run_ranks(self, timing: Callable[[], Timing], *, complete: bool) -> None:
        import torch

        # What belongs to ranks is forked; from here on this process may have threads.
        torch.set_num_threads(1)
        try:
            if complete:
                said = timing()
                store = self._serve_store()
                members = self._members()
                followers = followers_of(self._graph, self._options.sandbox)
                members.read_ahead(self._graph, self._options.sandbox, self._options.prefetch_bytes)
                # Ranks on GPUs keep the time themselves; who goes through the hub waits for nobody.
                plan = None if self._job.gpus else said.plan
                planned = None if plan is None else PlannedWorld(plan)
                store_log = self._store_log(members)
                self.hub.costs = self._costs()
                self.proxies.await_ready(WAIT_SECONDS)
                self._write_orders(followers, said.plan)
                self.started = time.monotonic()
                self.origin_ns = self.hub.begin_at()
                self.world = World(
                    followers=followers,
                    members=members,
                    keeper=Timekeeper(planned, self.origin_ns, said.transfer_ns),
                    planned=planned,
                    store=store_log,
                    place=self._job.place,
                    check=self._check if self._options.check is not None else None,
                )
                self.coordinator.begin_in(self.world)
                with _switching_often():
                    self.hub.run()
                self.prefetched = members.close()
                del store
        except BaseException:
            with uninterrupted():
                self.hub.stop()
            self._save_finished_steps()
            raise
        with uninterrupted():
            self.hub.stop()

    def _spare_cores(self) -> int:
        """Cores of which neither ranks nor assistants, nor the thread that hears them, has need."""
        cores = len(os.sched_getaffinity(0))
        taken = len(self._options.sandbox) + self._options.assistants + 1
        return min(_MOST_THREADS, cores - taken)

    def _write_orders(self, followers: Mapping[int, GraphFollower], plan: Plan | None) -> None:
        """What ranks on GPUs have to know: they ask nobody while they run."""
        if not self._job.gpus:
            return
        from prismreplay.run.device_pacing import device_plan_of
        from prismreplay.run.device_ranks import Orders, write_orders

        orders = {}
        for rank, follower in followers.items():
            planned = None if plan is None else device_plan_of(plan, rank)
            shares = len(self._job.placed) > len(self._job.gpus)
            orders[rank] = Orders(follower, shares=shares, plan=planned)
        write_orders(self._folder, orders)

    def _serve_store(self) -> object:
        here = [rank for rank in self._options.sandbox if rank not in self.proxies]
        if len(here) + self._options.assistants < 2:
            return None
        store, self._ledger.store_port = serve_store()
        return store

    def _members(self) -> VirtualMembers:
        sources = self._options.tensors.make_sources(self._job.world_size)
        return VirtualMembers(sources, self._job.place)

    def _costs(self) -> ProcessorCosts | None:
        from prismcalib.comm_table import CommTable

        table = self._options.comm_table
        return None if table is None else ProcessorCosts(CommTable.open(table))

    def _store_log(self, members: VirtualMembers) -> StoreReplay | None:
        if not members.recordings:
            return None
        entries = read_store_log(members.recordings[0].recorded.folder)
        return StoreReplay(entries, self._options.sandbox)

    def _check(self, rank: int, op: Op, placed: Placed, inputs: Parcel) -> None:
        """Compare what a sandbox rank contributes with what it contributed when recorded."""
        recorded = self._options.check
        if recorded is None or placed.round_ or not op.inputs:
            return
        require_equal(recorded, rank, replace(op, seq=placed.data_seq), inputs)

    def _descriptors(self, started: Sequence[RankProcess | Assistant]) -> list[int]:
        ends = [number for one in started for number in (one.channel.fileno(), one.pidfd)]
        return [*ends, *self._logs.descriptors, *self.proxies.descriptors]

    # --- the trace --------------------------------------------------------------------

    def assemble(self, target: Path) -> AssembleReport:
        """Write the trace of the sandbox ranks."""
        from prismreplay.runtime.axes import axis_of

        return assemble(self._folder, target, header=self._header(), axis_of=axis_of)

    def _header(self) -> TraceHeader:
        from prismtrace import __version__

        known, info = self._graph.header, self._options.slice
        if info is not None:
            info = info.model_copy(update={"origin_ns": self.origin_ns})
        return TraceHeader(
            kind=TraceKind.RECORDED if info is None else TraceKind.SLICE,
            world_size=known.world_size,
            ranks=(),
            axes=known.axes,
            groups=known.groups,
            slice=info,
            extra={key: known.extra[key] for key in (DEVICES,) if key in known.extra},
            fold_order=known.fold_order,
            created_by=f"prismreplay {'run' if info is None else 'slice'} {__version__}",
            sources=(self._job.program.path,),
        )

    def _save_finished_steps(self) -> None:
        """After a failure: say where the steps are that all sandbox ranks have finished."""
        target = self._logs.folder.with_suffix(".partial.parquet")
        with suppress(Exception):  # what went wrong before is what has to be told
            made = self.assemble(target)
            if not made.steps:
                target.unlink(missing_ok=True)
                return
            print(
                f"the {len(made.steps)} steps that all sandbox ranks finished are in {target}",
                file=sys.stderr,
            )


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let the thread that reads ahead keep the one that answers ranks waiting for less."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
