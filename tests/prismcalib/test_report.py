"""The report: its numbers against the slower definitions, its page against bad surroundings."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from prismcalib import synth
from prismcalib.blocks import Layout
from prismcalib.cli import app
from prismcalib.computing import others_median
from prismcalib.errors import MergeInputError
from prismcalib.extent import extent_of
from prismcalib.merging import merge
from prismcalib.paths import critical_path
from prismcalib.prediction import predict
from prismcalib.report import describe_run, write_report
from prismcalib.report.coverage import cover
from prismcalib.report.encode import encode_timeline, leb128
from prismcalib.report.grids import LEVELS, GridShape, GridWriter, grid_shapes
from prismcalib.report.lanes import choose_ranks, read_lanes
from prismcalib.report.page import render_page
from prismcalib.report.scan import PARTS, scan
from prismcalib.stages import pipeline_stages
from prismcalib.trail import marked_path
from prismcalib.waiting import WaitRules
from prismtrace.converters import convert
from prismtrace.errors import OutputError
from prismtrace.schema import INDEX_BITS, ProcessGroup, TraceHeader
from prismtrace.trace import Trace, node_schema, open_trace, write_nodes

JOBS = {
    "pipeline": synth.JobSpec(
        pp=4, tp=2, dp=1, microbatches=8, steps=3, stragglers={5: 1.3}, launch_gap_ns=3000
    ),
    "interleaved": synth.JobSpec(
        pp=2, tp=1, dp=2, microbatches=4, schedule="interleaved", chunks=2, launch_gap_ns=500
    ),
    "experts": synth.JobSpec(pp=1, tp=2, dp=4, ep=4, steps=2, sequence_parallel=True),
    "coalesced": synth.JobSpec(pp=3, tp=1, dp=1, microbatches=6, coalesced_p2p=True, memory=False),
}


@pytest.fixture(scope="module", params=JOBS)
def calibrated(request):
    return merge(synth.generate(JOBS[request.param])).trace


@pytest.fixture(scope="module")
def pipeline():
    return merge(synth.generate(JOBS["pipeline"])).trace


@pytest.fixture(scope="module")
def megatron(data_dir, tmp_path_factory):
    """Eight real ranks."""
    path = tmp_path_factory.mktemp("megatron") / "megatron-tp8.parquet"
    recorded = path.with_suffix(".recorded.parquet")
    convert([data_dir / "kineto/megatron-tp8"], recorded)
    merge(recorded).write(path)
    return open_trace(path)


def small_trace(rows: list[dict[str, object]], *, groups=(), **header: object) -> Trace:
    """A calibrated trace of rows in short hand."""
    count: dict[int, int] = {}
    for row in rows:
        rank = row["rank"]
        index = count[rank] = count.get(rank, -1) + 1
        defaults = {
            "id": (rank << INDEX_BITS) | index,
            "index": index,
            "kind": "compute",
            "stream": 0,
            "real": True,
            "deps": [1] if index else [],
            "critical": False,
            "slack_ns": 0,
        }
        row.update({name: value for name, value in defaults.items() if name not in row})
    nodes = pl.DataFrame(rows, schema=node_schema()).sort("rank", "index")
    ranks = tuple(sorted(count))
    return Trace(
        header=TraceHeader(
            kind="calibrated", world_size=max(ranks) + 1, ranks=ranks, groups=groups, **header
        ),
        nodes=nodes.lazy(),
    )


# --- numbers ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=20))
def test_cover_counts_every_instant_once(spans):
    begin = np.array([b for b, _ in spans], np.int64)
    end = begin + np.array([length for _, length in spans], np.int64)
    instants = {t for b, e in zip(begin.tolist(), end.tolist(), strict=True) for t in range(b, e)}
    edges = np.arange(0, 61, 4)[None, :]
    cells, _ = cover(begin, end).per_cell(edges)
    expected = [sum(t in instants for t in range(low, low + 4)) for low in range(0, 60, 4)]
    assert cells[0].tolist() == expected


def test_cover_shares_belong_to_the_span_that_began_first():
    union = cover(np.array([0, 5]), np.array([10, 20]), np.array([0.5, 0.1]))
    cells, shares = union.per_cell(np.array([[0, 10, 20]]))
    assert cells.tolist() == [[10, 10]]
    assert shares.tolist() == [[5.0, 1.0]]


@pytest.mark.parametrize("ranks", [1, 8, 100, 1023, 1024, 1025, 8192, 100_000])
def test_grids_stay_small(ranks):
    shapes = grid_shapes(ranks, 2**21)
    assert all(shape.lines(ranks) * shape.bins <= max(2**21, ranks * 64) for shape in shapes)
    assert all(shapes[0].bins % shape.bins == 0 for shape in shapes)
    assert shapes[-1].ranks_per_line == 1


def test_path_from_marks_is_the_critical_path(calibrated):
    quick = marked_path(Layout.of(calibrated), extent_of(calibrated))
    whole = critical_path(calibrated)
    assert quick.segments.equals(whole.segments)
    assert quick.as_dict() == replace(whole, looked_at=None).as_dict()


def test_path_of_real_ranks(megatron):
    quick = marked_path(Layout.of(megatron), extent_of(megatron))
    assert quick.as_dict() == replace(critical_path(megatron), looked_at=None).as_dict()


def test_path_with_eager_sends():
    trace = merge(
        synth.generate(JOBS["pipeline"]), rules=WaitRules(eager_below=2**40, rooted=True)
    ).trace
    summary = describe_run(trace)
    assert summary.path.as_dict() == replace(critical_path(trace), looked_at=None).as_dict()


def test_times_are_those_of_predict(calibrated):
    summary, predicted = describe_run(calibrated), predict(calibrated)
    ranks = summary.ranks
    window = summary.extent.window_ns
    assert window == predicted.window_ns
    whole = ranks.select(
        pl.sum_horizontal(
            f"{part}_ns" for part in ("compute", "inner_idle", "transfer", "wait", "gap")
        )
    )
    assert whole.to_series().to_list() == [window] * ranks.height
    parts = ranks.select("rank", *(f"{part}_ns" for part in PARTS), "gap_ns")
    assert parts.equals(predicted.ranks)
    assert summary.basis == pytest.approx(predicted.basis)
    assert summary.steps.equals(predicted.steps.select("step", "duration_ns"))


def test_blocks_do_not_matter(calibrated):
    extent = extent_of(calibrated)
    one, many = (
        scan(Layout.of(calibrated), extent, cells=8192, block_rows=rows) for rows in (10**9, 1)
    )
    for name in ("ranks", "traffic", "late", "kinds", "sources", "step_ends", "pairs"):
        assert getattr(one, name).equals(getattr(many, name)), name
    for left, right in zip(one.grids, many.grids, strict=True):
        assert np.array_equal(left.shares, right.shares)
    if one.memory_bytes is not None:
        assert np.array_equal(one.memory_bytes, many.memory_bytes)


def test_grid_means_are_the_ranks_shares(pipeline):
    summary = describe_run(pipeline)
    (grid,) = summary.grids
    shares = grid.shares.mean(axis=2) / LEVELS
    for part, name in enumerate(("compute_ns", "inner_idle_ns", "transfer_ns", "wait_ns")):
        exact = summary.ranks[name].to_numpy() / summary.extent.window_ns
        assert np.abs(shares[part] - exact).max() < 0.02


def test_lines_of_several_ranks_are_their_mean():
    times = np.arange(2 * 5 * 8, dtype=float).reshape(2, 5, 8)
    writer = GridWriter(GridShape(2, 4), 5, 2)
    writer.add(0, times[:, :4], 800)
    writer.add(4, times[:, 4:], 800)
    pairs = times.reshape(2, 5, 4, 2).sum(axis=3)
    means = [pairs[:, 0:2].mean(axis=1), pairs[:, 2:4].mean(axis=1), pairs[:, 4]]
    expected = np.rint(np.stack(means, axis=1) / 200 * LEVELS).clip(0, LEVELS)
    assert np.array_equal(writer.grid.shares, expected)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=30))
def test_others_median(values):
    got = others_median(
        pl.Series([value for value, _ in values]), pl.Series([part for _, part in values])
    )
    for place, (_, part) in enumerate(values):
        others = [v for i, (v, p) in enumerate(values) if i != place and p == part]
        if not others:
            assert got[place] is None
        else:
            assert abs(got[place] - np.median(others)) <= 0.5


def test_memory_levels_hold_until_the_next(pipeline):
    rows = [
        {"rank": 0, "start_ns": 0, "dur_ns": 10, "mem_bytes": 100},
        {"rank": 0, "start_ns": 500, "dur_ns": 10, "mem_bytes": 300, "mem_peak_bytes": 700},
        {"rank": 0, "start_ns": 990, "dur_ns": 10, "critical": True},
    ]
    levels = describe_run(small_trace(rows)).memory.levels[0].tolist()
    assert levels[0] == 0 or levels[0] == 100
    assert levels[100] == 100
    assert levels[200] == 700
    assert describe_run(pipeline).memory.names == tuple(f"rank {rank}" for rank in range(8))


# --- stages -----------------------------------------------------------------------------------


def pairs(*links: tuple[int, int, int]) -> pl.DataFrame:
    schema = {"group": pl.Int32, "rank": pl.Int32, "peer": pl.Int32}
    return pl.DataFrame(links, schema=schema, orient="row")


def header(world: int, *groups: tuple[int, ...], **axes: int) -> TraceHeader:
    return TraceHeader(
        kind="calibrated",
        world_size=world,
        ranks=tuple(range(world)),
        axes=axes,
        groups=tuple(ProcessGroup(id=i, name=f"g{i}", ranks=g) for i, g in enumerate(groups)),
    )


def test_stages_follow_the_group_order():
    found = pipeline_stages(header(4, (2, 0), (1, 3)), pairs((0, 0, 2), (1, 1, 3)))
    assert found == {2: 0, 0: 1, 1: 0, 3: 1}


def test_stages_from_pairs_of_neighbours():
    links = pairs((0, 0, 1), (1, 1, 2), (2, 2, 1))
    assert pipeline_stages(header(3, (0, 1), (1, 2), (0, 1, 2)), links) == {0: 0, 1: 1, 2: 2}


def test_sends_of_another_axis_are_no_pipeline():
    """Context-parallel rings send as well; the axis, or the names, tell which are pipelines."""
    assert pipeline_stages(header(4, (0, 1, 2, 3), pp=1), pairs((0, 0, 1))) is None
    rings = ((0, 1, 2), (3, 4, 5))
    links = [
        (ring, rank, other)
        for ring, ranks in enumerate(rings)
        for rank in ranks
        for other in ranks
        if rank != other
    ]
    links += [(2 + rank, rank, rank + 3) for rank in range(3)]
    both = header(6, *rings, (0, 3), (1, 4), (2, 5), pp=2)
    assert pipeline_stages(both, pairs(*links)) == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    square = header(4, (0, 1), (2, 3), (0, 2), (1, 3), pp=2)
    crossed = pairs((0, 0, 1), (0, 1, 0), (1, 2, 3), (2, 0, 2), (3, 1, 3))
    assert pipeline_stages(square, crossed) is None
    names = ("cp_0", "cp_1", "pp_0", "pp_1")
    named = square.model_copy(
        update={
            "groups": tuple(
                g.model_copy(update={"name": n}) for g, n in zip(square.groups, names, strict=True)
            )
        }
    )
    assert pipeline_stages(named, crossed) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_uneven_chains_are_no_pipeline():
    assert pipeline_stages(header(5), pairs((0, 0, 1), (0, 2, 3), (0, 3, 4))) is None
    assert pipeline_stages(header(2), pairs()) is None


# --- conclusions ------------------------------------------------------------------------------


def test_a_real_run_with_a_slow_host(megatron):
    conclusion = describe_run(megatron).conclusion
    assert conclusion.headline == (
        "65 % of the critical path is idle time of the devices, most of it on ranks 0 and 6: "
        "the host launches too slowly."
    )


def test_a_slow_rank_is_named(pipeline):
    summary = describe_run(pipeline)
    assert summary.conclusion.headline.startswith("Rank 5 computes 3")
    assert "the others wait for it" in summary.conclusion.headline
    assert summary.stragglers.causes[0].where.startswith("rank 5")


def test_a_heavy_stage_is_named():
    spec = synth.JobSpec(
        pp=4, tp=2, dp=2, mean_ns={"head forward": 9 * 10**6, "head backward": 10**7}
    )
    headline = describe_run(merge(synth.generate(spec)).trace).conclusion.headline
    assert headline.startswith("Stage 3 of the pipeline computes")


def test_slow_transfers_are_named():
    spec = synth.JobSpec(pp=1, tp=2, dp=2, mean_ns={"tp all_reduce": 9 * 10**6})
    headline = describe_run(merge(synth.generate(spec)).trace).conclusion.headline
    assert re.match(
        r"\d+ % of the critical path is communication, most of it all_reduce of tp", headline
    )


def test_an_even_job_has_no_culprit():
    spec = synth.JobSpec(pp=1, tp=1, dp=8, jitter=0.0, step_jitter=0.0)
    headline = describe_run(merge(synth.generate(spec)).trace).conclusion.headline
    assert headline.endswith(
        "no rank stands out: only faster or less computation shortens the step."
    )


def test_unknown_partners_come_first():
    rows = [
        {"rank": 0, "start_ns": 0, "dur_ns": 10, "critical": True},
        {
            "rank": 0,
            "start_ns": 10,
            "dur_ns": 90,
            "critical": True,
            "kind": "all_reduce",
            "group": 0,
        },
    ]
    trace = small_trace(rows, groups=(ProcessGroup(id=0, name="world", ranks=(0,)),))
    summary = describe_run(trace)
    assert "partners were not recorded" in summary.conclusion.headline
    assert summary.basis["communication without partners, as recorded"] == pytest.approx(0.9)
    assert render_page(trace, summary)


def test_transfers_that_nobody_measured_are_mentioned(pipeline):
    model = pl.lit("model").cast(node_schema()["transfer_source"])
    changed = pl.when(pl.col("transfer_source").is_not_null()).then(model)
    trace = replace(pipeline, nodes=pipeline.nodes.with_columns(transfer_source=changed))
    summary = describe_run(trace)
    assert (
        summary.conclusion.notes[-1]
        == "10 % of the critical path are transfers not measured: model."
    )
    assert "transfer, model" in summary.basis


# --- lanes and their bytes --------------------------------------------------------------------


def read_leb128(data: bytes) -> list[int]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    return values


@given(st.lists(st.integers(0, 2**62), max_size=50))
def test_leb128_round_trip(values):
    assert read_leb128(leb128(np.array(values, np.int64))) == values


def test_ranks_that_matter_are_shown():
    count = 1000
    ranks = pl.DataFrame(
        {
            "rank": range(count),
            "path_share": [0.5 if rank == 700 else 0.0 for rank in range(count)],
            "excess": [0.4 if rank == 333 else -0.1 for rank in range(count)],
        }
    )
    chosen = choose_ranks(ranks, 16)
    assert len(chosen) == 16
    assert list(chosen) == sorted(chosen)
    assert chosen[700] == "50 % of the critical path"
    assert chosen[333] == "computes +40 %"
    assert list(chosen.values()).count("sample") == 14
    assert set(choose_ranks(ranks.head(16), 16)) == set(range(16))


def test_spans_survive_encoding(pipeline):
    summary = describe_run(pipeline)
    lanes = read_lanes(pipeline, summary, 10**6)
    description, text = encode_timeline(summary, lanes, 10**6)
    block = gzip.decompress(base64.b64decode(text))

    def numbers(name: str) -> list[int]:
        begin, length = description["arrays"][name]
        return read_leb128(block[begin : begin + length])

    first = lanes[0].spans
    rows = first.height
    assert list(itertools.accumulate(numbers("start")[:rows])) == first["start_ns"].to_list()
    assert numbers("duration")[:rows] == first["dur_ns"].to_list()
    names = [description["names"][n - 1] if n else None for n in numbers("name")[:rows]]
    assert names == first["name"].cast(pl.String).to_list()
    path = summary.path.segments
    assert numbers("path_start")[0] == path["start_ns"][0] - summary.extent.begin_ns
    ends = np.cumsum(numbers("path_start")) + numbers("path_length")
    assert ends[-1] == summary.extent.window_ns


def test_the_shortest_spans_go_first(pipeline):
    summary = describe_run(pipeline)
    lane = read_lanes(pipeline, summary, 8 * 100)[0]
    assert lane.spans.height == 100
    whole = pipeline.ranks([0]).collect()
    assert lane.dropped == whole.height - 100
    assert lane.dropped_ns == whole["dur_ns"].sum() - lane.spans["dur_ns"].sum()
    assert lane.spans["dur_ns"].min() >= whole["dur_ns"].sort()[lane.dropped - 1]


# --- the page ---------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(pipeline, tmp_path):
    page = tmp_path / "report.html"
    write_report(pipeline, page)
    text = page.read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)
    assert not re.search(
        r"<(?:script|img|iframe|link|audio|video|object)[^>]*\s(?:src|href|data)=", text
    )
    assert not re.search(
        r"\$\{?\w+\}?\s*[<\n]", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    )
    for part in (
        "Critical path",
        "Stragglers",
        "Pipeline bubbles",
        "Waits and transfers",
        "Memory",
    ):
        assert f"<h2>{part}</h2>" in text
    again = tmp_path / "again.html"
    write_report(pipeline, again)
    assert again.read_bytes() == page.read_bytes()


def test_names_from_traces_stay_text():
    evil = "</script><script>alert(1)</script><b>&amp;'\""
    rows = [
        {"rank": rank, "start_ns": 0, "dur_ns": 100, "critical": rank == 0, "name": evil}
        for rank in (0, 1)
    ]
    rows.append(
        {
            "rank": 0, "start_ns": 100, "dur_ns": 5, "kind": "all_reduce", "group": 3, "seq": 0,
            "wait_ns": 0, "transfer_ns": 5, "transfer_source": "measured", "critical": True,
        }
    )  # fmt: skip
    groups = (ProcessGroup(id=3, name=evil, ranks=(0,)),)
    trace = small_trace(rows, groups=groups, sources=(evil,), streams={0: evil}, policies={evil: 2})
    page = render_page(trace, describe_run(trace))
    assert "alert(1)</script>" not in page
    assert "<script>alert" not in page
    assert "<b>" not in page
    description = re.search(r'id="timeline-description">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(description)["names"] == [evil]


def test_the_page_is_bounded(pipeline):
    summary = describe_run(pipeline)
    whole = len(render_page(pipeline, summary).encode())
    assert whole < 300_000
    small = render_page(pipeline, summary, most_bytes=whole * 3 // 4)
    assert len(small.encode()) <= whole * 3 // 4


@pytest.mark.parametrize(
    "rows",
    [
        [{"rank": 0, "start_ns": 5, "dur_ns": 10, "critical": True}],
        [{"rank": 0, "start_ns": 0, "dur_ns": 0, "critical": True}],
        [{"rank": 7, "start_ns": -5, "dur_ns": 10**13, "critical": True, "name": "long"}],
    ],
    ids=["one row", "no time at all", "hours, one rank of eight"],
)
def test_tiny_traces(rows):
    trace = small_trace(rows)
    summary = describe_run(trace)
    json.dumps(summary.as_dict(), default=str, allow_nan=False)
    assert "<h2>Timeline</h2>" in render_page(trace, summary)


def test_refuses_what_has_no_timeline(tmp_path, pipeline):
    page = tmp_path / "report.html"
    page.write_text("old")
    with pytest.raises(MergeInputError, match="no common timeline"):
        write_report(synth.generate(JOBS["pipeline"]), page)
    untimed = replace(pipeline, nodes=pipeline.nodes.with_columns(start_ns=pl.lit(None, pl.Int64)))
    with pytest.raises(MergeInputError, match="without times"):
        write_report(untimed, page)
    with pytest.raises(MergeInputError, match="no rows"):
        write_report(replace(pipeline, nodes=pipeline.nodes.filter(pl.col("rank") < 0)), page)
    assert page.read_text() == "old"
    with pytest.raises(OutputError):
        write_report(pipeline, tmp_path / "missing" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_large_traces_are_not_simulated(pipeline):
    summary = describe_run(pipeline, straggler_rows=100)
    assert summary.stragglers is None
    assert "run `prismcalib stragglers`" in summary.stragglers_absent
    assert "run `prismcalib stragglers`" in render_page(pipeline, summary)


def test_the_command(pipeline, tmp_path, run_command):
    trace = tmp_path / "aligned.parquet"
    write_nodes(pipeline.header, pipeline.nodes, trace)
    done = run_command("prismcalib", "report", trace, "-o", "report.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Rank 5 computes")
    assert (tmp_path / "report.html").stat().st_size > 50_000
    numbers = run_command("prismcalib", "report", trace, "--json")
    assert (
        json.loads(numbers.stdout)["critical_path"]["length_ns"]
        == critical_path(pipeline).length_ns
    )
    assert run_command("prismcalib", "report", trace).returncode == 2


# --- colours ----------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes 2009, severity 1.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def oklab(rgb: np.ndarray) -> np.ndarray:
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    axes = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099], [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_apart(sight, theme):
    style = files("prismcalib.report").joinpath("page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): #(\w{6})", blocks[theme == "dark"]))
    points = []
    for name in ("compute", "inner-idle", "transfer", "wait", "gap"):
        value = np.array([int(found[name][i : i + 2], 16) for i in (0, 2, 4)]) / 255
        linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
        points.append(oklab(np.array(SIGHT[sight]) @ linear))
    nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(points, 2))
    assert nearest > 0.14


@pytest.mark.needs_data
def test_an_operation_log_whose_communications_lack_partners(data_dir, tmp_path):
    convert(data_dir / "ops" / "straggler" / "trace-ST.parquet", tmp_path / "log.parquet")
    summary = describe_run(merge(tmp_path / "log.parquet").trace)
    assert summary.traffic["wait_share"].is_not_nan().all()
    assert json.dumps(summary.as_dict(), allow_nan=False)
    assert "before the critical path" in summary.conclusion.headline


def test_the_command_prints_names_as_they_can_be_shown(tmp_path):
    run = synth.generate(synth.JobSpec(pp=1, tp=2, dp=2, mean_ns={"tp all_reduce": 9 * 10**6}))
    groups = tuple(
        group.model_copy(update={"name": f"\x1b[31m{group.name}"}) for group in run.header.groups
    )
    named = replace(run, header=run.header.model_copy(update={"groups": groups}))
    merge(named).write(tmp_path / "run.parquet")
    words = ["report", str(tmp_path / "run.parquet"), "-o", str(tmp_path / "page\x1b.html")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "\\x1b[31mtp" in shown.output
    assert "\x1b" not in shown.output
