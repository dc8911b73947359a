"""A recorded job, rank by rank: what its spools say together, and its trace's header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismtrace.errors import RankError
from prismtrace.group_names import group_label
from prismtrace.ranks import parse_ranks
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS
from prismtrace.spool import TAG

if TYPE_CHECKING:
    import polars as pl

    from prismtrace.schema import ClockDomain, ProcessGroup, TraceHeader
    from prismtrace.spool import Spool

__all__ = ["LastCommunication", "RecordedJob"]

_GroupKey = tuple[tuple[int, ...], str]
_NO_DESCRIPTION = ("", "undefined")


@dataclass(frozen=True)
class LastCommunication:
    """Where a rank stood when its recording ended: the last communication that it issued.

    Attributes:
        rank: the rank.
        kind: of the communication; None if it issued none.
        group: label of its process group.
        seq: its number within the group; None for sends and receives.
        peer: the other side of a send or receive, or the root.
        ended: whether it ended on this rank.
        finished: whether the rank's program came to its own end.
        killed: whether it ended without a word: it may have come further than its spool.
    """

    rank: int
    kind: str | None = None
    group: str | None = None
    seq: int | None = None
    peer: int | None = None
    ended: bool = True
    finished: bool = False
    killed: bool = False


@dataclass
class RecordedJob:
    """The ranks taken in so far."""

    ranks: dict[int, int] = field(default_factory=dict)
    """Rank -> rows."""
    cut: set[int] = field(default_factory=set)
    dropped: int = 0
    last: dict[int, LastCommunication] = field(default_factory=dict)
    queued: bool = False
    """Start of a communication is when it was issued, not when the backend began with it."""
    counts: Counter[str] = field(default_factory=Counter)
    _facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _paths: dict[int, Path] = field(default_factory=dict)
    _groups: dict[int, dict[int, _GroupKey]] = field(default_factory=dict)
    _descs: dict[_GroupKey, str] = field(default_factory=dict)
    _streams: dict[int, dict[int, str]] = field(default_factory=dict)
    _steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Rank -> the steps that it began, each with the index of its first row."""
    _tagged: set[int] = field(default_factory=set)
    """Ranks with messages whose numbers hold a tag."""
    _timed: bool = False

    def take(self, spool: Spool) -> pl.DataFrame:
        """Rows of a rank, with the rank's own numbers of groups and streams."""
        rank = spool.rank
        if rank in self.ranks:
            raise RankError(
                f"two spools are of rank {rank}",
                where=f"{self._paths[rank]} and {spool.path}",
                hint="give the spools of one run only",
            )
        from prismtrace.spool_rows import rank_rows

        frame = rank_rows(spool, self.counts)
        self.ranks[rank], self._paths[rank] = frame.height, spool.path
        self._facts[rank] = spool.facts
        self._groups[rank] = {number: _group_key(fact) for number, fact in spool.groups.items()}
        for number, fact in spool.groups.items():
            if fact["desc"] not in _NO_DESCRIPTION:
                self._descs.setdefault(self._groups[rank][number], fact["desc"])
        self._streams[rank] = _stream_labels(spool)
        first = frame.drop_nulls("step").group_by("step", maintain_order=True).first()
        self._steps[rank] = list(first.select("step", "index").iter_rows())
        self.queued |= bool(spool.facts.get("queued"))
        if (frame["seq"] >= TAG).any():
            self._tagged.add(rank)
        self._timed |= frame["start_ns"].null_count() < frame.height
        if not spool.ended or "failed" in spool.facts:
            self.cut.add(rank)
            self.counts["cut-rank"] += 1
        names = {
            number: group_label(key[1], self._descs.get(key, ""), key[0])
            for number, key in self._groups[rank].items()
        }
        self.last[rank] = replace(
            _last_of(rank, frame, names),
            finished=rank not in self.cut,
            killed=not spool.ended and "failed" not in spool.facts,
        )
        return frame

    def check_ranks(self, header: TraceHeader | None) -> None:
        """Refuse ranks outside the world."""
        size = self.world_size(header)
        highest = max(self.ranks)
        if highest >= size:
            raise RankError(
                f"rank {highest} is outside the world of {size} ranks",
                where=str(self._paths[highest]),
                hint="give the spools of one run only",
            )

    def world_size(self, header: TraceHeader | None) -> int:
        """Ranks of the job."""
        if header is not None:
            return header.world_size
        said = [facts["world_size"] for facts in self._facts.values() if facts["world_size"]]
        return int(max(said, default=max(self.ranks) + 1))

    def header(
        self, known: TraceHeader | None, axis_of: Callable[[str, str], str | None] | None
    ) -> TraceHeader:
        """The header of the trace, see `assemble`."""
        from prismtrace import __version__
        from prismtrace.schema import TraceHeader, TraceKind

        if known is None:
            known = TraceHeader(
                kind=TraceKind.RECORDED,
                world_size=self.world_size(None),
                ranks=(),
                created_by=f"prismtrace.recorder {__version__}",
            )
        groups = self._group_table(known.groups)
        labels = {label for streams in self._streams.values() for label in streams.values()}
        steps = {step for found in self._steps.values() for step, _ in found}
        last = self._last_step()
        if last is not None:
            steps = {step for step in steps if step <= last}
        made = {
            "ranks": tuple(sorted(self.ranks)),
            "groups": groups,
            "streams": dict(
                enumerate(sorted(labels, key=lambda label: (label != "program", label)))
            ),
            "clock": self._clock() if self._timed else (),
            "steps": tuple(sorted(steps)),
            "axes": known.axes or (_axes(groups, axis_of) if axis_of else {}),
            "extra": {**known.extra, **self._shared_cores()},
        }
        return TraceHeader.model_validate({**dict(known), **made})

    def policies(self, known: TraceHeader | None) -> dict[str, int]:
        """What was assumed, and how often."""
        before = {} if known is None else known.policies
        return {**before, **{name: n for name, n in sorted(self.counts.items()) if n}}

    def _group_table(self, known: tuple[ProcessGroup, ...]) -> tuple[ProcessGroup, ...]:
        """The groups that ranks joined, and those known besides."""
        from prismtrace.schema import ProcessGroup

        joined = {key for groups in self._groups.values() for key in groups.values()}
        for group in known:
            if group.desc not in _NO_DESCRIPTION:
                self._descs.setdefault((group.ranks, group.name), group.desc)
        keys = sorted(joined | {(group.ranks, group.name) for group in known})
        return tuple(
            ProcessGroup(id=number, name=name, desc=self._descs.get((ranks, name), ""), ranks=ranks)
            for number, (ranks, name) in enumerate(keys)
        )

    def _clock(self) -> tuple[ClockDomain, ...]:
        """Processes of one host share its clock."""
        from prismtrace.schema import ClockDomain

        hosts: dict[tuple[str, str], list[int]] = {}
        spread: dict[tuple[str, str], int] = {}
        for rank, facts in sorted(self._facts.items()):
            key = (facts["host"], facts["clock"])
            hosts.setdefault(key, []).append(rank)
            if "residual_ns" in facts:
                # Times of devices, which have clocks of their own.
                spread[key] = max(spread.get(key, 0), facts["residual_ns"])
        return tuple(
            ClockDomain(
                id=number,
                ranks=tuple(ranks),
                host=key[0],
                source=key[1],
                uncertainty_ns=spread.get(key),
            )
            for number, (key, ranks) in enumerate(hosts.items())
        )

    def _shared_cores(self) -> dict[str, Any]:
        """Of the host where most ranks came on a core, if some had to share one."""
        from prismtrace.headers import SHARED_CORES

        hosts: dict[str, list[set[int]]] = {}
        for facts in self._facts.values():
            if "cores" in facts:
                hosts.setdefault(facts["host"], []).append(set(parse_ranks(facts["cores"])))
        found = [(len(sets), len(set().union(*sets))) for sets in hosts.values()]
        ranks, cores = max(found, key=lambda host: host[0] / host[1], default=(0, 1))
        return {SHARED_CORES: {"ranks": ranks, "cores": cores}} if ranks > cores else {}

    def _last_step(self) -> int | None:
        """The last step that all ranks finished, if a rank was cut off; null: keep all."""
        if not self.cut:
            return None
        finished = []
        for rank, steps in self._steps.items():
            numbers = sorted(step for step, _ in steps)
            if rank in self.cut:
                numbers = numbers[:-1]
            if not numbers:
                return None
            finished.append(numbers[-1])
        return min(finished)

    def complete(self, rank: int, rows: pl.LazyFrame, header: TraceHeader) -> pl.LazyFrame:
        """A rank's rows with the numbers of the header, without those of unfinished steps."""
        import polars as pl

        from prismtrace.trace import node_ids

        last = self._last_step()
        if last is not None:
            end = min(
                (index for step, index in self._steps[rank] if step > last),
                default=self.ranks[rank],
            )
            self.dropped += self.ranks[rank] - end
            rows = rows.filter(pl.col("index") < end)
        if rank in self._tagged:
            rows = rows.with_columns(seq=_without_tags())
        number_of = {(group.ranks, group.name): group.id for group in header.groups}
        groups = {local: number_of[key] for local, key in self._groups[rank].items()}
        stream_of = {label: number for number, label in header.streams.items()}
        streams = {local: stream_of[label] for local, label in self._streams[rank].items()}
        return rows.with_columns(
            id=node_ids(pl.col("rank"), pl.col("index")),
            real=pl.lit(value=True),
            group=pl.col("group").replace_strict(groups, default=None, return_dtype=pl.Int32),
            stream=pl.col("stream").replace_strict(streams, return_dtype=pl.Int16),
        )


