"""Random durations, transfers and gaps.

Every draw has a generator of its own, keyed by what it belongs to (rank and step; channel and
step), so that a rank has the same durations whoever asks, alone or among thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Int64Array
from prismcalib.synth.layout import Layout
from prismcalib.synth.program import Program
from prismcalib.synth.spec import JobSpec

__all__ = ["OwnTimes", "expert_loads", "generator", "own_times"]


class _Use(IntEnum):
    RANK = 0
    CHANNEL = 1
    LOAD = 2


@dataclass(frozen=True, eq=False)
class OwnTimes:
    """Times of R ranks of one stage in one step that do not depend on other ranks.

    Attributes:
        duration_ns: int64[R, T]; of a communication its transfer.
        gap_ns: int64[R, T], idle time after the last dependency; None if there is none.
    """

    duration_ns: Int64Array
    gap_ns: Int64Array | None


def generator(*key: int) -> np.random.Generator:
    """A generator that depends on the key alone."""
    return np.random.Generator(np.random.SFC64(list(key)))


def own_times(layout: Layout, program: Program, ranks: Int64Array, step: int) -> OwnTimes:
    """Draw the times of some ranks of the program's stage."""
    spec = layout.spec
    duration = np.empty((len(ranks), program.rows), np.int64)
    gap = np.empty_like(duration) if spec.launch_gap_ns else None
    member = program.channel >= 0
    keys = layout.all_keys(program.channels, ranks)
    counts = program.counts.tolist()
    users = [np.flatnonzero(program.channel == place) for place in range(len(counts))]
    drawn: dict[int, NDArray[np.float64]] = {}
    for number, rank in enumerate(ranks.tolist()):
        random = generator(spec.seed, _Use.RANK, rank, step)
        pace = _lognormal(random.standard_normal(1), spec.step_jitter)
        pace = pace * spec.stragglers.get(rank, 1.0)
        factor = pace * _lognormal(random.standard_normal(program.rows, np.float32), spec.jitter)
        loads = expert_loads(spec, program, rank, step)
        if loads is not None:
            scaled = ~member & (program.load >= 0)
            factor[scaled] *= loads[program.load[scaled]]
        for key, count, rows in zip(keys[:, number].tolist(), counts, users, strict=True):
            if key not in drawn:
                # By channel, so that the members of an operation agree.
                shared = generator(spec.seed, _Use.CHANNEL, key, step)
                drawn[key] = _lognormal(shared.standard_normal(count), spec.comm_jitter)
            factor[rows] = drawn[key][program.seq[rows]]
        duration[number] = np.rint(program.mean_ns * factor)
        if spec.end_spread_ns:
            late = random.integers(0, spec.end_spread_ns, int(member.sum()), endpoint=True)
            duration[number, member] += late
        if gap is not None:
            idle = random.standard_exponential(program.rows, np.float32) * spec.launch_gap_ns
            gap[number] = np.rint(idle)
    return OwnTimes(duration, gap)


def expert_loads(
    spec: JobSpec, program: Program, rank: int, step: int
) -> NDArray[np.float64] | None:
    """float64[loads], how much of the mean load the experts of a rank get; None: all equal."""
    if spec.ep == 1 or spec.moe_imbalance == 0:
        return None
    random = generator(spec.seed, _Use.LOAD, rank, step)
    return _lognormal(random.standard_normal(program.loads), spec.moe_imbalance)


def _lognormal(normal: NDArray[np.floating], sigma: float) -> NDArray[np.float64]:
    """Factors with mean 1."""
    factors: NDArray[np.float64] = np.exp(normal * sigma - sigma**2 / 2).astype(np.float64)
    return factors
