"""How to run sandbox ranks, and when virtual ones arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from prismreplay.plan import Plan
from prismreplay.run.spinning import Spin
from prismreplay.run.timekeeping import Entry
from prismreplay.tensors.choices import TensorChoices
from prismreplay.tensors.recorded import RecordedTensors
from prismtrace.schema import SliceInfo

__all__ = ["RunOptions", "Timing"]


@dataclass(frozen=True)
class Timing:
    """When virtual ranks arrive.

    Attributes:
        plan: what says it; None: they are always there.
        transfer_ns: of an operation that goes through the hub, where the plan or, without one,
            nothing at all shall not say it.
    """

    plan: Plan | None = None
    transfer_ns: Callable[[Entry], int] | None = None


@dataclass(frozen=True)
class RunOptions:
    """How to run.

    Attributes:
        sandbox: ranks that execute.
        tensors: what virtual ranks contribute.
        local_world_size: ranks of one host, as the program sees it; None: all.
        log_dir: where the output of ranks goes; None: beside the result.
        shown: ranks whose output is passed on.
        quiet_stdout: pass output on to stderr only.
        shm_dir: folder for the tensors that ranks hand over; None: memory.
        check: compare all inputs of sandbox ranks with this recording; not for timing.
        slice: which slice this is; None: a run.
        real_groups: have torch's backend perform what sandbox ranks do among themselves.
        assistants: processes that play virtual ranks in real groups with sandbox ranks
            (`prismreplay.run.reduced`); 0: the hub does all that concerns virtual ranks.
        prefetch_bytes: of recorded tensors that are read ahead of their use.
        comm_table: what communication with virtual ranks takes of the ranks' processors; None:
            nothing.
        spins: named pieces of sandbox ranks' programs that count as faster or slower.
        gpus: that sandbox ranks compute on, as CUDA_VISIBLE_DEVICES names them, one each; empty:
            none; None: those that this process sees.
    """

    sandbox: tuple[int, ...]
    tensors: TensorChoices = field(default_factory=TensorChoices)
    local_world_size: int | None = None
    log_dir: Path | None = None
    shown: Collection[int] | None = None
    quiet_stdout: bool = False
    shm_dir: Path | None = None
    check: RecordedTensors | None = None
    slice: SliceInfo | None = None
    real_groups: bool = True
    spins: tuple[Spin, ...] = ()
    prefetch_bytes: int = 1 << 30
    assistants: int = 0
    comm_table: Path | None = None
    gpus: tuple[str, ...] | None = None