def _last_of(rank: int, frame: pl.DataFrame, names: dict[int, str]) -> LastCommunication:
    """The last communication of a rank's rows, which are in the order in which it issued them."""
    import polars as pl

    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    found = frame.filter(~local).tail(1).to_dicts()
    if not found:
        return LastCommunication(rank)
    row = found[0]
    return LastCommunication(
        rank,
        kind=row["kind"],
        group=names.get(row["group"]),
        seq=None if row["kind"] in P2P_KINDS else row["seq"],
        peer=row["peer"],
        # One whose end nobody saw ends when it starts, see `rank_rows`.
        ended=row["dur_ns"] != 0,
    )


def _without_tags() -> pl.Expr:
    """Numbers of messages from 0 without gaps; recorders count those of each tag for itself.

    Sender and receiver have the same numbers, so both number them anew alike.
    """
    import polars as pl

    pair = ("group", "kind", "peer")
    message = pl.col("kind").cast(pl.String).is_in([kind.value for kind in P2P_KINDS])
    anew = (pl.col("seq").rank("dense").over(*pair) - 1).cast(pl.Int64)
    return pl.when(message).then(anew).otherwise("seq")


def _group_key(fact: dict[str, Any]) -> _GroupKey:
    from prismtrace.ranks import parse_ranks

    return parse_ranks(fact["ranks"]), fact["name"]


