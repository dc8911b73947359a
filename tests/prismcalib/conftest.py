"""A synthetic recorded run, whose true timeline is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import polars as pl
import pytest

from prismtrace.schema import INDEX_BITS, ClockDomain, ProcessGroup, TraceHeader
from prismtrace.trace import Trace, node_schema

EPOCH_NS = 1_700_000_000_000_000_000


@dataclass
class Run:
    """Ranks that compute, all-reduce in pairs and over the world, and pass on activations.

    `rows` are node dictionaries in true time; `trace` shifts them by the error of each
    rank's clock, which a merge has to find again.
    """

    ranks: int
    clock_error_ns: list[int]
    domains: list[list[int]]
    groups: list[ProcessGroup]
    rows: list[dict[str, object]] = field(default_factory=list)

    @property
    def table(self) -> pl.DataFrame:
        """Sorted rows in true time."""
        return pl.DataFrame(self.rows, schema=node_schema()).sort("rank", "index")

    @property
    def header(self) -> TraceHeader:
        return TraceHeader(
            kind="recorded",
            world_size=self.ranks,
            ranks=tuple(range(self.ranks)),
            groups=tuple(self.groups),
            clock=tuple(
                ClockDomain(id=i, ranks=tuple(ranks)) for i, ranks in enumerate(self.domains)
            ),
            streams={0: "compute", 1: "communication"},
            policies={"convert.something": 3},
        )

    @property
    def trace(self) -> Trace:
        """As recorded: every rank in its own clock."""
        error = pl.col("rank").replace_strict(
            dict(enumerate(self.clock_error_ns)), return_dtype=pl.Int64
        )
        recorded = self.table.with_columns(start_ns=pl.col("start_ns") + error)
        return Trace(header=self.header, nodes=recorded.lazy())


def build_run(
    *,
    ranks: int = 4,
    steps: int = 3,
    clock_error_ns: list[int] | None = None,
    domains: list[list[int]] | None = None,
    noise_ns: int = 0,
    slow_rank: int | None = None,
    seed: int = 1,
) -> Run:
    """Simulate the run; `noise_ns` is how late a member may notice the end of a collective."""
    draw = random.Random(seed)
    groups = [ProcessGroup(id=0, name="world", ranks=tuple(range(ranks)))]
    groups += [
        ProcessGroup(id=1 + first // 2, name=f"pair_{first // 2}", ranks=(first, first + 1))
        for first in range(0, ranks - 1, 2)
    ]
    run = Run(
        ranks=ranks,
        clock_error_ns=clock_error_ns or [0] * ranks,
        domains=domains or [[rank] for rank in range(ranks)],
        groups=groups,
    )
    clock = [EPOCH_NS + draw.randint(0, 10_000) for _ in range(ranks)]
    index = [0] * ranks
    seqs: dict[object, int] = {}

    def add(rank: int, begin: int, end: int, **columns: object) -> None:
        run.rows.append(
            {
                "id": rank << INDEX_BITS | index[rank],
                "rank": rank,
                "index": index[rank],
                "stream": 0 if columns["kind"] == "compute" else 1,
                "real": True,
                "deps": [1] if index[rank] else [],
                "start_ns": begin,
                "dur_ns": end - begin,
                **columns,
            }
        )
        index[rank] += 1
        clock[rank] = end

    def compute(rank: int, step: int, name: str) -> None:
        begin = clock[rank] + draw.choice([0, 0, draw.randint(1, 20_000)])
        duration = draw.randint(50_000, 900_000) * (20 if rank == slow_rank else 1)
        add(rank, begin, begin + duration, kind="compute", name=name, step=step)

    def communicate(members: dict[int, dict[str, object]], key: object, step: int) -> None:
        seq = seqs[key] = seqs.get(key, -1) + 1
        ready = max(clock[rank] for rank in members)
        transfer = draw.randint(100_000, 300_000)
        for rank, columns in members.items():
            end = ready + transfer + draw.randint(0, noise_ns)
            add(rank, clock[rank], end, seq=seq, step=step, bytes=1 << 20, **columns)

    for step in range(steps):
        for rank in range(ranks):
            compute(rank, step, "forward")
        for group in groups[1:]:
            members = {r: {"kind": "all_reduce", "group": group.id} for r in group.ranks}
            communicate(members, group.id, step)
        for rank in range(0, ranks - 2, 2):
            sender = {"kind": "send", "group": 0, "peer": rank + 2}
            receiver = {"kind": "recv", "group": 0, "peer": rank}
            communicate({rank: sender, rank + 2: receiver}, (0, rank), step)
        for rank in range(ranks):
            compute(rank, step, "backward")
        communicate({r: {"kind": "all_reduce", "group": 0} for r in range(ranks)}, 0, step)
    return run


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return build_run
