"""How much a rank holds and sends: rough sizes of a transformer, for `bytes` and memory.

Only their proportions matter; nothing here changes a time.
"""

from __future__ import annotations

from prismcalib.synth.spec import JobSpec

__all__ = [
    "activation_bytes",
    "hidden_bytes",
    "layer_parameters",
    "weight_bytes",
    "workspace_bytes",
]

# Per parameter: weight, gradient and optimizer state, in units of the weight.
_STATE = 9


def hidden_bytes(spec: JobSpec) -> int:
    """Hidden states of one microbatch between two layers."""
    return spec.sequence * spec.hidden * spec.dtype.itemsize


def layer_parameters(spec: JobSpec) -> int:
    """Parameters of one layer on one rank."""
    return 12 * spec.hidden**2 // spec.tp


def weight_bytes(spec: JobSpec) -> int:
    """Weights, gradients and optimizer state of one rank."""
    return _STATE * layer_parameters(spec) * spec.layers_per_stage * spec.dtype.itemsize


def activation_bytes(spec: JobSpec) -> int:
    """What one layer keeps of one microbatch until its backward pass."""
    return 16 * hidden_bytes(spec) // spec.tp


def workspace_bytes(spec: JobSpec) -> int:
    """What a computation needs beside."""
    return 4 * hidden_bytes(spec) // spec.tp
