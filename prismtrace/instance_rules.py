"""Rules across ranks: process groups, sequence numbers and sync instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from prismtrace.blocks import INSTANCE_KEY, instance_blocks, rank_blocks
from prismtrace.schema import Kind
from prismtrace.trace import instance_columns

if TYPE_CHECKING:
    from prismtrace.validation import Findings

__all__ = ["check_groups", "check_instances", "check_sequence_numbers"]

_PLACE = ("id", "rank", "index")


def check_groups(findings: Findings) -> None:
    """Groups exist, ranks and peers are members of them."""
    groups = findings.trace.header.groups
    members = pl.DataFrame(
        {
            "group": [group.id for group in groups for _ in group.ranks],
            "rank": [rank for group in groups for rank in group.ranks],
        },
        schema={"group": pl.Int64, "rank": pl.Int64},
    )
    used = (
        findings.trace.nodes.filter(pl.col("group").is_not_null())
        .group_by(pl.col("group", "rank", "peer").cast(pl.Int64))
        .agg(pl.len(), pl.col("id", "index").sort_by("index").first())
        .sort("id")
        .collect(engine="streaming")
    )
    known = pl.col("group").is_in([group.id for group in groups])
    _add_classes(findings, "group-unknown", used.filter(~known))
    listed = used.filter(known)
    stranger = listed.join(members, on=["group", "rank"], how="anti", maintain_order="left")
    _add_classes(findings, "rank-not-in-group", stranger)
    peers = members.rename({"rank": "peer"})
    outside = listed.filter(pl.col("peer").is_not_null()).join(
        peers, on=["group", "peer"], how="anti", maintain_order="left"
    )
    _add_classes(findings, "peer-not-in-group", outside)


def _add_classes(findings: Findings, rule: str, classes: pl.DataFrame) -> None:
    """Count all rows of some (group, rank, peer) classes, show the first row of each."""
    shown = classes.select(*_PLACE, "group", "peer")
    findings.add(rule, shown, int(classes["len"].sum()))


def check_sequence_numbers(findings: Findings) -> None:
    """Within a rank, seq counts without gaps: per group, for p2p per group and direction."""
    counter = ["rank", "group", "src_rank", "dst_rank"]
    columns = ["id", "rank", "index", "kind", "group", "seq", "peer"]
    for block in rank_blocks(findings.trace.nodes.filter(pl.col("seq").is_not_null()), columns):
        numbered = (
            block.select(*_PLACE, *instance_columns())
            .sort(*counter, "seq")
            .with_columns(skipped=pl.col("seq").diff().over(counter) - 1)
        )
        gaps = numbered.filter(pl.col("skipped") > 0).sort("rank", "index")
        shown = gaps.select(*_PLACE, "group", "seq", "skipped")
        findings.add("seq-gap", shown, int(gaps["skipped"].sum()))


_COMPARED = {
    "unequal-kind": "kind",
    "unequal-bytes": "bytes",
    "unequal-dtype": "dtype",
    "unequal-reduce-op": "reduce_op",
}


def check_instances(findings: Findings) -> None:
    """Sync instances are complete and their members agree."""
    columns = ["id", "rank", "index", *_COMPARED.values(), "peer"]
    present = _present_ranks(findings)
    for members in instance_blocks(findings.trace.nodes, columns):
        twice = members.filter(pl.struct(*INSTANCE_KEY, "rank").is_duplicated()).sort("id")
        findings.add("duplicate-member", twice.select(*_PLACE, "group", "seq"))
        first = pl.col("id").arg_min()
        instances = members.group_by(*INSTANCE_KEY).agg(
            pl.col(*_PLACE, "kind").get(first),
            pl.col("rank").n_unique().alias("members"),
            *(
                (_told(name).min() != _told(name).max()).alias(rule)
                for rule, name in _COMPARED.items()
            ),
        )
        _check_complete(findings, instances, members, present)
        _check_equal(findings, instances, members)


def _told(name: str) -> pl.Expr:
    """A column; null where it says nothing: a source that named no kind contradicts none."""
    column = pl.col(name)
    if name != "kind":
        return column
    return pl.when(column != Kind.OTHER_COMM.value).then(column)


def _present_ranks(findings: Findings) -> list[int]:
    """Ranks that are in the header and have rows; the others have rules of their own."""
    rows = findings.trace.nodes.select("rank").unique().collect(engine="streaming")["rank"]
    return sorted(set(findings.trace.header.ranks) & set(rows))


def _check_complete(
    findings: Findings, instances: pl.DataFrame, members: pl.DataFrame, present: list[int]
) -> None:
    groups = findings.trace.header.groups
    here = set(present)
    sizes = pl.DataFrame(
        {
            "group": [group.id for group in groups],
            "expected": [len(here.intersection(group.ranks)) for group in groups],
        },
        schema={"group": instances.schema["group"], "expected": pl.Int64},
    )
    p2p = pl.col("src_rank") >= 0
    pair = pl.col("src_rank").is_in(present).cast(pl.Int64) + pl.col("dst_rank").is_in(present)
    incomplete = (
        instances.join(sizes, on="group", how="left")
        .with_columns(expected=pl.when(p2p).then(pair).otherwise("expected"))
        .filter(pl.col("members") < pl.col("expected"))
        .sort(*INSTANCE_KEY)
    )
    alone = incomplete.filter(p2p)
    shown = alone.select(*_PLACE, "kind", "group", "seq", "src_rank", "dst_rank")
    findings.add("unmatched-p2p", shown)
    lacking = incomplete.filter(~p2p)
    first = lacking.head(findings.limit)
    ranks_of = {group.id: group.ranks for group in groups}
    taking_part = _values(first, members, "rank")
    missing = [
        [rank for rank in ranks_of[group] if rank in here and rank not in taken]
        for group, taken in zip(first["group"], taking_part, strict=True)
    ]
    shown = first.select(*_PLACE, "kind", "group", "seq").with_columns(
        missing_ranks=pl.Series(missing, dtype=pl.List(pl.Int64))
    )
    findings.add("missing-member", shown, len(lacking))


def _check_equal(findings: Findings, instances: pl.DataFrame, members: pl.DataFrame) -> None:
    kind = pl.col("kind").cast(pl.String)
    asked = {
        # The two sides of a p2p instance differ in kind by definition.
        "unequal-kind": pl.col("src_rank") < 0,
        # Ranks of an all_to_all with uneven splits send different amounts.
        "unequal-bytes": kind != Kind.ALL_TO_ALL.value,
    }
    for rule, name in _COMPARED.items():
        broken = instances.filter(pl.col(rule) & asked.get(rule, pl.lit(True)))
        broken = broken.sort(*INSTANCE_KEY)
        first = broken.head(findings.limit)
        values = [sorted(found) for found in _values(first, members, name)]
        shown = first.select(*_PLACE, "group", "seq").with_columns(
            pl.Series(f"{name}_values", values, dtype=pl.List(members.schema[name]))
        )
        findings.add(rule, shown, len(broken))


def _values(instances: pl.DataFrame, members: pl.DataFrame, name: str) -> list[set[Any]]:
    """Distinct non-null values of a column in each of a few instances."""
    found = []
    for key in instances.select(*INSTANCE_KEY).iter_rows():
        same = [pl.col(column) == value for column, value in zip(INSTANCE_KEY, key, strict=True)]
        found.append(set(members.filter(*same)[name].drop_nulls()))
    return found
