"""In which order a pipeline stage computes: 1F1B and interleaved 1F1B.

Method: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021), section 2.2.
"""

from __future__ import annotations

from typing import NamedTuple

from prismcalib.synth.spec import JobSpec
from prismtrace.schema import Phase

__all__ = ["Pass", "stage_order"]


class Pass(NamedTuple):
    """Forward or backward of one microbatch through one model chunk."""

    phase: Phase
    microbatch: int
    chunk: int


def stage_order(spec: JobSpec, stage: int) -> list[Pass]:
    """All passes of one step on a pipeline stage, in issue order."""
    forward = _ramp(spec, Phase.FORWARD)
    backward = _ramp(spec, Phase.BACKWARD)
    behind = spec.pp - stage - 1
    if spec.chunks == 1:
        warmup = behind
    elif spec.microbatches == spec.pp:
        warmup = len(forward)
    else:
        warmup = 2 * behind + (spec.chunks - 1) * spec.pp
    warmup = min(warmup, len(forward))
    steady = len(forward) - warmup
    order = forward[:warmup]
    for number in range(steady):
        order += [forward[warmup + number], backward[number]]
    return order + backward[steady:]


def _ramp(spec: JobSpec, phase: Phase) -> list[Pass]:
    """All passes of one phase: groups of pp microbatches go through all chunks in turn."""
    chunks = list(range(spec.chunks))
    if phase is Phase.BACKWARD:
        chunks.reverse()
    size = spec.pp if spec.chunks > 1 else spec.microbatches
    return [
        Pass(phase, first + within, chunk)
        for first in range(0, spec.microbatches, size)
        for chunk in chunks
        for within in range(size)
    ]
