"""What several commands print about one trace means the same, and is named alike."""

import json
import re

import polars as pl
import pytest
from typer.testing import CliRunner

import prismtrace as pt
from prismcalib import describe_run, merge, predict, synth
from prismcalib.cli import app
from prismcalib.computing import computing_times
from prismtrace.converters import convert
from prismtrace.trace import Trace
from tests.prismtrace import operation_logs as logs


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def half_idle(tmp_path_factory):
    """A job whose device idles for half of every computation."""
    run = synth.generate(synth.JobSpec(pp=1, tp=1, dp=4, steps=2, microbatches=2))
    local = pl.col("kind").cast(pl.String).is_in(["compute", "memcpy"])
    busy = pl.when(local).then(pl.col("dur_ns") // 2)
    path = tmp_path_factory.mktemp("idle") / "idle.parquet"
    merge(Trace(run.header, run.nodes.with_columns(x_busy_ns=busy))).write(path)
    return path


def test_computation_leaves_out_idle_between_kernels_everywhere(half_idle):
    trace = pt.open(half_idle)
    by_rank = [
        table.sort("rank")["compute_ns"].to_list()
        for table in (
            predict(trace, draws=0).ranks,
            describe_run(trace).ranks,
            computing_times(trace.collect()),
        )
    ]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    path = json.loads(invoke("critical-path", half_idle, "--json"))
    printed = invoke("what-if", half_idle, "--scale", "kind = 'compute'", "2", "--limit", "9")
    before = re.search(r"^compute +([\d.,]+) ms", printed, re.MULTILINE)[1].replace(",", "")
    assert float(before) == round((path["compute_ns"] - path["inner_idle_ns"]) / 1e6, 3)
    assert re.search(r"^idle inside spans +[\d.,]+ ms", printed, re.MULTILINE)
    share = (path["compute_ns"] - path["inner_idle_ns"]) / path["length_ns"]
    assert f"compute {share:.0%}, " in printed
    assert f"idle inside spans {path['inner_idle_ns'] / path['length_ns']:.0%}" in printed


def test_idle_time_says_where_it_lies(half_idle, tmp_path):
    rows = pl.read_parquet(half_idle).filter(pl.col("x_busy_ns").is_not_null())
    inside_ns = (rows["dur_ns"] - rows["x_busy_ns"]).sum()
    words = ("merge", half_idle, "-o", tmp_path / "again.parquet")
    report = json.loads(invoke(*words, "--json"))
    assert report["idle_inside"] == {"count": rows.height, "total_ns": inside_ns}
    merged = invoke(*words)
    assert re.search(r"^idle between spans .* before [\d,]+ rows", merged, re.MULTILINE)
    assert re.search(r"^idle inside spans .*: between the kernels of ", merged, re.MULTILINE)
    for command in ("critical-path", "predict"):
        printed = invoke(command, half_idle)
        assert "idle inside spans" in printed
        assert "idle between spans" in printed


def test_merge_tells_no_idle_time_inside_spans_that_it_does_not_know(tmp_path):
    run = synth.generate(synth.JobSpec(pp=1, tp=1, dp=2, steps=1, microbatches=1))
    report = merge(Trace(run.header, run.nodes)).report
    assert report.idle_inside is report.idle_inside_on_critical_path is None
    pt.write(Trace(run.header, run.nodes), tmp_path / "run.parquet")
    printed = invoke("merge", tmp_path / "run.parquet", "-o", tmp_path / "aligned.parquet")
    assert "idle between spans" in printed
    assert "idle inside spans" not in printed


def test_what_if_lists_the_ranks_that_its_headline_names(half_idle):
    printed = invoke("what-if", half_idle, "--scale", "rank = 3", "3", "--limit", "1")
    table = printed.partition("time on the critical path by rank")[2].partition("by group")[0]
    heads = re.findall(r"\d+% (?:of it )?on rank \d+.*$", printed, re.MULTILINE)
    named = {rank for line in heads for rank in re.findall(r"on rank (\d+)", line)}
    assert "3" in named
    listed = set(re.findall(r"^ *(\d+) ", table, re.MULTILINE))
    assert named <= listed
    assert "largest changes first" in table


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory):
    """A job whose log numbers its ranks 0, 2, 4, ..."""
    folder = tmp_path_factory.mktemp("renumbered")
    work = {(replica, stage): 10 for replica in range(4) for stage in range(2)} | {(3, 0): 15}
    log = logs.simulate(dp=4, work=work, microbatches=8, rank_stride=2)
    log.table.write_parquet(folder / "log.parquet")
    convert(folder / "log.parquet", folder / "run.parquet")
    merge(folder / "run.parquet").write(folder / "merged.parquet")
    return folder / "merged.parquet"


def test_ranks_are_shown_with_the_number_of_the_log(renumbered, tmp_path):
    for words in (
        ["critical-path", renumbered],
        ["predict", renumbered],
        ["stragglers", renumbered, "--by", "rank"],
        ["what-if", renumbered, "--scale", "rank = 3", "0.5"],
        ["compare", renumbered, renumbered],
        ["compare", renumbered, renumbered, "--by", "rank"],
        ["health", renumbered, renumbered],
    ):
        assert re.search(r"^rank +in the log", invoke(*words), re.MULTILINE), words[0]
    page = tmp_path / "page.html"
    invoke("report", renumbered, "-o", page)
    text = page.read_text()
    heads = re.findall(r"<thead>.*?</thead>", text, re.DOTALL)
    with_rank = [head for head in heads if re.search(r">rank</th>", head)]
    assert len(with_rank) >= 5
    assert all(">in the log</th>" in head for head in with_rank)
    assert "rank 3 (6 in the log, stage 0)" in text


def test_numbers_of_the_page_have_the_digits_of_the_command(renumbered, tmp_path):
    page = tmp_path / "page.html"
    invoke("report", renumbered, "-o", page)
    text = page.read_text()
    report = json.loads(invoke("stragglers", renumbered, "--json"))
    for part in report["parts"]["rank"][:3]:
        assert f"{part['slowdown']:.4f}" in text
    for cause in report["causes"]:
        assert f"{cause['saves']:.2%}".replace("%", " %") in text
        assert cause["without"] in text.replace("&#x27;", "'")
