"""Codes for a device: which slots an operation's time follows from. No torch, no CUDA in here.

The places of the boundary (a vertex and a round, `prismreplay.boundary.Place`) have slots
(`prismreplay.run.device_slots`).

An operation carries all junctions that it depends on and that no earlier one of its queue has: those
of other queues may be held up by something that waits for this very operation. When a step is
repeated, its operations find the codes of the step before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from prismreplay.boundary import ORIGIN, Boundary, Place, Repeat
from prismreplay.errors import PlanError
from prismreplay.plan import Known
from prismreplay.plugin.advance_code import Code, Final, Item, Kind, Slot, Table, encode
from prismreplay.run.device_slots import PlaceSlots

__all__ = ["AHEAD", "PlaceCodes"]

AHEAD = 4
"""Rounds that operations of one queue may be ahead of those of another."""


@dataclass
class _Step:
    """A point in a queue's course through a repeated step: what was computed up to here."""

    before: _Step | None = None
    computed: tuple[int, ...] = ()
    """Junctions, by the operation that led here."""
    after: dict[Hashable, tuple[Code, _Step]] = field(default_factory=dict)

    def all_computed(self) -> set[int]:
        found: set[int] = set()
        step: _Step | None = self
        while step is not None:
            found.update(step.computed)
            step = step.before
        return found


@dataclass
class _Queue:
    """Where a queue is. `computed` is filled in while codes are new, `step` while they repeat."""

    round_: int
    step: _Step | None
    computed: set[int] | None

    def known(self) -> set[int]:
        """Junctions that earlier operations of the queue compute."""
        if self.computed is None:
            self.computed = set() if self.step is None else self.step.all_computed()
        return self.computed


