"""Lay two ranks' sequences of operations on each other.

Recordings of different ranks may begin and end at different operations, so the k-th of one
rank may be the (k+d)-th of another. Two things tell the shift d. Operations that are laid on
each other must look alike: same kind, dtype, size and step number, where known. And they must
be able to have happened together: no member of a collective ends before another one starts,
on a common clock. Ranks of one host have one; between others any offset is allowed, as long
as one offset fits all operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prismtrace.converters.kineto.carried import CommOp
from prismtrace.schema import ROOTED_KINDS, DType, Kind

__all__ = ["OpSequence", "Overlay", "agree", "best_overlay", "make_sequence", "violations"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MAX_SHIFT = 64
# Timestamps of different devices of one host agree to tens of µs.
_TOLERANCE_NS = 100_000
# Clocks of different hosts run apart by up to some tens of µs a second.
_DRIFT = 50e-6
# Ends of one collective differ between its members by some tens of µs.
_NOISE_NS = 20_000
_KIND_CODE = {kind: code for code, kind in enumerate(Kind)}
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(DType)}
_OTHER = _KIND_CODE[Kind.OTHER_COMM]
_LOOSE = [_KIND_CODE[kind] for kind in (*ROOTED_KINDS, Kind.OTHER_COMM)]
_UNKNOWN = -1


@dataclass(frozen=True)
class OpSequence:
    """Operations of one rank in one group (or from one rank to another), in issue order.

    Arrays of length n: `kind`, `dtype` and `step` as codes, `nbytes`; −1 is unknown.
    """

    rank: int
    host: str | None
    positions: Ints
    """Where the operations are among all communications of the rank."""
    kind: Ints
    dtype: Ints
    nbytes: Ints
    step: Ints
    start: Ints
    end: Ints
    tag: Ints

    def __len__(self) -> int:
        return len(self.positions)

    def describe(self, k: int) -> str:
        """The k-th operation for an error message."""
        size, step, dtype = self.nbytes[k], self.step[k], self.dtype[k]
        return (
            f"{list(Kind)[self.kind[k]]}"
            + (f" of {list(DType)[dtype]}" if dtype != _UNKNOWN else "")
            + (f", {size} bytes," if size != _UNKNOWN else "")
            + (f" in step {step}" if step != _UNKNOWN else "")
        )

    def without_steps(self) -> OpSequence:
        """The same operations with unknown step numbers."""
        return replace(self, step=np.full_like(self.step, _UNKNOWN))


def make_sequence(
    rank: int,
    host: str | None,
    positions: Sequence[int],
    comm: Sequence[CommOp],
    nbytes: Sequence[int | None],
    step: Sequence[int | None],
    start: Ints,
    end: Ints,
    tag: Ints | None = None,
) -> OpSequence:
    """Gather the operations at `positions`; the other arguments cover all of the rank."""
    chosen = [comm[position] for position in positions]
    # Sizes of all_to_all differ between ranks by nature.
    sizes = [
        None if op.kind is Kind.ALL_TO_ALL else nbytes[position]
        for op, position in zip(chosen, positions, strict=True)
    ]
    index = np.array(positions, dtype=np.int64)
    return OpSequence(
        rank=rank,
        host=host,
        positions=index,
        kind=_codes([_KIND_CODE[op.kind] for op in chosen]),
        dtype=_codes([None if op.dtype is None else _DTYPE_CODE[op.dtype] for op in chosen]),
        nbytes=_codes(sizes),
        step=_codes([step[position] for position in positions]),
        start=start[index],
        end=end[index],
        tag=np.full(len(index), _UNKNOWN, np.int64) if tag is None else tag[index],
    )


def _codes(values: Sequence[int | None]) -> Ints:
    return np.array([_UNKNOWN if value is None else value for value in values], dtype=np.int64)


def agree(a: OpSequence, b: OpSequence, at: Ints | slice, bt: Ints | slice, *, p2p: bool) -> Bools:
    """Where operations of two sequences look alike; what is unknown agrees with anything."""

    def same(x: Ints, y: Ints, unknown: int) -> Bools:
        result: Bools = (x == y) | (x == unknown) | (y == unknown)
        return result

    result = (
        same(a.dtype[at], b.dtype[bt], _UNKNOWN)
        & same(a.nbytes[at], b.nbytes[bt], _UNKNOWN)
        & same(a.step[at], b.step[bt], _UNKNOWN)
        & same(a.tag[at], b.tag[bt], _UNKNOWN)
    )
    if not p2p:
        result &= same(a.kind[at], b.kind[bt], _OTHER)
    return result


def violations(a: OpSequence, b: OpSequence, at: Ints | slice, bt: Ints | slice) -> int:
    """How many pairs of operations cannot have happened together, whatever the clocks say.

    A pair bounds the offset of b's clock from both sides: neither may start after the other
    has ended. The offset that fits most pairs is taken (zero on one host); the rest count.
    Rooted collectives say nothing: the root of a broadcast may end before others start.
    """
    both = ~np.isin(a.kind[at], _LOOSE) & ~np.isin(b.kind[bt], _LOOSE)
    low = (a.start[at] - b.end[bt] - _TOLERANCE_NS)[both]
    high = (a.end[at] - b.start[bt] + _TOLERANCE_NS)[both]
    if _one_clock(a, b):
        fitting = int(((low <= 0) & (high >= 0)).sum())
    elif len(low) == 0:
        fitting = 0
    else:
        ends = a.end[at][both]
        drift = (np.abs(ends - (ends[0] + ends[-1]) // 2) * _DRIFT).astype(np.int64)
        low, high = np.sort(low - drift), np.sort(high + drift)
        opened = np.arange(1, len(low) + 1)
        closed = np.searchsorted(high, low, side="left")
        fitting = int((opened - closed).max(initial=0))
    return len(low) - fitting


@dataclass(frozen=True)
class Overlay:
    """Two sequences on each other: b[k] lies on a[k + shift]."""

    shift: int
    overlap: int
    agreeing: int
    violations: int
    ambiguous: bool = False
    """Another shift is as good: operations repeat with a constant period."""

    def slices(self, a: OpSequence, b: OpSequence) -> tuple[slice, slice]:
        """The parts of a and b that lie on each other."""
        return _overlap(len(a), len(b), self.shift)


def _overlap(a: int, b: int, shift: int) -> tuple[slice, slice]:
    first = max(0, shift)
    last = max(first, min(a, b + shift))
    return slice(first, last), slice(first - shift, last - shift)


def best_overlay(a: OpSequence, b: OpSequence, *, p2p: bool = False) -> Overlay:
    """The overlay on which most operations look alike and could have happened together.

    Equally good ones are told apart by how constant the difference between ends is (on one
    clock: how small), then by the smallest shift. Sends may end before their recv starts (the
    backend buffers), so p2p goes by looks alone.
    """
    longest = max(len(a), len(b))
    whole = _rate(a, b, 0, p2p=p2p)
    if len(a) == len(b) == whole.agreeing and not whole.violations:
        return whole
    least = _least_overlap(a, b)
    tried: list[tuple[int, int, int, int, int]] = []
    for shift in _shifts(a, b):
        at, bt = _overlap(len(a), len(b), shift)
        size = at.stop - at.start
        if size >= least:
            agreeing = int(agree(a, b, at, bt, p2p=p2p).sum())
            # Operations that look different or are left without a partner.
            tried.append((longest - agreeing, abs(shift), shift, size, agreeing))
    found: list[tuple[tuple[int, int, float], Overlay]] = []
    lowest = longest * 3
    for cost, _, shift, size, agreeing in sorted(tried):
        if cost > lowest:
            break
        overlay = _rate(a, b, shift, p2p=p2p)
        lowest = min(lowest, cost + overlay.violations)
        spread = _spread(a, b, *overlay.slices(a, b)) if size > 3 else 0.0
        found.append(((cost + overlay.violations, size - agreeing, spread), overlay))
    if not found:
        return Overlay(0, 0, 0, 0)
    # Stable: of equally good ones the smallest shift comes first.
    (best_key, best), *others = sorted(found, key=lambda entry: entry[0])
    limit = 2 * best_key[2] + _NOISE_NS
    rivals = [key for key, _ in others if key[:2] == best_key[:2] and key[2] < limit]
    return replace(best, ambiguous=bool(rivals))


def _rate(a: OpSequence, b: OpSequence, shift: int, *, p2p: bool) -> Overlay:
    at, bt = _overlap(len(a), len(b), shift)
    agreeing = int(agree(a, b, at, bt, p2p=p2p).sum())
    return Overlay(shift, at.stop - at.start, agreeing, 0 if p2p else violations(a, b, at, bt))


def _least_overlap(a: OpSequence, b: OpSequence) -> int:
    """Half of the operations that both may have recorded.

    Windows differ at their ends. What would leave most operations alone is no explanation,
    unless the numbers of the steps say so.
    """
    shared = min(
        int((np.isin(x.step, y.step) | (x.step == _UNKNOWN)).sum()) for x, y in ((a, b), (b, a))
    )
    return max(1, (shared + 1) // 2)


def _shifts(a: OpSequence, b: OpSequence) -> list[int]:
    """Shifts worth trying: small ones, and those at which equal step numbers meet."""
    reach = min(max(len(a), len(b)), _MAX_SHIFT + abs(len(a) - len(b)))
    shifts = set(range(-reach, reach + 1))
    for step in np.intersect1d(a.step, b.step):
        if step != _UNKNOWN:
            meeting = int(np.argmax(a.step == step) - np.argmax(b.step == step))
            shifts |= set(range(meeting - 2, meeting + 3))
    return sorted(shifts, key=lambda shift: (abs(shift), shift))


def _one_clock(a: OpSequence, b: OpSequence) -> bool:
    return a.host is not None and a.host == b.host


def _spread(a: OpSequence, b: OpSequence, at: slice, bt: slice) -> float:
    difference = a.end[at] - b.end[bt]
    centre = 0.0 if _one_clock(a, b) else np.median(difference)
    return float(np.median(np.abs(difference - centre)))
