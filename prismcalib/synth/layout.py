"""Which ranks belong together: axes, process groups and the channels they communicate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from prismcalib.graph import Int64Array
from prismcalib.synth.spec import JobSpec
from prismtrace.schema import ProcessGroup

__all__ = ["Axis", "Channel", "Layout"]

Axis = Literal["world", "tp", "pp", "dp", "ep", "edp"]

_DESCRIPTIONS: dict[Axis, str] = {
    "world": "all ranks",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "ep": "expert parallel",
    "edp": "data parallel of experts",
}


@dataclass(frozen=True)
class Channel:
    """Where a stage counts its operations: a group, for p2p one direction between two stages.

    Sender and receiver describe the same channel, so it is a key that both sides share.
    """

    axis: Axis
    source: int = 0
    target: int = 0

    @property
    def is_p2p(self) -> bool:
        """True between two pipeline stages."""
        return self.axis == "pp"


@dataclass(frozen=True)
class Layout:
    """Process groups of a job.

    Attributes:
        spec: the job.
        groups: all process groups with two ranks or more; ids count from 0.
    """

    spec: JobSpec
    groups: tuple[ProcessGroup, ...] = field(init=False)
    _group_of: dict[Axis, Int64Array] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups: list[ProcessGroup] = []
        group_of: dict[Axis, Int64Array] = {}
        for axis, label in self._labels().items():
            members = np.argsort(label, kind="stable").reshape(int(label.max()) + 1, -1)
            if members.shape[1] < 2:
                continue
            group_of[axis] = label + len(groups)
            groups += [
                ProcessGroup(
                    id=len(groups) + number,
                    name=axis if axis == "world" else f"{axis}_{number}",
                    desc=_DESCRIPTIONS[axis],
                    ranks=tuple(ranks),
                )
                for number, ranks in enumerate(members.tolist())
            ]
        object.__setattr__(self, "groups", tuple(groups))
        object.__setattr__(self, "_group_of", group_of)

    def _labels(self) -> dict[Axis, Int64Array]:
        """int64[world] per axis: equal for ranks of one group, counted from 0."""
        spec = self.spec
        stage, inner = np.divmod(np.arange(spec.world_size), spec.ranks_per_stage)
        replica, lane = np.divmod(inner, spec.tp)
        island, expert = np.divmod(replica, spec.ep)
        islands = spec.dp // spec.ep
        labels: dict[Axis, Int64Array] = {
            "world": np.zeros(spec.world_size, np.int64),
            "tp": stage * spec.dp + replica,
            "pp": inner,
            "dp": stage * spec.tp + lane,
        }
        if spec.ep > 1:
            labels["ep"] = (stage * islands + island) * spec.tp + lane
            labels["edp"] = (stage * spec.ep + expert) * spec.tp + lane
        return labels

    def has(self, axis: Axis) -> bool:
        """Whether groups of this kind have more than one rank."""
        return axis in self._group_of

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank."""
        return rank // self.spec.ranks_per_stage

    def stage_ranks(self, stage: int) -> range:
        """Ranks of a pipeline stage."""
        size = self.spec.ranks_per_stage
        return range(stage * size, (stage + 1) * size)

    def group_ids(self, channel: Channel, ranks: Int64Array) -> Int64Array:
        """int64[R], id of the group in which each rank uses the channel."""
        return self._group_of[channel.axis][ranks]

    def keys(self, channel: Channel, ranks: Int64Array) -> Int64Array:
        """int64[R], equal for ranks that count operations of the channel together."""
        between = channel.source * self.spec.pp + channel.target
        return self.group_ids(channel, ranks) * self.spec.pp**2 + between

    def all_keys(self, channels: Sequence[Channel], ranks: Int64Array) -> Int64Array:
        """int64[channels, R], `keys` of several channels."""
        keys = np.empty((len(channels), len(ranks)), np.int64)
        for place, channel in enumerate(channels):
            keys[place] = self.keys(channel, ranks)
        return keys
