import json

import pytest
from typer.testing import CliRunner

from prismcalib.cli import app
from prismtrace.trace import open_trace, write


@pytest.fixture
def recorded(make_run, tmp_path):
    run = make_run(clock_error_ns=[0, 8_000_000, 0, 0])
    path = tmp_path / "run.parquet"
    write(run.trace, path)
    return path


@pytest.fixture
def aligned(recorded, tmp_path):
    path = tmp_path / "aligned.parquet"
    invoke("merge", recorded, "-o", path)
    return path


def invoke(*words):
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_merge(recorded, tmp_path):
    output = tmp_path / "aligned.parquet"
    text = invoke("merge", recorded, "-o", output)
    assert open_trace(output).header.kind == "calibrated"
    for words in (
        "4 ranks",
        "recorded",
        "every row reproduced exactly",
        "1 of 4 clocks corrected",
        "-8.000 ms",
    ):
        assert words in text
    again = invoke("merge", output, "-o", output, "--json", "--verify", "--max-residual", "500us")
    report = json.loads(again)
    assert report["output"] == str(output)
    assert report["difference_ns"] == 0
    assert report["clock"]["domains"][1]["offset_ns"] == -8_000_000


def test_merge_says_when_no_clock_was_wrong(make_run, tmp_path):
    write(make_run().trace, tmp_path / "run.parquet")
    text = invoke("merge", tmp_path / "run.parquet", "-o", tmp_path / "aligned.parquet")
    assert "no clock corrected (4 in all)" in text


def test_critical_path(aligned):
    text = invoke("critical-path", aligned, "--limit", 3)
    for words in (
        "changes of rank",
        "computation",
        "by kind",
        "by rank",
        "by step",
        "longest segm",
    ):
        assert words in text
    assert "by phase" not in text
    found = json.loads(invoke("critical-path", aligned, "--json"))
    assert found["length_ns"] > 0


def test_predict(aligned):
    text = invoke("predict", aligned)
    for words in ("step time", "median of 3", "waiting", "computation, measured"):
        assert words in text
    assert len(json.loads(invoke("predict", aligned, "--json"))["steps"]) == 3


def test_check(recorded):
    assert "no cycle, no member missing: 4 ranks" in invoke("check", recorded)
    found = json.loads(invoke("check", recorded, "--json"))
    assert found["instances"] == 12
    assert found["longest_chain"] > 3


def test_failures_end_with_one_message(recorded, tmp_path, run_command):
    done = run_command("prismcalib", "critical-path", recorded)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: a recorded trace has no common timeline yet [")
    assert "hint: run `prismcalib merge`" in done.stderr
    done = run_command("prismcalib", "merge", recorded, "-o", tmp_path / "x.parquet",
                       "--max-residual", "soon")  # fmt: skip
    assert done.returncode == 2
    assert "not a duration" in done.stderr
    assert not (tmp_path / "x.parquet").exists()


def test_help_loads_nothing_heavy(run_command):
    code = (
        "import sys; import prismcalib.cli, prismcalib;"
        "print({'polars', 'numpy', 'numba', 'networkx', 'pydantic', 'rich'} & set(sys.modules))"
    )
    done = run_command("python", "-c", code)
    assert done.stdout.strip() == "set()"