def _stream_labels(spool: Spool) -> dict[int, str]:
    """What to call a rank's streams; those of its groups after what the group is for.

    Ranks of different groups share labels, of which a trace takes 2^15 only: a group is called
    after its description or size, not its name.
    """
    from prismtrace.ranks import parse_ranks

    of_group: dict[int, str] = {}
    taken: Counter[str] = Counter()
    for number, fact in sorted(spool.groups.items()):
        label = fact["desc"]
        if label in _NO_DESCRIPTION:
            label = f"group of {len(parse_ranks(fact['ranks']))}"
        taken[label] += 1
        of_group[number] = label if taken[label] == 1 else f"{label} #{taken[label]}"
    return {
        number: fact["label"]
        if fact["of_group"] is None
        else f"{of_group[fact['of_group']]} {fact['label']}".rstrip()
        for number, fact in spool.streams.items()
    }


def _axes(
    groups: Iterable[ProcessGroup], axis_of: Callable[[str, str], str | None]
) -> dict[str, int]:
    """Sizes of the axes that groups serve, where all groups of an axis have the same size."""
    sizes: dict[str, set[int]] = {}
    for group in groups:
        axis = axis_of(group.name, group.desc)
        if axis is not None and axis != "world":
            sizes.setdefault(axis, set()).add(len(group.ranks))
    return {axis: found.pop() for axis, found in sorted(sizes.items()) if len(found) == 1}