class _Draft:
    """Items of a code that runs in round `now`."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.items: list[Item] = []
        self.number: dict[Place, int] = {}
        self.junctions: list[int] = []
        self.sure: list[int] = []
        """Junctions that are computed when the operation has ended."""
        self.wanted: set[Place] = set()


class PlaceCodes:
    """Codes for places of the boundary, as one sandbox rank runs them.

    Args:
        boundary: of the plan.
        members: sandbox ranks of each vertex.
        repeat: how the last step is repeated.
        rank: whose codes.
        ahead: rounds that one queue may be ahead of another.
    """

    def __init__(
        self,
        boundary: Boundary,
        members: Mapping[int, Sequence[int]],
        repeat: Repeat | None,
        rank: int,
        *,
        ahead: int = AHEAD,
    ) -> None:
        self._members, self._repeat, self._rank = members, repeat, rank
        self._slots = PlaceSlots(boundary, members, repeat, ahead)
        self.layout = self._slots.layout
        self._sources, self._floors = _edges_of(boundary)
        self._queues: dict[Hashable, _Queue] = {}
        self._first = _Step()
        """Of all rounds in which codes are the same."""
        self._ready: dict[Known, Code] = {}
        """Of operations of the graph itself that depend on nothing of their queue."""
        self._loose: dict[Place, Slot] = {}
        self._loose_count = 0

    def prepare(self, those: Iterable[Known]) -> list[Code]:
        """Make codes before they are asked for, if they are the same in any queue; gives these."""
        for known in those:
            draft = _Draft(0)
            arrivals = self._arrive(draft, known, 0, set(), Final.FIRST)
            if not draft.sure:
                self._ready[known] = self._encoded(arrivals, draft)
        return list(self._ready.values())

    def code(self, known: Known, round_: int, queue: Hashable) -> Code:
        """Of an operation that arrives at some vertices; operations of a queue in their order."""
        if round_ == 0 and not self._loose and (ready := self._ready.get(known)) is not None:
            return ready
        at = self._queue(queue, round_)
        found = self._again(at, known)
        if found is not None:
            return found
        draft = _Draft(round_)
        arrivals = self._arrive(draft, known, round_, at.known(), Final.FIRST)
        return self._made(at, known, arrivals, draft)

    def batch(self, members: Sequence[tuple[Known, int]], queue: Hashable) -> Code:
        """Of operations that are launched as one: each arrives, none waits for another's end.

        It is ready when the last of them ends: transfers are in it. `members`: vertices and
        round of each.
        """
        round_ = max(when for _, when in members)
        at, name = self._queue(queue, round_), tuple((one, round_ - when) for one, when in members)
        found = self._again(at, name)
        if found is not None:
            return found
        draft = _Draft(round_)
        arrivals: list[Slot] = []
        for known, when in members:
            arrivals += self._arrive(draft, known, when, at.known(), Final.NO)
        ends = tuple(
            self._term(draft, (_last(known), when), known.transfer_ns) for known, when in members
        )
        draft.items.append(Item(ends, final=Final.FIRST))
        return self._made(at, name, arrivals, draft)

    def doubtful(
        self, known: Known, round_: int, otherwise: tuple[Known, int], *, first_time: bool = True
    ) -> Code:
        """Of an operation that may also be another: it is ready when either would be.

        If both are, the other one counts. `first_time`: nobody was at `known` before. Another
        sandbox rank that depends on the one that was not the case hears of it with a later
        operation of this rank.
        """
        slot = self._slots.loose(self._loose_count)
        self._loose_count += 1
        other, now = otherwise
        draft, nothing = _Draft(now), set[int]()
        before = dict(self._loose)
        arrivals = [slot, *self._arrive(draft, other, now, nothing, Final.FIRST)]
        if first_time:
            arrivals += self._arrive(draft, known, round_, nothing, Final.SECOND)
        else:
            place = _last(known), round_
            self._need(draft, place, nothing)
            draft.items.append(Item((self._term(draft, place, 0),), final=Final.SECOND))
        code = self._encoded(list(dict.fromkeys(arrivals)), draft)
        # Either may never be ready; who needs it later computes it from the arrival.
        self._loose = before
        places = [(other, now), *([(known, round_)] if first_time else [])]
        for one, when in places:
            for vertex in _vertices(one):
                self._loose[vertex, when] = slot
        return code

    def forget(self, before_round: int) -> None:
        """Nothing of earlier rounds is launched any more; what was may be some rounds behind."""
        self._loose = {
            place: slot
            for place, slot in self._loose.items()
            if not 0 < place[1] < before_round - self._slots.kept
        }

    def place_of(self, slot: Slot, round_: int) -> Place | None:
        """The vertex and round that a SHARED slot belongs to, for messages."""
        if slot.table is not Table.SHARED or slot.kind not in (Kind.FIXED, Kind.RING):
            return None
        when = 0 if slot.kind is Kind.FIXED else round_ - slot.lap
        for vertex in range(1, len(self._slots.is_junction)):
            place = vertex, when
            if self._slots.is_junction[vertex]:
                continue
            if when and not self._slots.repeated[vertex]:
                continue
            ranks = self._members.get(vertex, ())
            slots = [self._slots.slot(place, round_)]
            if len(ranks) > 1:
                slots += [self._slots.arrival(place, rank, round_) for rank in ranks]
            if slot in slots:
                return place
        return None

    def _queue(self, queue: Hashable, round_: int) -> _Queue:
        at = self._queues.get(queue)
        if at is None or at.round_ != round_:
            repeats = round_ > self._slots.back
            at = _Queue(round_, self._first if repeats else None, None if repeats else set())
            self._queues[queue] = at
        return at

    def _again(self, at: _Queue, name: Hashable) -> Code | None:
        """The code that was made when a queue was at this point of the step before."""
        if at.step is None or self._loose:
            return None
        found = at.step.after.get(name)
        if found is None:
            return None
        code, at.step = found
        at.computed = None
        return code

    def _made(self, at: _Queue, name: Hashable, arrivals: Sequence[Slot], draft: _Draft) -> Code:
        """A new code, kept for when the step is repeated."""
        if self._loose:
            at.step = None  # this round goes on without what it could repeat
            self._settle(draft, at.known())
        code = self._encoded(arrivals, draft)
        at.known().update(draft.sure)
        if at.step is not None:
            step = _Step(at.step, tuple(draft.sure))
            at.step.after[name] = code, step
            at.step = step
        return code

    def _encoded(self, arrivals: Sequence[Slot], draft: _Draft) -> Code:
        try:
            return encode(arrivals, draft.items)
        except ValueError as error:
            raise PlanError(
                str(error), hint="a plan with fewer sandbox ranks is smaller"
            ) from error

    def _arrive(
        self, draft: _Draft, known: Known, round_: int, computed: set[int], final: Final
    ) -> list[Slot]:
        """Items for an operation's vertices; gives the slots that its arrival goes to."""
        arrivals: list[Slot] = []
        vertices = _vertices(known)
        last = vertices[-1]
        if len(vertices) > 1 and next(self._sources_of((vertices[0], round_)), None) is not None:
            raise PlanError(
                f"the arrival at vertex {vertices[0]} of the plan depends on virtual ranks",
                hint="a rank arrives when its own work is done",
            )
        for vertex in vertices:
            place = vertex, round_
            if len(self._members.get(vertex, ())) > 1:
                arrivals.append(self._slots.arrival(place, self._rank, draft.now))
            self._loose.pop(place, None)
            for source in self._sources_of(place):
                self._need(draft, source[0], computed)
            self._add(draft, place, own=True, final=final if vertex == last else Final.NO)
            if vertex == last:
                draft.sure = list(draft.junctions)
        return arrivals

    def _settle(self, draft: _Draft, computed: set[int]) -> None:
        """Items for places of doubt: what is launched already, here or elsewhere, may wait for them."""
        for place in self._loose:
            if place[1] <= draft.now:
                self._need(draft, place, computed)

    def _need(self, draft: _Draft, place: Place, computed: set[int]) -> None:
        """Items for the junctions (and places of doubt) that a place depends on, deepest first."""
        under_way = [place]
        while under_way:
            place = under_way[-1]
            if place in draft.number or not self._is_computed_here(draft, place, computed):
                under_way.pop()
                continue
            if place not in draft.wanted:
                draft.wanted.add(place)
                under_way += [source for source, _ in self._sources_of(place)]
                continue
            under_way.pop()
            self._add(draft, place)

    def _is_computed_here(self, draft: _Draft, place: Place, computed: set[int]) -> bool:
        if self._slots.is_junction[place[0]]:
            return place[1] != draft.now or place[0] not in computed
        return place in self._loose

    def _add(
        self, draft: _Draft, place: Place, *, own: bool = False, final: Final = Final.NO
    ) -> None:
        vertex, round_ = place
        terms = [self._term(draft, source, weight) for source, weight in self._sources_of(place)]
        ranks = self._members.get(vertex, ())
        if len(ranks) > 1:
            others = (rank for rank in ranks if not (own and rank == self._rank))
            terms += [(self._slots.arrival(place, rank, draft.now), 0) for rank in others]
        elif place in self._loose:
            terms.append((self._loose[place], 0))
        floor = self._floor(place)
        if floor is not None:
            floor += (round_ - draft.now) * self.layout.period_ns
        draft.number[place] = len(draft.items)
        target = self._slots.slot(place, draft.now)
        draft.items.append(Item(tuple(terms), target, floor, own, final))
        if self._slots.is_junction[vertex] and round_ == draft.now:
            draft.junctions.append(vertex)

    def _term(self, draft: _Draft, source: Place, weight: int) -> tuple[Slot, int]:
        number = draft.number.get(source)
        if number is not None:
            return Slot(Kind.LOCAL, Table.OWN, number), weight
        return self._slots.slot(source, draft.now), weight

    def _sources_of(self, place: Place) -> Iterator[tuple[Place, int]]:
        vertex, round_ = place
        for source, weight in self._sources[vertex]:
            if self._repeat is None or self._slots.is_junction[source]:
                yield (source, round_), weight
                continue
            before = self._repeat.source(source, round_)
            if before is not None:
                yield before, weight

    def _floor(self, place: Place) -> int | None:
        return self._floors.get(place[0])


def _edges_of(boundary: Boundary) -> tuple[list[list[tuple[int, int]]], dict[int, int]]:
    """Sources of each vertex with their weights; and how long after the origin it is, if that counts."""
    sources: list[list[tuple[int, int]]] = []
    floors: dict[int, int] = {}
    edges = zip(boundary.edge_source.tolist(), boundary.edge_weight_ns.tolist(), strict=True)
    offsets = boundary.edge_offsets.tolist()
    for vertex, (begin, end) in enumerate(pairwise(offsets)):
        those = list(islice(edges, end - begin))
        found = [weight for source, weight in those if source == ORIGIN]
        if found:
            floors[vertex] = max(found)
        sources.append([one for one in those if one[0] != ORIGIN])
    return sources, floors


def _vertices(known: Known) -> list[int]:
    """An operation's vertices; it is ready at the last one."""
    return [vertex for vertex in (known.arrival, known.ready) if vertex is not None]


def _last(known: Known) -> int:
    return _vertices(known)[-1]
