"""Errors of `prismreplay`, a branch of the tree in `prismtrace.errors`.

ReplayError                  a run on this machine cannot start or went wrong
├── PlanError                a plan cannot be made, or does not fit what happens
├── ProgramError             the program cannot be found or started
├── RankFailedError          a rank failed, or was killed
├── DeadlockError            ranks wait for what never comes
├── MismatchError            members of a group make communications that do not fit
├── HandoverError            no space for the tensors that ranks hand over
├── SwapError                ranks' GPU memory has no room, or cannot be moved
├── UnsupportedOperationError  a communication, or a method of torch, that is not covered
├── TensorRulesError         rules that supply tensors are wrong, or contradict each other
├── TensorRecordingError     recorded tensors are damaged, missing, or of another job
├── MockRouterError          shares of experts are impossible, or do not fit the routers
├── FoldError                replicas cannot stand for each other
├── HostsError               hosts of one run do not find each other
├── CommBenchError           communications cannot be measured here
├── PluginError              the CUDA plugin cannot do what it is asked
│   ├── PluginUnavailableError  a GPU, its driver, cuda-python or a CUDA torch is missing
│   └── PluginTimeoutError   a party of a pruned communication did not arrive
└── SliceError               other jobs' slices in the way, or a slice that its graph does not fit
"""

from __future__ import annotations

from prismtrace.errors import PrismError

__all__ = [
    "CommBenchError",
    "DeadlockError",
    "FoldError",
    "HandoverError",
    "HostsError",
    "MismatchError",
    "MockRouterError",
    "PlanError",
    "PluginError",
    "PluginTimeoutError",
    "PluginUnavailableError",
    "ProgramError",
    "RankFailedError",
    "ReplayError",
    "SliceError",
    "SwapError",
    "TensorRecordingError",
    "TensorRulesError",
    "UnsupportedOperationError",
]


class ReplayError(PrismError):
    """A run cannot start on this machine, or went wrong."""

    code = "replay"


class PlanError(ReplayError):
    """A plan cannot be made, or does not fit what happens."""

    code = "plan"


class TensorRulesError(ReplayError):
    """Rules that supply tensors are wrong, contradict each other, or cannot make a tensor."""

    code = "tensor-rules"
    usual_hint = "docs/guides/tensors.md lists what rules may say"


class TensorRecordingError(ReplayError):
    """Recorded tensors are damaged, missing, or those of another job."""

    code = "tensor-recording"


class FoldError(ReplayError):
    """Replicas cannot stand for each other: they are not identical, or nothing says which."""

    code = "fold"


class ProgramError(ReplayError):
    """The program cannot be found, or is no Python."""

    code = "program"
    usual_hint = "run it by itself first: python SCRIPT.py, or python -m MODULE"


class RankFailedError(ReplayError):
    """A rank raised, ended with an exit code, or was killed; the run ends with it.

    `report` is its traceback, or the end of what it printed.
    """

    code = "rank-failed"
    usual_hint = "its log says why, unless the disk is full; the other ranks were stopped"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        report: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.report = report


class DeadlockError(ReplayError):
    """No rank can go on: those that are left wait for each other, or for ranks that have ended.

    `report` says who waits in which operation for whom, with the program's lines.
    """

    code = "deadlock"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        report: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.report = report


class MismatchError(ReplayError):
    """Two ranks of a group make communications that cannot belong together."""

    code = "mismatch"


class HandoverError(ReplayError):
    """There is no space for the tensors that ranks hand over."""

    code = "hand-over"


class SwapError(ReplayError):
    """Ranks' GPU memory has no room anywhere, or the driver cannot move it.

    `usable` tells whether the rank that it is about can still compute where it is.
    """

    code = "gpu-memory"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        usable: bool = False,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.usable = usable


class UnsupportedOperationError(ReplayError):
    """A communication, or a method of torch's process groups, that is not covered."""

    code = "unsupported-operation"
    usual_hint = "docs/reference/communication.md lists what is covered"


class MockRouterError(ReplayError):
    """A mock router's shares are impossible, or do not fit the program's routers."""

    code = "mock-router"
    usual_hint = "docs/guides/tensors.md shows a file of shares"


class SliceError(ReplayError):
    """A graph cannot be sliced, slices do not fit it, or files in the way are none of this job."""

    code = "slice"


class CommBenchError(ReplayError):
    """Communications cannot be measured with what is here."""

    code = "comm-bench"


class HostsError(ReplayError):
    """Hosts of one run do not find each other, or one of them is gone."""

    code = "hosts"


class PluginError(ReplayError):
    """The CUDA plugin cannot do what it is asked, or the driver refuses."""

    code = "plugin"


class PluginUnavailableError(PluginError):
    """What the CUDA plugin needs is missing: a GPU, its driver, cuda-python, a CUDA torch."""

    code = "plugin-unavailable"


class PluginTimeoutError(PluginError):
    """A party of a pruned communication did not arrive in time."""

    code = "plugin-timeout"
