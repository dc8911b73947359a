"""Errors of `prismreplay`, a branch of the tree in `prismtrace.errors`.

ReplayError                  a run on this machine cannot start or went wrong
├── TensorRulesError         rules that supply tensors are wrong, or contradict each other
├── TensorRecordingError     recorded tensors are damaged, missing, or of another job
└── FoldError                replicas cannot stand for each other
"""

from __future__ import annotations

from prismtrace.errors import PrismError

__all__ = ["PlanError", "ReplayError"]


class ReplayError(PrismError):
    """A run cannot start on this machine, or went wrong."""

    code = "replay"


class PlanError(ReplayError):
    """A plan cannot be made, or does not fit what happens."""

    code = "plan"


class TensorRulesError(ReplayError):
    """Rules that supply tensors are wrong, contradict each other, or cannot make a tensor."""

    code = "tensor-rules"


class TensorRecordingError(ReplayError):
    """Recorded tensors are damaged, missing, or those of another job."""

    code = "tensor-recording"


class FoldError(ReplayError):
    """Replicas cannot stand for each other: they are not identical, or nothing says which."""

    code = "fold"
