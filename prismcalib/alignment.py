"""Bring the observed times of all ranks onto one clock, and refuse a false picture.

Two checks guard the result.  The ends of one operation must agree (`max_residual_ns`).  And
no member of a symmetric collective can end before the last member has started, since it needs
that member's data: operations in which that happens show wrong clocks or wrong partners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.clocks import (
    ClockFit,
    Spread,
    end_spreads,
    fit_offsets,
    worst_group,
)
from prismcalib.drift import Drift, fit_drift
from prismcalib.errors import ClockError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.grouped import group_max, group_min
from prismcalib.jumps import find_jumps
from prismcalib.relations import Relations
from prismcalib.rows import FARTHEST_NS
from prismtrace.group_names import group_labels
from prismtrace.ranks import format_ranks
from prismtrace.schema import ROOTED_KINDS, ClockDomain, Kind, TraceHeader

__all__ = ["Alignment", "ClockJump", "ClockReport", "DomainReport", "align_clocks"]

# Ends within one host agree to 0.05 ms (measured on 8 GPUs): starts may be off as much.
_TOLERANCE_NS = 50_000
_MOST_INCONSISTENT = 0.05


@dataclass(frozen=True)
class DomainReport:
    """Offset of one clock.

    Attributes:
        ranks: whose times it stamped, as text such as `0-7`.
        host: where it runs; None: unknown.
        offset_ns: what is added to its times.
        uncertainty_ns: by how much that may be off; None: nothing tells.
        drift_ppm: how much slower it runs than that of the reference; 0 where nothing shows.
    """

    ranks: str
    host: str | None
    offset_ns: int
    uncertainty_ns: int | None
    drift_ppm: float = 0.0


@dataclass(frozen=True)
class ClockJump:
    """A clock that seems to have been set anew while it was read; no time is changed for it.

    Attributes:
        ranks: whose times it stamped, as text such as `0-7`.
        host: where it runs; None: unknown.
        size_ns: how much later its times are afterwards; negative: earlier.
        after_ns, before_ns: between these times, from the first start of the run, it was set.
        sorts: how many kinds of communication, group by group, show it; where it is one, their
            members may as well end in another order since then.
    """

    ranks: str
    host: str | None
    size_ns: int
    after_ns: int
    before_ns: int
    sorts: int

    def __str__(self) -> str:
        whose = f"the clock of ranks {self.ranks}" + (f" on {self.host}" if self.host else "")
        way = "forward" if self.size_ns > 0 else "back"
        return (
            f"{whose} seems to have been set {way} by {abs(self.size_ns) / 1e6:.3f} ms between "
            f"{self.after_ns / 1e9:.3f} and {self.before_ns / 1e9:.3f} s"
        )


@dataclass(frozen=True)
class ClockReport:
    """How well the clocks fit.

    Attributes:
        mode: `align` or `keep`.
        reference_rank: its clock is the trace's time.
        domains: the clocks.
        operations: matched operations whose ends were compared.
        end_spread_before, end_spread_after: latest minus earliest end of an operation, with
            the clocks as recorded and as used; None if there was nothing to compare.
        inconsistent: symmetric collectives that a member ended before another started.
        jumps: clocks that seem to have been set within the run.
    """

    mode: str
    reference_rank: int
    domains: tuple[DomainReport, ...]
    operations: int
    end_spread_before: Spread | None
    end_spread_after: Spread | None
    inconsistent: int
    jumps: tuple[ClockJump, ...] = ()


@dataclass(frozen=True, eq=False)
class Alignment:
    """Aligned times, int64[n], counted from the first start.

    `origin_ns` is the first start in the clock of the reference rank.
    """

    start_ns: Int64Array
    end_ns: Int64Array
    origin_ns: int
    domains: tuple[ClockDomain, ...]
    report: ClockReport
    reference: int
    drift: Drift

    def common_ns(self, rank: Int32Array, times_ns: Int64Array) -> Int64Array:
        """int64[m]: other times of some ranks on the same clock as `start_ns`.

        Ranks without a clock of their own are taken to share that of the reference.
        """
        number = {rank: i for i, clock in enumerate(self.domains) for rank in clock.ranks}
        ranks = pl.Series(rank)
        domain = ranks.replace_strict(number, default=self.reference, return_dtype=pl.Int32)
        offset = np.array([clock.offset_ns or 0 for clock in self.domains])
        shift = offset[domain.to_numpy()] + self.drift.shift(domain.to_numpy(), times_ns)
        return np.asarray(times_ns + shift - self.origin_ns, np.int64)


def align_clocks(
    graph: Graph, rows: pl.DataFrame, header: TraceHeader, *, keep: bool, max_residual_ns: int
) -> Alignment:
    """Estimate clock offsets, or with `keep` use those of the header, and check the result.

    Raises:
        ClockError: clocks cannot be related, ends disagree too much, or collectives
            contradict the picture.
    """
    domains = _domains(rows, header)
    domain = _domain_of_rows(rows, domains)
    start = rows["start_ns"].to_numpy()
    end = start + rows["dur_ns"].to_numpy()
    compared = np.flatnonzero((graph.instance >= 0) & _shared(graph))
    instance = graph.instance[compared]
    tier = _tiers(rows)[compared]
    reference = int(domain[0])

    if keep:
        offset = _kept_offsets(domains, start)
        fit = ClockFit(offset, np.zeros(0, np.int64), tier == tier.min(initial=2))
        drift = Drift.none(len(domains))
    else:
        fit, drift = _fit(instance, domain[compared], end[compared], tier, domains, reference)
    used = fit.used
    before = end_spreads(instance[used], end[compared][used])
    aligned = start + fit.offset_ns[domain] + drift.shift(domain, start)
    # Durations are measured by the same clock as starts.
    aligned_end = end + fit.offset_ns[domain] + drift.shift(domain, end)
    after = end_spreads(instance[used], aligned_end[compared][used])
    symmetric = compared[tier == 0]
    inconsistent = _inconsistent(
        graph.instance[symmetric], aligned[symmetric], aligned_end[symmetric]
    )
    uncertainty = [None if keep else int(value) for value in fit.uncertainty_ns]
    uncertainty += [None] * (len(domains) - len(uncertainty))
    solved = tuple(
        clock.model_copy(update={"offset_ns": int(offset_ns), "uncertainty_ns": spread})
        for clock, offset_ns, spread in zip(domains, fit.offset_ns, uncertainty, strict=True)
    )
    jumps: tuple[ClockJump, ...] = ()
    if not keep and len(domains) > 1:
        related = Relations(instance, domain[compared], tier, len(domains), reference)
        ends = end[compared], aligned_end[compared] - int(aligned.min())
        jumps = tuple(
            ClockJump(
                format_ranks(domains[jump.domain].ranks),
                domains[jump.domain].host,
                jump.size_ns,
                jump.after_ns,
                jump.before_ns,
                jump.sorts,
            )
            for jump in find_jumps(related, *ends, _sorts(rows)[compared], reference)
        )
    report = ClockReport(
        mode="keep" if keep else "align",
        reference_rank=int(rows["rank"][0]),
        domains=tuple(
            DomainReport(
                format_ranks(clock.ranks),
                clock.host,
                clock.offset_ns or 0,
                clock.uncertainty_ns,
                round(float(rate) * 1e6, 3),
            )
            for clock, rate in zip(solved, drift.rate, strict=True)
        ),
        operations=len(after),
        end_spread_before=Spread.of(before),
        end_spread_after=Spread.of(after),
        inconsistent=int(inconsistent.sum()),
        jumps=jumps,
    )
    # Ends that lie apart on one clock are late events, not a wrong clock.
    worst = (
        _worst_group(rows, header, compared[used], instance[used], after, max_residual_ns)
        if len(domains) > 1
        else None
    )
    _refuse(report, inconsistent, graph, symmetric, max_residual_ns, worst)
    origin = int(aligned.min())
    return Alignment(
        aligned - origin, aligned_end - origin, origin, solved, report, reference, drift
    )


def _domains(rows: pl.DataFrame, header: TraceHeader) -> tuple[ClockDomain, ...]:
    """Clock domains of the header; ranks that are in none get one of their own."""
    known = {rank for clock in header.clock for rank in clock.ranks}
    free = max((clock.id for clock in header.clock), default=-1) + 1
    alone = sorted(set(rows["rank"].unique()) - known)
    return header.clock + tuple(
        ClockDomain(id=free + number, ranks=(rank,)) for number, rank in enumerate(alone)
    )


def _kept_offsets(domains: tuple[ClockDomain, ...], start: Int64Array) -> Int64Array:
    """int64[D], the offsets that the header gives; refuses those that lead out of 64 bits."""
    first, last = int(start.min()), int(start.max())
    for clock in domains:
        offset = clock.offset_ns or 0
        if first + offset < -FARTHEST_NS or last + offset > FARTHEST_NS:
            raise ClockError(
                f"the header gives a clock an offset of {offset} ns, which leads out of 64 bits",
                where=f"clock={clock.id} ranks={format_ranks(clock.ranks)}",
                hint="merge without --clock keep: the offsets are then estimated",
            )
    return np.array([clock.offset_ns or 0 for clock in domains], np.int64)


def _domain_of_rows(rows: pl.DataFrame, domains: tuple[ClockDomain, ...]) -> Int32Array:
    number = {rank: i for i, clock in enumerate(domains) for rank in clock.ranks}
    return rows["rank"].replace_strict(number, return_dtype=pl.Int32).to_numpy()


def _shared(graph: Graph) -> NDArray[np.bool_]:
    """bool[n], whether the row is in an instance of two or more members."""
    several = np.append(graph.members_present > 1, [False])  # index -1: no instance
    return several[graph.instance]


def _tiers(rows: pl.DataFrame) -> Int32Array:
    """int[n]: 0 symmetric collectives, 1 p2p (may be buffered), 2 rooted (root may end early)."""
    tier = {
        kind.value: 1 if kind.is_p2p else 2 if kind in {*ROOTED_KINDS, Kind.OTHER_COMM} else 0
        for kind in Kind
    }
    kinds = rows["kind"].cast(pl.String)
    return kinds.replace_strict(tier, return_dtype=pl.Int32).to_numpy()


def _sorts(rows: pl.DataFrame) -> Int64Array:
    """int64[n]: kind and group of each row in one number."""
    kind, group = rows["kind"].to_physical().cast(pl.Int64), rows["group"].cast(pl.Int64)
    return (kind * 2**32 + group.fill_null(-1)).to_numpy()


def _fit(
    instance: Int32Array,
    domain: Int32Array,
    end: Int64Array,
    tier: Int32Array,
    domains: tuple[ClockDomain, ...],
    reference: int,
) -> tuple[ClockFit, Drift]:
    try:
        fit = fit_offsets(instance, domain, end, tier, len(domains), reference)
        used = fit.used
        drift = fit_drift(
            instance[used], domain[used], end[used], tier[used], fit.offset_ns, reference
        )
        if drift.rate.any():
            # What looked like noise may have been drift.
            steady = end + drift.shift(domain, end)
            fit = fit_offsets(instance, domain, steady, tier, len(domains), reference)
        return fit, drift
    except ClockError as error:
        lost = [domains[number] for number in error.domains]
        names = "; ".join(
            f"ranks {format_ranks(clock.ranks)}" + (f" on {clock.host}" if clock.host else "")
            for clock in lost[:5]
        )
        raise ClockError(
            error.message, where=names + ("; ..." if len(lost) > 5 else ""), hint=error.hint
        ) from error


def _inconsistent(instance: Int32Array, start: Int64Array, end: Int64Array) -> NDArray[np.bool_]:
    """bool[k], of each of the k distinct operations whether a member ended too early."""
    if not len(instance):
        return np.zeros(0, np.bool_)
    number = np.unique(instance, return_inverse=True)[1]
    return group_max(number, start) > group_min(number, end) + _TOLERANCE_NS


def _worst_group(
    rows: pl.DataFrame,
    header: TraceHeader,
    members: NDArray[np.intp],
    instance: Int32Array,
    spreads: Int64Array,
    limit_ns: int,
) -> str | None:
    """What is wrong with the ends of the group that agrees worst; None if all keep the limit."""
    first = np.unique(instance, return_index=True)[1]
    found = worst_group(spreads, rows["group"].gather(members[first]).to_numpy(), limit_ns)
    if found is None:
        return None
    group, median_ns, count = found
    label = group_labels(header.groups)[group]
    return f"{median_ns / 1e6:.3f} ms apart (median of {count} in group {label})"


def _refuse(
    report: ClockReport,
    inconsistent: NDArray[np.bool_],
    graph: Graph,
    symmetric: NDArray[np.intp],
    max_residual_ns: int,
    worst: str | None,
) -> None:
    several = len(report.domains) > 1
    told = "".join(f"{jump}; " for jump in report.jumps[:1])
    other = "--clock align" if report.mode == "keep" else "--clock keep"
    spread = report.end_spread_after
    if several and spread is not None and spread.median_ns > max_residual_ns:
        worst = f"{spread.median_ns / 1e6:.3f} ms apart (median of {report.operations})"
    if worst is not None:
        raise ClockError(
            f"ends of the same operation lie {worst}, more than the "
            f"{max_residual_ns / 1e6:.3f} ms allowed",
            where=f"clock={report.mode}",
            hint=told
            + "operations may be matched wrongly, or ranks of different runs mixed; "
            + ("estimate the clocks with --clock align, or " if report.mode == "keep" else "")
            + f"accept it with --max-residual {_round_up(spread, max_residual_ns)}",
        )
    share = report.inconsistent / max(len(inconsistent), 1)
    if share > _MOST_INCONSISTENT:
        instances = np.unique(graph.instance[symmetric])
        first = instances[int(inconsistent.argmax())]
        row = int(symmetric[(graph.instance[symmetric] == first).argmax()])
        raise ClockError(
            f"{report.inconsistent} of {len(inconsistent)} collectives have a member that ended "
            "before another started, which cannot be",
            where=f"first: {graph.label(row)}",
            hint=f"{told}merge the steps before it or those behind it (prismtrace slice-out)"
            if told
            else "operations are matched wrongly, or ranks of different runs are mixed"
            + (f"; if the clocks are wrong, try {other}" if several else ""),
        )


def _round_up(spread: Spread | None, limit_ns: int) -> str:
    """A limit that the data would pass, in milliseconds."""
    worst = limit_ns if spread is None else max(spread.max_ns, limit_ns)
    return f"{-(-worst // 1_000_000)}ms"
