"""Where ranks sit in the job: pipeline stage and data-parallel replica, told by its groups."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from prismcalib.graph import Int64Array
from prismtrace.schema import TraceHeader

__all__ = ["Places", "rank_places"]

_PIPELINE = re.compile(r"(?:^|[^a-z])pp(?:[^a-z]|$)|pipeline")
_DATA = re.compile(r"(?:^|[^a-z])dp(?:[^a-z]|$)|data[ _-]?parallel")
_EXPERT = re.compile(r"expert|(?:^|[^a-z])e[dp]p?(?:[^a-z]|$)")


@dataclass(frozen=True, eq=False)
class Places:
    """Stage and replica by rank.

    Attributes:
        stage, replica: int64[world size]; -1 for ranks that no group places.
    """

    stage: Int64Array
    replica: Int64Array

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 0 if the groups do not tell."""
        return int(self.stage.max(initial=-1)) + 1

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas; 0 if the groups do not tell."""
        return int(self.replica.max(initial=-1)) + 1


def rank_places(header: TraceHeader) -> Places:
    """Places of all ranks: their position in a pipeline and in a data-parallel group.

    Groups are known by name or description (`pp_3`, `PIPELINE_MODEL_PARALLEL_GROUP`,
    `dp_0`, `data parallel`).
    """
    return Places(stage=_positions(header, _PIPELINE), replica=_positions(header, _DATA, _EXPERT))


def _positions(
    header: TraceHeader, wanted: re.Pattern[str], unwanted: re.Pattern[str] | None = None
) -> Int64Array:
    position = np.full(header.world_size, -1, np.int64)
    for group in reversed(header.groups):
        text = f"{group.name} {group.desc}".lower()
        if wanted.search(text) and not (unwanted and unwanted.search(text)):
            position[list(group.ranks)] = np.arange(len(group.ranks))
    return position
