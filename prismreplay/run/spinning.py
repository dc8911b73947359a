"""Named pieces of the program that count as faster or slower than they are, for planning.

The program names pieces: ``with torch.profiler.record_function("attention"): ...``. While it is
in such a range, its clock runs at another pace; waits inside take the time that they take.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from prismreplay.errors import PlanError
from prismreplay.runtime.program_position import ProgramPosition

__all__ = ["Spin", "Spinner", "read_spin"]

_FORM = re.compile(r"""\s*name\s*(?P<how>=|~)\s*(?P<quote>["']?)(?P<text>.+?)(?P=quote)\s*""")


class Spin(NamedTuple):
    """Ranges whose names fit the pattern take `factor` times as long as they do."""

    pattern: str
    factor: float


def read_spin(where: str, factor: float) -> Spin:
    """A spin as people type it: ``name = "attention"``, ``name ~ "attn|mlp"`` (a pattern).

    Raises:
        PlanError: it is none.
    """
    match = _FORM.fullmatch(where)
    if match is None:
        raise _wrong(where, "it does not name a piece of the program")
    if not 0 <= factor < float("inf"):
        raise _wrong(where, f"a factor is a number from 0 on, not {factor}")
    text = match["text"]
    if match["how"] == "=":
        return Spin(f"^{re.escape(text)}$", factor)
    try:
        re.compile(text)
    except re.error as error:
        raise _wrong(where, f"no pattern: {error}") from error
    return Spin(text, factor)


def _wrong(where: str, why: str) -> PlanError:
    return PlanError(f"--spin {where}: {why}", hint="for example: --spin 'name ~ \"attn\"' 0.8")


class Paced(Protocol):
    """A `RunClock`, or the `DevicePace` of a GPU."""

    def run_at(self, pace: float) -> None:
        """Go on at another pace."""


class Spinner:
    """Sets the pace of a rank's clock while the program is in certain ranges.

    Attributes:
        entered: ranges that fitted.
    """

    def __init__(self, spins: Sequence[Spin], position: ProgramPosition, clock: Paced) -> None:
        self.entered = 0
        if not spins:
            return
        inside: list[tuple[str, float]] = []
        begin, end = position.begin_range, position.end_range

        @functools.cache
        def factor_of(name: str) -> float | None:
            # Later ones count where several fit.
            fitting = [spin.factor for spin in spins if re.search(spin.pattern, name)]
            return fitting[-1] if fitting else None

        def begin_range(name: str) -> None:
            begin(name)
            factor = factor_of(name)
            if factor is not None:
                self.entered += 1
                inside.append((name, factor))
                clock.run_at(factor)

        def end_range(name: str) -> None:
            end(name)
            places = [at for at, (known, _) in enumerate(inside) if known == name]
            if places:
                del inside[places[-1]]
                clock.run_at(inside[-1][1] if inside else 1.0)

        changed: Any = position
        changed.begin_range, changed.end_range = begin_range, end_range
