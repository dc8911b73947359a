"""What people say in the names of annotations: which step, which microbatch, which part of it.

Or that something is copied between a device's memory and the host's, and nothing else done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from prismtrace.schema import Phase

__all__ = ["Annotation", "phase_in_name", "read_annotation"]

# Ranges that people and torch write around the parts of a step.
_PHASES = (
    (re.compile(r"^Optimizer\.step|\boptimizer(_step)?\b", re.IGNORECASE), Phase.OPTIMIZER),
    (re.compile(r"\bbackward\b", re.IGNORECASE), Phase.BACKWARD),
    (re.compile(r"\bforward\b", re.IGNORECASE), Phase.FORWARD),
)
_STEP = re.compile(
    r"(?:profiler|train(?:ing)?|global)?[ _]?(?:step|iteration|iter)[ _#:=]*(\d{1,9})",
    re.IGNORECASE,
)
_COPY = re.compile(r"(?:offload|reload|memcpy|h2d|d2h|htod|dtoh)(?![a-z])", re.IGNORECASE)
_MICROBATCH = re.compile(r"(?:micro[ _-]?batch|mb)[ _#:=]*(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True)
class Annotation:
    """What a name says; null where it says nothing.

    `copies`: it begins with offload, reload, memcpy, h2d or d2h.
    """

    step: int | None = None
    microbatch: int | None = None
    phase: Phase | None = None
    copies: bool = False


def phase_in_name(name: str) -> Phase | None:
    """The part of a step that a range of this name is around."""
    return next((phase for rule, phase in _PHASES if rule.search(name)), None)


@lru_cache(maxsize=4096)
def read_annotation(name: str) -> Annotation:
    """What the name of a range says, such as ``step 3``, ``ProfilerStep#3``, ``microbatch 2``."""
    step, microbatch = _STEP.fullmatch(name), _MICROBATCH.fullmatch(name)
    return Annotation(
        step=None if step is None else int(step[1]),
        microbatch=None if microbatch is None else int(microbatch[1]),
        phase=phase_in_name(name),
        copies=_COPY.match(name) is not None,
    )
