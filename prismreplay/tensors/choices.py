"""What a run does with the contents of communications: the options of `collect`, put to use."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismreplay.errors import TensorRulesError
from prismreplay.mock_router import MockRouter, Routing, read_routing
from prismreplay.tensors.rules import RuleSet, read_rules

if TYPE_CHECKING:
    from prismreplay.collect.supplying import Supplier
    from prismreplay.runtime.operations import Op
    from prismreplay.tensors.by_recording import RecordingSupplier
    from prismreplay.tensors.folding import Folding
    from prismreplay.tensors.recording import RecordingSummary, TensorRecorder

__all__ = ["RecordTensors", "Recording", "TensorChoices", "read_choices"]


class RecordTensors(StrEnum):
    """Which operations' inputs are recorded."""

    NONE = "none"
    SANDBOX_FACING = "sandbox-facing"
    ALL = "all"


@dataclass(frozen=True)
class TensorChoices:
    """How tensors come and go in a run; see `read_choices`."""

    sources: tuple[RuleSet | Path, ...] = ()
    """Rules, and folders of recordings; the first that answers counts."""
    record: RecordTensors | None = None
    record_most_bytes: int | None = None
    """Payload of the largest operations that are recorded; None: of any size."""
    sandbox: tuple[int, ...] = ()
    routing: Routing | None = None
    fold: str | None = None
    check_replicas: bool = True

    def make_supplier(self, world_size: int, folding: Folding | None = None) -> Supplier | None:
        """What answers communications without partners, if something does.

        Args:
            world_size: ranks of the job.
            folding: which of them run, and for whom.

        Raises:
            TensorRulesError: a function that a rule names cannot be imported.
            TensorRecordingError: a recording is damaged, or of another job.
        """
        if not self.sources:
            return folding
        from prismreplay.collect.supplying import AllOrNone, FirstOf
        from prismreplay.tensors.by_rules import RuleSupplier

        recording = self._recordings(world_size)

        def for_rule(folder: str | None) -> RecordingSupplier:
            return recording(self._folder_for_rule(folder))

        made: Supplier = FirstOf([])
        for item in reversed(self.sources):
            # What a rule says is to be performed is performed, whatever comes after.
            made = (
                FirstOf([recording(item), made])
                if isinstance(item, Path)
                else RuleSupplier(item, for_rule, after=made)
            )
        if folding is None:
            return AllOrNone(made)
        return FirstOf([folding, AllOrNone(made, folding.absent)])

    def make_sources(self, world_size: int) -> tuple[Supplier, ...]:
        """Rules and recordings one by one, for whoever asks them himself.

        Args:
            world_size: ranks of the job.

        Raises:
            TensorRulesError: a function that a rule names cannot be imported.
            TensorRecordingError: a recording is damaged, or of another job.
        """
        from prismreplay.tensors.by_rules import RuleSupplier

        recording = self._recordings(world_size)
        return tuple(
            recording(item)
            if isinstance(item, Path)
            else RuleSupplier(item, lambda folder: recording(self._folder_for_rule(folder)))
            for item in self.sources
        )

    def make_recording(
        self, output: Path, world_size: int, about: Mapping[str, Any]
    ) -> Recording | None:
        """What writes tensors beside `output`, if they are recorded.

        Raises:
            OutputError: something else is there, or it cannot be written.
        """
        if self.record is None:
            return None
        from prismreplay.tensors.recording import TensorRecorder

        return Recording(
            TensorRecorder(
                output.with_suffix(".tensors"),
                choice=self.record,
                most_bytes=self.record_most_bytes,
                world_size=world_size,
                sandbox=self.sandbox,
                job=about,
            )
        )

    def _recordings(self, world_size: int) -> Callable[[Path], RecordingSupplier]:
        """Opens recordings, each once."""
        from prismreplay.tensors.by_recording import RecordingSupplier
        from prismreplay.tensors.recorded import RecordedTensors

        opened: dict[Path, RecordingSupplier] = {}

        def recording(folder: Path) -> RecordingSupplier:
            if folder not in opened:
                tensors = RecordedTensors(folder)
                tensors.require_job(world_size=world_size)
                opened[folder] = RecordingSupplier(tensors)
            return opened[folder]

        return recording

    def _folder_for_rule(self, folder: str | None) -> Path:
        """The recording that a rule means: its own, or the one beside the rules."""
        if folder is not None:
            return Path(folder)
        beside = next((item for item in self.sources if isinstance(item, Path)), None)
        if beside is None:
            raise TensorRulesError(
                'produce = "recorded" needs a recording',
                hint="name its folder with another --tensors, or in the rule: recorded = ...",
            )
        return beside

    def prepare_rank(self) -> None:
        """In a rank, before its program starts."""
        if self.routing is not None:
            from prismreplay import mock_router

            router = mock_router.install(self.routing)
            if os.environ.get("RANK") == "0":
                atexit.register(_tell_of_none, router)


