"""Words that depend on the trace."""

from __future__ import annotations

from dataclasses import dataclass

from prismtrace.console import counted
from prismtrace.headers import CORE_WAIT, SHARED_CORES
from prismtrace.ranks import parse_ranks
from prismtrace.schema import TraceHeader, TraceKind

__all__ = [
    "CAUSE_MEANING",
    "IDLE_BETWEEN",
    "IDLE_INSIDE",
    "ONE_STEP_PATH",
    "PART_MEANINGS",
    "RankNames",
    "doubts",
    "merge_first",
    "no_peers",
    "parts_of_spans",
    "percent_text",
    "share_text",
    "shared_cores_text",
    "start_text",
]

IDLE_BETWEEN = "idle between spans"
"""Nothing of the rank ran: from the end of what a span waited for to its start."""

IDLE_INSIDE = "idle inside spans"
"""What `x_busy_ns` leaves of the durations of computation: between the kernels of a span."""

ONE_STEP_PATH = (
    "nothing recorded leads from one step to the next: the path shows only the last; "
    "`prismcalib stragglers` judges all steps"
)
"""Where more than half of the window lies before the critical path starts."""

_MOSTLY_START = 0.5
"""Share of the path up to the end of the first step from which on it says little about the others."""


def start_text(found: tuple[float, tuple[int, int]] | None) -> str:
    """That a path is mostly the job's start and first step, and how to see the others.

    Empty if it is not; `found` is what `CriticalPath.start_share` gives.
    """
    if found is None or found[0] < _MOSTLY_START:
        return ""
    share, (first, last) = found
    return (
        f"{percent_text(share)} of the critical path is the job's start and first step; to see the "
        f"others alone, ask for them: `--steps {first}-{last}`"
    )


_SAVES = (
    "saves: share of the step without launch delays that goes if only this part is like its peers "
    "(below 0: operations that were quicker than their peers' get longer, too)"
)
_DELAYS = (
    "only durations are compared: what starts late because its host was late (at kernel grain all idle "
    "time, else what lies between spans) is in none of the tables, but in the cause launch-delays"
)
PART_MEANINGS = (
    "slowdown: the ideal step with only this part's own durations put back, over the ideal step",
    _SAVES,
    _DELAYS,
)
"""What the two numbers of a part mean, wherever they are shown, and what is not in them."""

CAUSE_MEANING = (
    "a cause takes out just the difference that its line names, of a rank or group the same share "
    "of every operation; where the tables make a part like its peers, also what single operations "
    "took longer goes, and slow transfers, so the same rank may save more there"
)
"""Why a cause and a part of the same name do not save the same."""


_OFF = 0.03
"""Share of the window that propagated times may differ from the observed ones before it is told."""


def _longer_text(header: TraceHeader) -> str:
    """That times of a merged recording are not those observed, and why; empty if they nearly are."""
    told = header.extra.get("merge", {})
    recorded, propagated = told.get("recorded_ns"), told.get("propagated_ns")
    if not recorded or propagated is None or abs(propagated / recorded - 1) <= _OFF:
        return ""
    clamps = [told.get(name, {}) for name in ("overlap_clamps", "transfer_clamps")]
    count = sum(int(clamp.get("count", 0)) for clamp in clamps)
    most = max(told.get("overlaps_by_kind", {}).items(), key=lambda item: item[1], default=("",))[0]
    above_all = f", {most} above all," if most else ""
    text = (
        f"times are {percent_text(propagated / recorded - 1)} longer than observed: {count:,} rows"
        f"{above_all} contradict the order that the trace gives them, and were moved to later"
    )
    if any("gloo" in label or label.startswith("cpu thread") for label in header.streams.values()):
        text += "; gloo runs operations side by side on its threads, which come one after the other here"
    return f"{text}. Step times, critical path and savings are as much off"


def doubts(header: TraceHeader) -> tuple[str, ...]:
    """Why times of a trace are not what they seem, a sentence each."""
    return tuple(filter(None, (_longer_text(header), shared_cores_text(header))))


def shared_cores_text(header: TraceHeader) -> str:
    """That ranks shared cores when a trace was recorded or sliced, and what that does; empty if not."""
    shared, waited = header.extra.get(SHARED_CORES), header.extra.get(CORE_WAIT)
    if waited:
        return (
            f"ranks of slices waited for a core, which others had, for up to {percent_text(waited)} of the "
            "time in which they could compute: durations are longer than on a quiet machine"
        )
    if not shared:
        return ""
    return (
        f"{shared['ranks']} ranks shared {counted(shared['cores'], 'core')} when this was recorded: everything "
        "took longer than with a core each, and which rank was slow may be chance"
    )


def merge_first(kind: TraceKind) -> str:
    """What to do before a trace of this kind can be asked about time."""
    if kind == TraceKind.BARE:
        return (
            "a bare graph has no times: record the program (`prismreplay record`) or measure its "
            "slices (`prismreplay slice`), and merge what that writes; `prismcalib check` and "
            "`prismtrace info` take it as it is"
        )
    if kind == TraceKind.SLICE:
        return "merge all slices of the job (`prismcalib merge SLICES`) and pass the result"
    return "run `prismcalib merge` on it first and pass the result"


def no_peers(peers: str) -> str:
    """What to say where no operation has a peer; `peers`: how they were looked for."""
    if peers == "position":
        return (
            "nothing to compare with: no two ranks do the same (one replica of each stage?), so "
            "whether they are even is unknown; `prismcalib stragglers --peers type` compares all "
            "operations of a sort, over stages, too"
        )
    return (
        "nothing to compare with: each sort of operation is on one rank only, so whether ranks are "
        "even is unknown; `prismcalib compare` takes another run for comparison"
    )


def parts_of_spans(header: TraceHeader) -> str:
    """What spans are made of: a CPU job has no kernels."""
    on_cpu = any(label.startswith("cpu thread") for label in header.streams.values())
    return "operators" if on_cpu else "kernels"


def percent_text(share: float) -> str:
    """A share in a sentence: `71 %`, one digit more below 10 and where it is nearly all."""
    whole = 0.095 <= share < 0.995 or share >= 1
    return (f"{share:.0%}" if whole else f"{share:.1%}").replace("%", " %")


def share_text(share: float) -> str:
    """A share in a table, `6.25%`; what rounds to nothing has no sign."""
    text = f"{share:.2%}"
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text


@dataclass(frozen=True)
class RankNames:
    """What ranks are called: their number and, if they were numbered anew, that in the log.

    Attributes:
        source: by rank the number in the source; None: the same.
    """

    source: tuple[int, ...] | None

    @classmethod
    def of(cls, header: TraceHeader) -> RankNames:
        """The names of a trace's ranks."""
        text = header.extra.get("source_ranks")
        return cls(None if text is None else parse_ranks(str(text)))

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads of the columns that name a rank in a table."""
        return ("rank",) if self.source is None else ("rank", "in the log")

    def cells(self, rank: int | None) -> tuple[int | None, ...]:
        """Their cells."""
        if self.source is None:
            return (rank,)
        return (rank, None if rank is None else self.source[rank])

    def text(self, rank: int, *more: str) -> str:
        """The rank in a sentence, with what else is to be said: `9 (18 in the log, stage 1)`."""
        said = [*([] if self.source is None else [f"{self.source[rank]} in the log"]), *more]
        return f"{rank} ({', '.join(said)})" if said else str(rank)
