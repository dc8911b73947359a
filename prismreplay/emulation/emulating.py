"""Emulate: collect, slice, merge and run a program, in one folder that keeps what each gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prismreplay.collect.programs import ProgramCall, program_of
from prismreplay.emulation.findings import Findings, find
from prismreplay.emulation.stages import (
    Note,
    Stage,
    inputs_digest,
    kept_note,
    run_stage,
)
from prismreplay.run.injecting import edits_of
from prismtrace.claiming import Claim
from prismtrace.ranks import format_ranks

__all__ = ["EmulateOptions", "Emulation", "StageRecord", "Watcher", "emulate"]


@dataclass(frozen=True)
class EmulateOptions:
    """What to emulate, and on what.

    Attributes:
        world_size: ranks of the job.
        devices: ranks that compute at a time; on CPUs, cores.
        sandbox: ranks that run in the end.
        sandbox_size: ranks that are real in a slice; None: one a device.
        local_world_size: ranks of one host, as the program sees it; None: all.
        tensors: what virtual ranks contribute (rules, recordings); none: what collect records.
        mock_router: shares of tokens that experts get.
        comm_table: measured times of communications.
        repeats: executions of every slice.
        refine: further rounds of slices, at most.
        warmup: first steps that are not typical.
        transport: how sandbox ranks meet virtual ones; None: the command's default.
        inject: changes of virtual ranks, as `run` takes them.
        compare: a true run's trace.
        cores: of this machine: ranks that can communicate at a time, to measure what that takes.
        on_gpus: ranks compute on GPUs. What communication takes cannot be measured on few of them.
        record_below: payload in bytes of the largest communications whose contents are recorded;
            of larger ones, virtual ranks give what the sandbox ranks do. None: of any size.
    """

    world_size: int
    devices: int
    sandbox: tuple[int, ...] = (0,)
    sandbox_size: int | None = None
    local_world_size: int | None = None
    tensors: tuple[str, ...] = ()
    mock_router: Path | None = None
    comm_table: Path | None = None
    repeats: int = 1
    refine: int = 0
    warmup: int = 1
    transport: str | None = None
    inject: tuple[str, ...] = ()
    compare: Path | None = None
    cores: int = 2
    on_gpus: bool = False
    record_below: int | None = None


@dataclass(frozen=True)
class StageRecord:
    """A stage as it went. `kept`: it was done before. Times in seconds."""

    name: str
    command: str
    wall_s: float
    kept: bool


@dataclass(frozen=True)
class Emulation:
    """What a chain gave.

    Attributes:
        folder: where its files are.
        stages: of the chain, in order.
        findings: what came of it.
    """

    folder: Path
    stages: tuple[StageRecord, ...]
    findings: Findings

    @property
    def wall_s(self) -> float:
        """What all stages took, also those that were done before."""
        return sum(stage.wall_s for stage in self.stages)


class Watcher(Protocol):
    """Told of every stage of a chain."""

    def begins(self, number: int, of: int, stage: Stage, note: Note | None) -> None:
        """A stage begins; with a `note`, it was done before."""

    def ended(self, note: Note) -> None:
        """The stage, which was not done before, has ended."""


def emulate(
    program: Sequence[str], folder: Path, options: EmulateOptions, watcher: Watcher
) -> Emulation:
    """Run the stages that are not done yet, and say what came of all of them.

    Args:
        program: the words after `--`.
        folder: for the files of the stages; made if it is not there.
        options: what, and on what.
        watcher: told of every stage.

    Raises:
        ProgramError: the program cannot be found.
        InputFileError: a file that is named cannot be read.
        OutputError: the folder cannot be written, or another chain writes there.
        PlanError: what is to be injected cannot be understood.
        StageError: a stage failed, and has said why.
    """
    call = program_of(program)
    call.check()
    # Now, not only when all else is done.
    injected = edits_of(options.inject, options.sandbox, options.world_size)
    # Also between stages, and while one measures: two chains would take each other's cores.
    with contextlib.closing(Claim(folder)):
        chain = _Chain(
            program=tuple(program),
            folder=folder,
            options=options,
            job=inputs_digest(_program_files(call), options.mock_router),
            sources=inputs_digest(map(Path, options.tensors)),
        )
        records, notes = _run_stages(chain, watcher)
    findings = find(
        folder / "calibrated.parquet",
        {name: note.report for name, note in notes.items()},
        folder / "run.logs",
        options.sandbox,
        injected,
    )
    return Emulation(folder, tuple(records), findings)


def _run_stages(chain: _Chain, watcher: Watcher) -> tuple[list[StageRecord], Notes]:
    records: list[StageRecord] = []
    notes: Notes = {}
    for number, make in enumerate(chain.makers, start=1):
        stage = make(notes)
        if stage is None:
            continue
        note = kept_note(chain.folder, stage)
        kept = note is not None
        watcher.begins(number, len(chain.makers), stage, note)
        if note is None:
            note = run_stage(chain.folder, stage)
            watcher.ended(note)
        notes[stage.name] = note
        records.append(StageRecord(stage.name, stage.line, note.wall_s, kept))
    return records, notes


Notes = dict[str, Note]
_AT_ONCE = 4
"""Ranks that compute on a GPU at a time while a graph is collected."""


@dataclass(frozen=True)
class _Chain:
    """The commands of a chain. Each is made once those before it have left their notes."""

    program: tuple[str, ...]
    folder: Path
    options: EmulateOptions
    job: str
    sources: str

    @property
    def makers(self) -> tuple[Callable[[Notes], Stage | None], ...]:
        if self.options.comm_table is not None or self.options.on_gpus:
            return self._collect, self._slice, self._merge, self._run
        return self._collect, self._bench, self._slice, self._merge, self._run

    def _collect(self, _: Notes) -> Stage:
        options = self.options
        words = [
            *("prismreplay", "collect"),
            *("--world-size", options.world_size),
            *("--devices", options.devices),
            # Times are not looked at here, and starting is what takes longest.
            *(("--per-device", _AT_ONCE) if options.on_gpus else ()),
            *self._job(),
        ]
        if options.tensors:
            words += ["--record-tensors", "sandbox-facing", "--sandbox", self._sandbox]
        else:
            words += ["--record-tensors", "all"]
        if options.record_below is not None:
            below = options.record_below
            words += ["--record-below", below, "--mirror-above", below]
        made = ("bare.parquet", "bare.tensors/manifest.json")
        words += ["--show-rank", "none", "-o", self.folder / "bare.parquet"]
        return self._stage("collect", words, made, self.job)

    def _bench(self, notes: Notes) -> Stage | None:
        """Times of the job's communications, in groups as large as there is room for."""
        from prismreplay.emulation.transfers import bench_words

        graph = self.folder / "bare.parquet"
        options = bench_words(graph, min(self.options.world_size, max(2, self.options.cores)))
        if not options:
            return None
        words = ("prismreplay", "comm-bench", *options, "-o", self._table)
        return self._stage(
            "comm-bench", words, (self._table.name,), notes["collect"].token, program=False
        )

    def _slice(self, notes: Notes) -> Stage:
        options = self.options
        words = [
            *("prismreplay", "slice", self.folder / "bare.parquet"),
            *("--sandbox-size", options.sandbox_size or options.devices),
            *("--devices", self._slice_devices),
            *self._tensors(),
            *self._job(),
            *(("--repeat", options.repeats) if options.repeats > 1 else ()),
            *self._measured(notes),
            *(("--refine", options.refine, *self._hosts()) if options.refine else ()),
            *(("--warmup", options.warmup) if options.warmup != 1 else ()),
            *("-o", self.folder / "slices"),
        ]
        inputs = (self.job, self.sources, notes["collect"].token, self._table_token(notes))
        return self._stage("slice", words, ("slices/slice-*.parquet",), *inputs)

    def _merge(self, notes: Notes) -> Stage:
        options = self.options
        words = [
            *("prismcalib", "merge", self.folder / "slices"),
            *("--bare", self.folder / "bare.parquet"),
            # All slices ran on one machine, whose clock is the same for all ranks.
            *("--clock", "keep"),
            *self._hosts(),
            *self._measured(notes),
            *(("--warmup", options.warmup) if options.warmup != 1 else ()),
            *("-o", self.folder / "calibrated.parquet"),
        ]
        inputs = (self._table_token(notes), notes["slice"].token)
        return self._stage("merge", words, ("calibrated.parquet",), *inputs, program=False)

    def _run(self, notes: Notes) -> Stage:
        options = self.options
        words = [
            *("prismreplay", "run", self.folder / "calibrated.parquet"),
            *("--sandbox", self._sandbox),
            *self._tensors(),
            *self._job(),
            *(("--transport", options.transport) if options.transport else ()),
            *self._measured(notes),
            *(word for text in options.inject for word in ("--inject", text)),
            *(("--compare", options.compare) if options.compare else ()),
            *("-o", self.folder / "run.parquet"),
        ]
        inputs = (self.job, self.sources, notes["merge"].token)
        compared = inputs_digest([], options.compare)
        return self._stage("run", words, ("run.parquet",), *inputs, compared)

    @property
    def _slice_devices(self) -> int:
        """On CPUs the emulator has a core of its own, if there is one."""
        devices = self.options.devices
        free = not self.options.on_gpus and devices < self.options.cores
        return devices + 1 if free else devices

    @property
    def _sandbox(self) -> str:
        return format_ranks(self.options.sandbox, strided=False)

    def _job(self) -> Iterator[object]:
        """What all commands that run the program are told of it."""
        if self.options.local_world_size is not None:
            yield from ("--local-world-size", self.options.local_world_size)
        if self.options.mock_router is not None:
            yield from ("--mock-router", self.options.mock_router)

    @property
    def _table(self) -> Path:
        return self.options.comm_table or self.folder / "table.parquet"

    def _table_token(self, notes: Notes) -> str:
        measured = notes.get("comm-bench")
        if measured is None:
            return inputs_digest([], self.options.comm_table)
        return measured.token

    def _hosts(self) -> Iterator[object]:
        """For transfers of groups that no slice has as a whole."""
        yield from ("--ranks-per-host", self.options.local_world_size or self.options.world_size)

    def _measured(self, notes: Notes) -> Iterator[object]:
        """What communications take, of time and of the ranks' processors."""
        if self.options.comm_table is not None or "comm-bench" in notes:
            yield from ("--comm-table", self._table)

    def _tensors(self) -> Iterator[object]:
        sources: list[object] = [*self.options.tensors, self.folder / "bare.tensors"]
        if self.options.record_below is not None and not self.options.on_gpus:
            # On GPUs, what nothing else says is mirrored anyway.
            sources.append("builtin:mirror")
        for source in sources:
            yield from ("--tensors", source)

    def _stage(
        self,
        name: str,
        words: Sequence[object],
        made: tuple[str, ...],
        *inputs: str,
        program: bool = True,
    ) -> Stage:
        texts = tuple(map(str, words)) + (("--", *self.program) if program else ())
        return Stage(name, texts, made, inputs)


def _program_files(call: ProgramCall) -> list[Path]:
    """The program's own file; what it imports is not looked into."""
    return [] if call.is_module else [Path(call.path)]
