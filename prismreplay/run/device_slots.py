"""Where places of the boundary lie in a device's tables.

A place (a vertex and a round, `prismreplay.boundary.Place`) has a slot in one of two tables
(`prismreplay.plugin.advance_code`): operations of sandbox ranks in the SHARED one, where all ranks
see when they are ready, junctions in each rank's OWN one. What is in the graph itself has slots of
its own; those of repetitions of the last step are used again in a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prismreplay.boundary import Boundary, Place, Repeat, VertexKind
from prismreplay.errors import PlanError
from prismreplay.plugin.advance_code import FIRST_LAP, LAPS, Kind, Layout, Slot, Table

__all__ = ["PlaceSlots"]

_LOOSE = 1024
"""Arrivals kept for operations that may not be the ones that they seem to be."""


class PlaceSlots:
    """Where places lie in the tables.

    Args:
        boundary: of the plan.
        members: sandbox ranks of each vertex.
        repeat: how the last step is repeated.
        ahead: rounds that one queue may be ahead of another.
    """

    def __init__(
        self,
        boundary: Boundary,
        members: Mapping[int, Sequence[int]],
        repeat: Repeat | None,
        ahead: int,
    ) -> None:
        junction = boundary.kind == VertexKind.JUNCTION
        shared = ~junction
        repeated = shared & (repeat.steps_before <= 0) if repeat else np.zeros_like(shared)
        self.is_junction: list[bool] = junction.tolist()
        self.repeated: list[bool] = repeated.tolist()
        self.back = 0 if repeat is None else max(0, int(repeat.steps_before.max(initial=0)))
        self.kept = self.back + ahead
        """Rounds for which somebody may wait for a place of doubt, which depends on `back` more."""
        # Lists: single numbers of arrays take long to get, and each launch gets some.
        fixed_of = np.where(junction, np.cumsum(junction), np.cumsum(shared)) - 1
        ring_of = np.where(junction, np.cumsum(junction), np.cumsum(repeated)) - 1
        self._fixed: list[int] = fixed_of.tolist()
        self._ring: list[int] = ring_of.tolist()
        fixed, ring = int(shared.sum()), int(repeated.sum())
        self._fixed_of: dict[tuple[int, int], int] = {}
        self._ring_of: dict[tuple[int, int], int] = {}
        for vertex, ranks in members.items():
            if len(ranks) > 1:
                for rank in ranks:
                    self._fixed_of[vertex, rank] = fixed
                    fixed += 1
                    if repeated[vertex]:
                        self._ring_of[vertex, rank] = ring
                        ring += 1
        junctions = int(junction.sum())
        self._loose_at = junctions
        self.layout = Layout(
            rounds=self.kept + self.back + ahead,
            fixed=(fixed, junctions + _LOOSE),
            ring=(ring, junctions) if repeat else (0, 0),
            period_ns=repeat.period_ns if repeat else 0,
        )

    def slot(self, place: Place, now: int) -> Slot:
        """Of a vertex, for a code that runs in round `now`."""
        vertex, round_ = place
        table = Table.OWN if self.is_junction[vertex] else Table.SHARED
        if round_ == 0:
            return Slot(Kind.FIXED, table, self._fixed[vertex], FIRST_LAP)
        if table is Table.SHARED and not self.repeated[vertex]:
            raise PlanError(
                f"vertex {vertex} of the plan lies before the step that is repeated",
                hint="operations of earlier steps happen once",
            )
        return Slot(Kind.RING, table, self._ring[vertex], now - round_)

    def arrival(self, place: Place, rank: int, now: int) -> Slot:
        """Of a member's arrival at a vertex that several sandbox ranks meet at."""
        vertex, round_ = place
        if round_ == 0:
            return Slot(Kind.FIXED, Table.SHARED, self._fixed_of[vertex, rank], FIRST_LAP)
        return Slot(Kind.RING, Table.SHARED, self._ring_of[vertex, rank], now - round_)

    def loose(self, number: int) -> Slot:
        """Of an arrival that no place has for sure."""
        lap, at = divmod(number, _LOOSE)
        return Slot(Kind.FIXED, Table.OWN, self._loose_at + at, FIRST_LAP + lap % LAPS)
