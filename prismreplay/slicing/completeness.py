"""Has a slice made what its graph has?  With others it makes one timeline only then."""

from __future__ import annotations

import polars as pl

from prismreplay.errors import SliceError
from prismreplay.slicing.progress import Execution
from prismtrace.schema import LOCAL_KINDS
from prismtrace.trace import Trace

__all__ = ["require_whole"]


def require_whole(
    rows: pl.LazyFrame, graph: Trace, execution: Execution, steps: tuple[int, int] | None = None
) -> None:
    """Refuse a slice whose ranks communicate more or less often than in the graph.

    Args:
        rows: of the slice.
        graph: of the whole job.
        execution: which slice it is.
        steps: first and last step that count; None: all, and what is in none.

    Raises:
        SliceError: a rank has made another number of communications; says which, and how many.
    """
    due = _communications(graph.nodes, execution.ranks, steps)
    made = _communications(rows, execution.ranks, steps)
    unlike = [rank for rank in execution.ranks if made.get(rank, 0) != due.get(rank, 0)]
    if not unlike:
        return
    rank = unlike[0]
    has, did = due.get(rank, 0), made.get(rank, 0)
    if did < has:
        text = f"{has - did:,} of the {has:,} communications of the graph were not made"
    else:
        text = f"{did - has:,} communications were made beyond the {has:,} of the graph"
    others = f", and on {len(unlike) - 1} more of its ranks" if len(unlike) > 1 else ""
    of_steps = "" if steps is None else f" in steps {steps[0]}-{steps[1]}"
    raise SliceError(
        f"the program does something else than when its graph was made: on rank {rank} of slice "
        f"{execution.index}{others} {text}{of_steps}",
        where=", ".join(map(str, graph.paths)) or None,
        hint="give the program the arguments that it was collected with, or collect it with these; "
        "--steps FIRST-LAST makes slices of some steps only",
    )


def _communications(
    rows: pl.LazyFrame, ranks: tuple[int, ...], steps: tuple[int, int] | None
) -> dict[int, int]:
    """Rank -> how many."""
    local = [kind.value for kind in LOCAL_KINDS]
    found = rows.filter(
        pl.col("rank").is_in(list(ranks)), ~pl.col("kind").cast(pl.String).is_in(local)
    )
    if steps is not None:
        found = found.filter(pl.col("step").is_between(*steps))
    return dict(found.group_by("rank").len().collect().iter_rows())
