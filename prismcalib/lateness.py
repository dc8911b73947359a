"""Whom the others wait for: the last member of each sync instance causes its waits."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from prismtrace.trace import Trace, instance_columns

__all__ = ["Lateness", "find_late_ranks"]

_KEY = ["group", "seq", "src_rank", "dst_rank"]


@dataclass(frozen=True, eq=False)
class Lateness:
    """Attributes:
    instances: sync instances of two or more members.
    wait_ns: waiting of all members in them, summed; part of it may lie beside a rank's own
        computation.
    ranks: rank, last (how often it arrived last), caused_ns (waiting of others then), share
        of wait_ns; largest first.
    """

    instances: int
    wait_ns: int
    ranks: pl.DataFrame

    @property
    def sentence(self) -> str:
        """Who causes most of the waiting, in one line."""
        if not self.wait_ns:
            return "nobody waits for anybody"
        chosen = self.ranks.filter(pl.col("share").cum_sum().shift(fill_value=0.0) < 0.8).head(4)
        if chosen["share"].sum() < 0.5:
            rank, share = chosen.select("rank", "share").row(0)
            causing = self.ranks.filter(pl.col("caused_ns") > 0).height
            return (
                f"who arrives last is spread over {causing} ranks, rank {rank} causes the largest part "
                f"of the waiting ({share:.0%})"
            )
        *others, last = (str(rank) for rank in chosen["rank"])
        names = f"{', '.join(others)} and {last}" if others else last
        plural = bool(others)
        return (
            f"rank{'s' if plural else ''} {names} arrive{'' if plural else 's'} last in "
            f"{chosen['last'].sum()} of {self.instances} communications and "
            f"cause{'' if plural else 's'} {chosen['share'].sum():.0%} of the waiting"
        )


def find_late_ranks(trace: Trace) -> Lateness:
    """Count for a calibrated trace, per rank, how often and for how long others wait for it.

    Of several members that arrive last at the same time the lowest rank counts.
    """
    members = (
        trace.nodes.filter(pl.col("seq").is_not_null() & pl.col("group").is_not_null())
        .select("rank", "start_ns", "wait_ns", *instance_columns())
        .sort("rank", maintain_order=True)
        .group_by(_KEY)
        .agg(
            members=pl.len(),
            rank=pl.col("rank").get(pl.col("start_ns").arg_max()),
            caused_ns=pl.col("wait_ns").sum(),
        )
        .filter(pl.col("members") > 1)
        .collect()
    )
    total = int(members["caused_ns"].sum())
    ranks = (
        members.group_by("rank")
        .agg(last=pl.len(), caused_ns=pl.col("caused_ns").sum())
        .with_columns(share=pl.col("caused_ns") / max(total, 1))
        .sort("caused_ns", "rank", descending=[True, False])
    )
    return Lateness(members.height, total, ranks)
