"""Contraction changes no time of any row that remains, and loses no row."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prismcalib.contraction import contract
from prismcalib.graph import Graph
from prismcalib.net import net_of
from prismcalib.propagation import propagate

GROUPS = [(0, 1), (2, 3), (0, 1, 2, 3), (1, 2)]


class Job:
    """Rows of up to four ranks in issue order; collectives couple them."""

    def __init__(self, draw: random.Random) -> None:
        ranks: list[list[dict]] = [[] for _ in range(4)]
        place, group = 0, 0
        operations: list[int] = []
        for _ in range(draw.randint(1, 25)):
            place += draw.random() < 0.1
            # Runs of one group are what fusing looks for.
            group = draw.randrange(len(GROUPS)) if draw.random() < 0.3 else group
            row = {"place": place, "instance": -1}
            if draw.random() < 0.5:
                for rank in GROUPS[group]:
                    ranks[rank].append({**row, "instance": len(operations)})
                operations.append(group)
            members = GROUPS[group] if draw.random() < 0.7 else [draw.randrange(4)]
            for rank in members:
                ranks[rank].append(row.copy())
        self.operations = operations
        rows, deps, lags = [], [], []
        for rank, own in enumerate(ranks):
            begin = len(rows)
            for at, row in enumerate(own):
                reach = draw.choice([1, 1, 1, 2, 3])
                chosen = {begin + at - back for back in range(1, reach + 1) if at >= back}
                if draw.random() < 0.15:
                    chosen = {dep for dep in chosen if draw.random() < 0.5}
                rows.append({**row, "rank": rank})
                deps.append(sorted(chosen))
                lags.append([draw.choice([0, 0, 3, draw.randint(0, 20)]) for _ in chosen])
        n = len(rows)
        self.graph = Graph.from_lists(
            [draw.randint(0, 50) for _ in range(n)],
            deps,
            lags_ns=lags if draw.random() < 0.5 else None,
            instances=[row["instance"] for row in rows],
            releases_ns=[0 if dep else draw.randint(0, 40) for dep in deps],
        )
        local = np.array([row["instance"] < 0 for row in rows], np.bool_)
        self.mergeable = local & (np.array([draw.random() for _ in rows]) < 0.9)
        self.place = np.array([row["place"] * 4 + row["rank"] for row in rows], np.int32)
        self.lane = np.array([draw.random() < 0.1 for _ in rows], np.int32)
        self.sort = np.zeros(n, np.int32)

    def net(self):
        timing = propagate(self.graph, "python")
        return net_of(
            self.graph,
            timing.start_ns,
            timing.end_ns,
            mergeable=self.mergeable,
            place=self.place,
            sort=self.sort,
            lane=self.lane,
        )


def graph_of(net) -> Graph:
    """A contracted net as a graph; whatever depends on nothing starts when it did."""
    n = len(net)
    used, instance = np.unique(net.instance, return_inverse=True)
    instance = instance.ravel() - (used[0] < 0 if len(used) else 0)
    counts = np.bincount(net.owner, minlength=n)
    return Graph(
        duration_ns=net.duration,
        dep_offsets=np.append([0], np.cumsum(counts)),
        dep_rows=net.dep,
        dep_lag_ns=net.lag,
        instance=instance,
        instance_size=np.bincount(instance[instance >= 0]).astype(np.int32),
        release_ns=np.where(counts == 0, net.start, 0),
    )


def check(job: Job, coarse) -> None:
    fine = propagate(job.graph, "python")
    timing = propagate(graph_of(coarse), "python")
    assert np.array_equal(timing.start_ns, coarse.start)
    assert np.array_equal(timing.end_ns, coarse.end)
    # No row is lost; a row ends with the last of its parts, and edges lead forward.
    assert sorted(set(coarse.home.tolist())) == list(range(len(coarse)))
    latest = np.full(len(coarse), -1)
    np.maximum.at(latest, coarse.home, fine.end_ns)
    communication = coarse.instance >= 0
    assert np.array_equal(latest[communication], coarse.end[communication])
    assert (np.diff(coarse.position) > 0).all()
    assert (coarse.dep < coarse.owner).all()
    assert timing.makespan_ns == fine.makespan_ns


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_exact_contraction_keeps_all_times(seed):
    job = Job(random.Random(seed))
    coarse = contract(job.net())
    check(job, coarse)
    fine = propagate(job.graph, "python")
    assert np.array_equal(coarse.start, fine.start_ns[coarse.head])
    assert np.array_equal(coarse.end, fine.end_ns[coarse.tail])
    assert np.array_equal(coarse.instance, job.graph.instance[coarse.head])
    assert coarse.uneven_ns == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_exact_contraction_holds_for_other_arrivals(seed):
    """What remains keeps its times for any durations of rows that were not merged."""
    draw = random.Random(seed)
    job = Job(draw)
    coarse = contract(job.net())
    alone = np.bincount(coarse.home)[coarse.home] == 1
    factor = np.where(alone, np.array([draw.randint(0, 3) for _ in alone]), 1)
    job.graph = Graph(
        **{
            name: getattr(job.graph, name)
            for name in ("dep_offsets", "dep_rows", "dep_lag_ns", "instance", "instance_size")
        },
        release_ns=job.graph.release_ns,
        duration_ns=job.graph.duration_ns * factor,
    )
    fine = propagate(job.graph, "python")
    changed = graph_of(coarse)
    single = np.zeros(len(coarse), np.int64)
    single[coarse.home[alone]] = job.graph.duration_ns[alone]
    merged = np.bincount(coarse.home, minlength=len(coarse)) > 1
    durations = np.where(merged, coarse.duration, single)
    timing = propagate(
        Graph(
            duration_ns=durations,
            dep_offsets=changed.dep_offsets,
            dep_rows=changed.dep_rows,
            dep_lag_ns=changed.dep_lag_ns,
            instance=changed.instance,
            instance_size=changed.instance_size,
            release_ns=np.where(np.diff(changed.dep_offsets) == 0, fine.start_ns[coarse.head], 0),
        ),
        "python",
    )
    assert np.array_equal(timing.end_ns, fine.end_ns[coarse.tail])


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_fusing_keeps_all_times_as_long_as_ranks_arrive_as_they_did(seed):
    job = Job(random.Random(seed))
    coarse = contract(job.net(), group=np.array(job.operations, np.int32))
    check(job, coarse)
    assert len(coarse) <= len(contract(job.net()))


def test_fusing_happens():
    """The generator makes what the rewrites look for."""
    found = {"fused": 0, "merged": 0}
    for seed in range(60):
        job = Job(random.Random(seed))
        exact = contract(job.net())
        coarse = contract(job.net(), group=np.array(job.operations, np.int32))
        before = len(np.unique(job.graph.instance))
        found["fused"] += len(np.unique(coarse.instance)) < before
        found["merged"] += len(exact) < job.graph.rows
    assert found["fused"] > 5
    assert found["merged"] > 30
