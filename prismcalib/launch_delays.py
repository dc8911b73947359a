"""Whose late launches cost the step: the timeline without delays, with one rank's put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from prismcalib.graph import Graph, Int32Array

__all__ = ["OwnDelays", "delays_put_back"]

_MOST = 4


@dataclass(frozen=True)
class OwnDelays:
    """A rank, and the mean step time with no launch delays but its own."""

    rank: int
    step_ns: float


def delays_put_back(
    graph: Graph, rank: Int32Array, mean_step_ns: Callable[[Graph], float], *, starts: bool
) -> tuple[OwnDelays, ...]:
    """The ranks that delay launches most, at most four; those that cost the step most first.

    Args:
        graph: with lags and releases.
        rank: int32[n], of every row.
        mean_step_ns: the mean step time of the graph with some of its lags and releases.
        starts: whether releases tell that a rank began late; not where steps were laid out.
    """
    lag = graph.dep_lag_ns
    owner = np.repeat(rank, np.diff(graph.dep_offsets))
    total = np.zeros(int(rank.max(initial=0)) + 1)
    if lag is not None:
        total += np.bincount(owner, weights=lag, minlength=len(total))
    release = graph.release_ns if starts else None
    first = 0
    if release is not None:
        free = np.diff(graph.dep_offsets) == 0
        first = int(release[free].min(initial=int(release.max(initial=0))))
        late = np.where(free, np.maximum(release - first, 0), 0)
        total += np.bincount(rank, weights=late, minlength=len(total))
    worst = [int(one) for one in np.argsort(-total, kind="stable")[:_MOST] if total[one] > 0]
    found = []
    for one in worst:
        alone = replace(
            graph,
            dep_lag_ns=None if lag is None else np.where(owner == one, lag, 0),
            release_ns=None
            if release is None
            else np.where(rank == one, release, np.minimum(release, first)),
        )
        found.append(OwnDelays(one, mean_step_ns(alone)))
    return tuple(sorted(found, key=lambda each: (-each.step_ns, each.rank)))
