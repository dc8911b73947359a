"""What makes a step slow, and what it would save without: `suspects`, and delays of launches.

What a suspect costs is known by propagating the timeline without its difference:

    cause              what is taken out
    slow-rank          its computation takes as long as the median of the others of its stage
    slow-host          the same
    stage-imbalance    all stages compute equally long; the work stays, it is only spread evenly
    sequence-lengths   each microbatch takes as long as the rank's median one
    slow-network       transfers take as long as those of the peers
    launch-delays      every operation starts as soon as it can

Beside peers by type, a stage in the table of stages saves more than an even split: there its
extra work is gone, and what is uneven within the stage (sequences) as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.blocks import Tables
from prismcalib.graph import Int64Array
from prismcalib.launch_delays import OwnDelays
from prismcalib.peers import Peers
from prismcalib.places import Places
from prismcalib.suspects import Durations, slow_groups, slow_ranks_and_stages
from prismcalib.wording import RankNames
from prismtrace.schema import TraceHeader

__all__ = ["LAUNCH_DELAYS", "Cause", "find_causes"]

Simulate = Callable[[Sequence[Durations]], NDArray[np.float64]]

LAUNCH_DELAYS = "launch-delays"
"""The kind of cause whose saving is a share of the step as it was."""

_LEAST_SAVING = 0.005
_LEAST_PART = 0.25
"""Share of what launch delays cost from which a rank's own are named."""
_MOST_PART = 0.5
"""Share from which they are those of one rank, if no other costs half as much."""


@dataclass(frozen=True)
class Cause:
    """One cause of a slowdown.

    Attributes:
        kind: `slow-rank`, `slow-host`, `stage-imbalance`, `sequence-lengths`, `slow-network` or
            `launch-delays`.
        where: rank, stage or group, as text.
        saves: share of the step time that goes without it; of the step without launch delays,
            of launch delays themselves: of the step as it was.
        without: what that means, in words: the step takes so much less *if* ...
        evidence: the numbers behind it.
        advice: what people do about it.
    """

    kind: str
    where: str
    saves: float
    without: str
    evidence: str
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def find_causes(
    nodes: Tables,
    header: TraceHeader,
    places: Places,
    simulate: Simulate,
    actual: Int64Array,
    base: Int64Array,
    peers: Peers,
    delays: Sequence[OwnDelays] = (),
) -> tuple[Cause, ...]:
    """Name the causes that cost half a percent of the step time or more, largest first.

    Args:
        nodes: of the trace, in graph order.
        header: of the trace.
        places: stages and replicas of its ranks.
        simulate: mean step time without launch delays for each of some sets of durations.
        actual: int64[n], durations without waiting.
        base: int64[S], step times as they were.
        peers: what the tables of parts compare with; causes say how they differ from it.
        delays: what the launch delays of single ranks cost, largest first, if that is known.
    """
    suspects = [
        *slow_ranks_and_stages(nodes, header, places, actual, peers),
        *slow_groups(nodes, header, actual),
    ]
    times = simulate([lambda: actual, *(suspect.durations for suspect in suspects)])
    now = float(times[0]) or 1.0
    causes = [
        Cause(
            suspect.kind,
            suspect.where,
            1 - float(time) / now,
            suspect.without,
            suspect.evidence,
            suspect.advice,
        )
        for suspect, time in zip(suspects, times[1:], strict=True)
    ]
    causes.append(_launch_delays(now, float(base.mean()), delays, RankNames.of(header)))
    found = [cause for cause in causes if cause.saves >= _LEAST_SAVING]
    return tuple(sorted(found, key=lambda cause: -cause.saves))


def _launch_delays(
    without: float, base: float, delays: Sequence[OwnDelays], names: RankNames
) -> Cause:
    lost = base - without
    whose = [one for one in delays if one.step_ns - without > _LEAST_PART * lost]
    where, alone = "host", ""
    if whose:
        alone = "; with the delays of one rank only: " + ", ".join(
            f"{one.step_ns / 1e6:,.3f} ms of rank {names.text(one.rank)}" for one in whose
        )
        # One that explains most of it, and nobody else half as much.
        first, second, *_ = [*(one.step_ns - without for one in whose), 0.0]
        if first > _MOST_PART * lost and second <= first / 2:
            where = f"host of rank {names.text(whose[0].rank)}"
    return Cause(
        LAUNCH_DELAYS,
        where,
        1 - without / base if base else 0.0,
        "if every operation starts as soon as it can (share of the step as it was)",
        f"operations start later than they could; without that the step takes "
        f"{without / 1e6:,.3f} ms instead of {base / 1e6:,.3f} ms{alone}",
        "look for garbage collection, data loading and synchronising calls on the host",
    )
