"""Pieces of one job become one trace; pieces of others do not."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import prismtrace as pt
from prismtrace.converters import convert
from prismtrace.errors import JoinError, OutputError
from prismtrace.schema import ClockDomain, ProcessGroup
from prismtrace.trace import Trace
from tests.prismtrace.kineto_jobs import Job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("run")
    convert(Job(tp=2, dp=2, torch="2.5", steps=3).write(folder / "in"), folder / "run.parquet")
    return pt.open(folder / "run.parquet")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "joined.parquet"


def cut(trace: Trace, folder: Path, **words: Any) -> Path:
    path = folder / f"piece{len(list(folder.glob('piece*')))}.parquet"
    pt.slice_out(trace, path, **words)
    return path


@pytest.mark.parametrize("blocks", [[(0, 1), (2, 3)], [(1, 3), (0, 2)], [(0,), (3,), (1, 2)]])
def test_blocks_of_ranks(
    run: Trace, out: Path, tmp_path: Path, blocks: list[tuple[int, ...]]
) -> None:
    report = pt.concat([cut(run, tmp_path, ranks=ranks) for ranks in blocks], out)
    joined = pt.open(out)
    assert joined.collect().equals(run.collect())
    assert joined.header == run.header
    assert (report.pieces, report.ranks, report.linked) == (len(blocks), (0, 1, 2, 3), 0)


def test_a_folder_of_pieces_and_a_piece_of_several_files(
    run: Trace, out: Path, tmp_path: Path
) -> None:
    whole = pt.open(cut(run, tmp_path, ranks=(0, 1)))
    split = tmp_path / "split"
    split.mkdir()
    for rank in (0, 1):  # two files of one trace, with one header
        pt.write(whole.ranks([rank]), split / f"{rank}.parquet")
    pt.slice_out(run, split / "rest.parquet", ranks=(2, 3))
    assert pt.concat([split], out).pieces == 2
    assert pt.open(out).collect().equals(run.collect())


def test_stretches_of_steps(run: Trace, out: Path, tmp_path: Path) -> None:
    pieces = [cut(run, tmp_path, steps=steps) for steps in ([5], [3, 4])]
    report = pt.concat(pieces, out)
    joined = pt.open(out)
    assert joined.collect().drop("deps").equals(run.collect().drop("deps"))
    assert (joined.header.steps, report.nodes) == ((3, 4, 5), run.collect().height)
    assert pt.validate(joined) == []
    # Of the edges into the later stretch those along the streams are there again.
    streams = run.collect().select("rank", "stream").n_unique()
    lost = joined.header.policies["cut-dependency"]
    edges = [t.collect()["deps"].list.len().sum() for t in (run, joined)]
    assert (report.linked, edges[0] - edges[1]) == (streams, lost - streams)


def test_a_grid_of_both(run: Trace, out: Path, tmp_path: Path) -> None:
    grid = product([(0, 3), (1, 2)], [[3], [4], [5]])
    pt.concat([cut(run, tmp_path, ranks=ranks, steps=steps) for ranks, steps in grid], out)
    joined = pt.open(out)
    assert joined.collect().drop("deps").equals(run.collect().drop("deps"))
    assert pt.validate(joined) == []


def test_instances_and_edges_are_numbered_on(make_trace: Any, out: Path) -> None:
    def stretch(step: int, start: int) -> Trace:
        at = {"step": step, "dur_ns": 10}
        comm = {"kind": "all_reduce", "group": 0, "seq": 0, "deps": [1], "lag_ns": [3], **at}
        return make_trace(
            *(
                row
                for rank in (0, 1)
                for row in (
                    {"rank": rank, "start_ns": start, **at},
                    {"rank": rank, "start_ns": start + 20, **comm},
                )
            ),
            kind="recorded",
            steps=(step,),
        )

    report = pt.concat([stretch(0, 0), stretch(1, 100)], out)
    rows = pt.open(out).collect().filter(rank=1)
    assert rows.select("index", "seq", "deps", "lag_ns").rows() == [
        (0, None, [], None),
        (1, 0, [1], [3]),
        (2, None, [1], None),
        (3, 1, [1], [3]),
    ]
    assert report.linked == 2
    assert pt.validate(pt.open(out)) == []


def test_edges_from_other_ranks_move_along(make_trace: Any, out: Path) -> None:
    def stretch(step: int) -> Trace:
        first, second = {"step": step}, {"rank": 1, "step": step, "xdeps": [0], "lag_ns": [7]}
        return make_trace(first, second, kind="bare", steps=(step,))

    pt.concat([stretch(0), stretch(1)], out)
    rows = pt.open(out).collect().filter(rank=1)
    assert rows.select("xdeps", "deps", "lag_ns").rows() == [([0], [], [7]), ([1], [1], [0, 7])]
    assert pt.validate(pt.open(out)) == []


def test_names_are_numbered_once(make_trace: Any, out: Path) -> None:
    def block(rank: int, *names: str) -> Trace:
        groups = [ProcessGroup(id=n, name=name, ranks=(0, 1)) for n, name in enumerate(names)]
        comm = {"kind": "all_reduce", "rank": rank, "group": names.index("tp"), "seq": 0}
        host = "a" if rank == 0 else "b"
        return make_trace(
            {**comm, "stream": names.index("tp")},
            kind="bare",
            world_size=2,
            groups=tuple(groups),
            streams=dict(enumerate(names)),
            clock=(ClockDomain(id=0, ranks=(rank,), host=host),),
        )

    pt.concat([block(0, "tp", "dp"), block(1, "pp", "tp")], out)
    header = pt.open(out).header
    assert {group.name for group in header.groups} == {"tp", "dp", "pp"}
    assert [(domain.id, domain.host) for domain in header.clock] == [(0, "a"), (1, "b")]
    rows = pt.open(out).collect()
    assert rows["group"].n_unique() == rows["stream"].n_unique() == 1
    assert header.streams[rows["stream"][1]] == "tp"
    assert pt.validate(pt.open(out)) == []


# --- refusals -----------------------------------------------------------------------------------


def refused(out: Path, *traces: Any) -> JoinError:
    with pytest.raises(JoinError) as caught:
        pt.concat(traces, out)
    assert not out.exists()
    assert caught.value.hint
    return caught.value


def test_other_jobs(make_trace: Any, out: Path) -> None:
    one = make_trace({}, kind="bare", world_size=2)
    assert "world size 2 and 3" in str(
        refused(out, one, make_trace({"rank": 1}, kind="bare", world_size=3))
    )
    assert "kind of trace" in str(
        refused(out, one, make_trace({"rank": 1}, kind="recorded", world_size=2))
    )
    other = make_trace({"rank": 1}, kind="bare", world_size=2, axes={"tp": 2})
    assert "parallel axes" in str(refused(out, one, other))
    slices = [make_trace({"rank": rank}, world_size=2) for rank in (0, 1)]
    assert "prismcalib merge" in refused(out, *slices).hint
    assert "no trace" in str(refused(out))


def test_pieces_that_overlap_or_lack_something(run: Trace, out: Path, tmp_path: Path) -> None:
    twice = refused(out, cut(run, tmp_path, ranks=[0, 1]), cut(run, tmp_path, ranks=[1, 2]))
    assert "ranks 1 are in two pieces" in str(twice)
    lacking = refused(
        out, cut(run, tmp_path, ranks=[0, 1], steps=[3]), cut(run, tmp_path, ranks=[0], steps=[4])
    )
    assert "ranks 1 are in some steps only" in str(lacking)
    steps = refused(out, cut(run, tmp_path, steps=[3, 4]), cut(run, tmp_path, steps=[4, 5]))
    assert "steps do not follow one another: 3-4 and 4-5" in str(steps)


def test_communications_that_do_not_fit(make_trace: Any, out: Path) -> None:
    groups = (ProcessGroup(id=0, name="world", ranks=(0, 1)),)
    pieces = [
        make_trace(
            {"rank": rank, "kind": kind, "group": 0, "seq": 0},
            kind="bare",
            world_size=2,
            groups=groups,
        )
        for rank, kind in enumerate(("all_reduce", "all_gather"))
    ]
    error = refused(out, *pieces)
    assert "not the same in all pieces" in str(error)
    assert "seq=0" in error.where


def test_times_and_clocks_have_to_go_on(make_trace: Any, out: Path) -> None:
    def piece(step: int, start: int, host: str = "a") -> Trace:
        clock = (ClockDomain(id=0, ranks=(0,), host=host),)
        row = {"start_ns": start, "dur_ns": 50, "step": step}
        return make_trace(row, kind="recorded", steps=(step,), clock=clock)

    early = refused(out, piece(0, 100), piece(1, 120))
    assert "steps 1 begin before those ahead of them end: on rank 0 by 30 ns" in str(early)
    assert "different clocks" in str(refused(out, piece(0, 100), piece(1, 200, "b")))


def test_a_piece_is_not_overwritten(run: Trace, tmp_path: Path) -> None:
    piece = cut(run, tmp_path, ranks=[0])
    with pytest.raises(OutputError, match="one of the inputs"):
        pt.concat([piece, cut(run, tmp_path, ranks=[1])], piece)


def test_the_order_of_rows_is_right_in_the_file(run: Trace, out: Path, tmp_path: Path) -> None:
    pt.concat([cut(run, tmp_path, ranks=ranks) for ranks in ([0, 2], [1, 3])], out)
    assert pl.read_parquet(out)["id"].is_sorted()
