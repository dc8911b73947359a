"""Have the durations of slices settled?  One round of a campaign against the next.

In the first round virtual ranks arrive early, which removes bubbles, and with them changes what
overlaps. In the next they arrive when the first round's timeline says, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from prismcalib.comparing import compare

__all__ = ["Moved", "Round", "difference"]

_MOST_SHOWN = 5


@dataclass(frozen=True)
class Moved:
    """A class of operations whose durations changed, per step and rank."""

    name: str
    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class Round:
    """What changed from one round to the next.

    Attributes:
        number: of the later round, from 1.
        before_ns, after_ns: step times of the two timelines.
        moved_share: how much the durations of classes of operations changed, as a share of all.
        settled: whether both changes are below the tolerance.
        moved: the classes that changed most.
    """

    number: int
    before_ns: int
    after_ns: int
    moved_share: float
    settled: bool
    moved: tuple[Moved, ...]

    @property
    def step_share(self) -> float:
        """Change of the step time, as a share of it."""
        return abs(self.after_ns - self.before_ns) / max(1, self.before_ns)


def difference(before: Path, after: Path, number: int, tolerance: float) -> Round:
    """Compare the timelines of two rounds.

    Args:
        before: calibrated trace of the earlier round.
        after: of the later one.
        number: of the later one.
        tolerance: changes up to this share count as none.
    """
    found = compare(before, after, effects=0)
    classes = found.classes.with_columns(
        pl.col("time_a_ns", "time_b_ns").fill_null(0),
        text=pl.concat_str(
            [pl.col("kind").cast(pl.String), pl.col("phase"), pl.col("group"), pl.col("name")],
            separator=" ",
            ignore_nulls=True,
        ),
    ).with_columns(moved=(pl.col("time_b_ns") - pl.col("time_a_ns")).abs())
    total = max(1.0, float(classes["time_a_ns"].sum()))
    share = float(classes["moved"].sum()) / total
    top = classes.filter(pl.col("moved") > 0).sort("moved", descending=True).head(_MOST_SHOWN)
    shown = top.select("text", "time_a_ns", "time_b_ns").iter_rows()
    moved = tuple(Moved(text, round(old), round(new)) for text, old, new in shown)
    step_share = abs(found.change_ns) / max(1, found.step_a_ns)
    return Round(
        number=number,
        before_ns=found.step_a_ns,
        after_ns=found.step_b_ns,
        moved_share=share,
        settled=max(share, step_share) <= tolerance,
        moved=moved,
    )
