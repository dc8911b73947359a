"""One execution of a slice as a piece of work, and what came of it. Picklable both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prismreplay.collect.programs import ProgramCall
from prismreplay.slicing.fingerprint import Fingerprint
from prismreplay.slicing.progress import Execution
from prismreplay.tensors.choices import TensorChoices

__all__ = ["SliceOutcome", "SliceTask"]


@dataclass(frozen=True)
class SliceTask:
    """What a worker needs to run a slice once.

    Attributes:
        program: what each rank runs.
        execution: which ranks are real, and which slice and repeat it is.
        graph: files of the bare graph.
        output: the slice to write.
        log_dir: where the output of its ranks goes.
        world_size, local_world_size: as the program sees them.
        tensors: what virtual ranks send.
        fingerprint: goes into the header.
        shown: ranks whose output is passed on.
        quiet_stdout: pass it on to stderr only.
        cores: those that the ranks, then the emulator, may use; empty: all.
        steps: first and last step that the slice holds; None: all.
        arrivals: a calibrated trace that says when virtual ranks arrive; None: early.
        shm_dir: folder for tensors that ranks hand over; None: memory.
        timing_true: whether there is a core for everybody.
        assistants: processes that play virtual ranks in real groups; 0: the emulator does.
        comm_table: what communication takes of the ranks' processors; None: nothing.
        gpus: that the ranks compute on, one each, as CUDA_VISIBLE_DEVICES names them.
    """

    program: ProgramCall
    execution: Execution
    graph: tuple[Path, ...]
    output: Path
    log_dir: Path
    world_size: int
    local_world_size: int
    tensors: TensorChoices
    fingerprint: Fingerprint
    shown: tuple[int, ...] = ()
    quiet_stdout: bool = False
    cores: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None
    arrivals: Path | None = None
    shm_dir: Path | None = None
    timing_true: bool = True
    assistants: int = 0
    comm_table: Path | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class SliceOutcome:
    """What a slice was like.

    Attributes:
        index, repeat, ranks, output: which one.
        nodes: rows of its real ranks.
        step_ns: time of its steps, last end minus first start among its ranks.
        whole_operations: communications whose members were all real.
        mixed_operations: those with virtual members.
        wall_s: what it took, with starting and writing.
        peak_memory_bytes: of its ranks together.
        virtual_late: operations whose answer came late, and by how long in all, in ns.
        policies: what was repaired or assumed, and how often.
        core_wait: share of the time in which its ranks could compute that they waited for a core.
    """

    index: int
    repeat: int
    ranks: tuple[int, ...]
    output: Path
    nodes: int
    step_ns: tuple[int, ...]
    whole_operations: int
    mixed_operations: int
    wall_s: float
    peak_memory_bytes: int
    virtual_late: tuple[int, int] = (0, 0)
    policies: dict[str, int] = field(default_factory=dict)
    core_wait: float = 0.0