def _tell_of_none(router: MockRouter) -> None:
    if not router.patched:
        names = " or ".join(router.routing.modules)
        print(
            f"note: no router was mocked: no linear layer of the program is called {names}",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Recording:
    """Shows a `TensorRecorder` what the coordinator sees.

    Attributes:
        recorder: writes.
    """

    recorder: TensorRecorder

    def see(self, rank: int, op: Op, inputs: Any) -> None:
        """Record an operation's inputs, which are a parcel."""
        if self.recorder.wants(rank, op):
            self.recorder.record(rank, op, inputs.tensors(op.inputs))

    def see_store(self, rank: int, operation: str, arguments: tuple[Any, ...]) -> None:
        """Record an operation of the key-value store."""
        self.recorder.record_store(rank, operation, arguments)

    def close(self, *, complete: bool) -> RecordingSummary | None:
        """The program is over, or was interrupted."""
        return self.recorder.close() if complete else self.recorder.close_interrupted()


def read_choices(
    *,
    tensors: Sequence[str] = (),
    record: str = "none",
    record_most_bytes: int | None = None,
    sandbox: Sequence[int] = (),
    mock_router: Path | None = None,
    fold: str | None = None,
    check_replicas: bool = True,
) -> TensorChoices:
    """Options as they are written on a command line.

    Args:
        tensors: rules files, ``builtin:NAME``, and folders of recordings.
        record: ``none``, ``all``, or ``sandbox-facing``: what concerns ranks of `sandbox`.
        record_most_bytes: of the payload of operations that are recorded; None: of any size.
        sandbox: global ranks.
        mock_router: a file, see `prismreplay.mock_router.Routing`.
        fold: axis whose replicas stand for each other.
        check_replicas: run the last replica, too.

    Raises:
        TensorRulesError: a rules file is wrong.
        MockRouterError: the file of the mock router is wrong.
        ValueError: the options contradict each other; the text says how.
    """
    if record not in list(RecordTensors):
        raise ValueError(f"--record-tensors is one of {', '.join(RecordTensors)}, not {record}")
    chosen = RecordTensors(record)
    if (chosen is RecordTensors.SANDBOX_FACING) != bool(sandbox):
        raise ValueError("--record-tensors sandbox-facing needs --sandbox, and only that needs it")
    if record_most_bytes is not None and chosen is RecordTensors.NONE:
        raise ValueError("--record-below goes with --record-tensors")
    return TensorChoices(
        record_most_bytes=record_most_bytes,
        sources=tuple(Path(name) if Path(name).is_dir() else read_rules(name) for name in tensors),
        record=None if chosen is RecordTensors.NONE else chosen,
        sandbox=tuple(sandbox),
        routing=None if mock_router is None else read_routing(mock_router),
        fold=fold,
        check_replicas=check_replicas,
    )
