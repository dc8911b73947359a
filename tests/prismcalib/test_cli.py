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
        "every row as recorded",
        "predicts nothing",
        "1 of 4 clocks corrected",
        "-8.000 ms",
    ):
        assert words in text
    assert text.splitlines()[-1].startswith(f"wrote {output} (")
    assert "already aligned" not in text
    assert invoke("merge", output, "-o", output).startswith("already aligned: ")
    again = invoke("merge", output, "-o", output, "--json", "--verify", "--max-residual", "500us")
    report = json.loads(again)
    assert report["output"] == str(output)
    assert report["difference_ns"] == 0
    assert report["clock"]["domains"][1]["offset_ns"] == -8_000_000


def test_merge_says_when_no_clock_was_wrong(make_run, tmp_path):
    write(make_run().trace, tmp_path / "run.parquet")
    text = invoke("merge", tmp_path / "run.parquet", "-o", tmp_path / "aligned.parquet")
    assert "all 4 clocks agree within " in text


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
    lines = text.splitlines()
    first = lines.index("by step") + 3
    steps = [int(line.split()[0]) for line in lines[first : first + 3]]
    assert steps == sorted(steps)
    assert "idle inside spans" in text
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
    assert "--max-residual" in done.stderr
    assert "not a duration" in done.stderr
    assert not (tmp_path / "x.parquet").exists()


def test_help_loads_nothing_heavy(run_command):
    code = (
        "import sys; import prismcalib.cli, prismcalib;"
        "print({'polars', 'numpy', 'numba', 'networkx', 'pydantic', 'rich'} & set(sys.modules))"
    )
    done = run_command("python", "-c", code)
    assert done.stdout.strip() == "set()"


def test_predict_says_how_much_the_step_varies(aligned):
    text = invoke("predict", aligned)
    assert "p5 " in text
    assert "90 % sure" in text
    assert "how much it varies" not in invoke("predict", aligned, "--draws", "0")
    assert json.loads(invoke("predict", aligned, "--json"))["spread"]["p95"]["step_ns"] > 0


def test_what_if(aligned):
    before = aligned.read_bytes()
    text = invoke("what-if", aligned, "--scale", 'kind == "compute" and rank < 2', "0.5")
    assert "as it was" in text
    assert "time on the critical path by rank" in text
    words = (
        *("--set", "kind = 'send'", "1us"),
        *("--scenario", "a", "--scale-gaps", "true", "0", "--scale", "true", "2"),
        *("--scenario", "b", "--drop", "kind = 'recv'", "--swap-durations-from", aligned),
    )
    answer = json.loads(invoke("what-if", aligned, *words, "--json", "--rooted"))
    assert [scenario["name"] for scenario in answer["scenarios"]] == ["edited", "a", "b"]
    assert answer["scenarios"][1]["delta_ns"] > 0
    assert answer["scenarios"][2]["critical_path"]["length_ns"] > 0
    assert "other wait rules" in invoke("what-if", aligned, "--eager-below", "1000")
    assert aligned.read_bytes() == before


def test_scenario_files_and_flags_together(aligned, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("[[scenario]]\nname = 'x'\nedits = [{scale = 0.5, where = 'rank = 1'}]")
    text = invoke("what-if", aligned, "--drop", "kind = 'send'", "--scenarios", file)
    assert "edited" in text
    assert "x " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what should be different"),
        (["--scale", "rank = 1"], "--scale takes PREDICATE and FACTOR"),
        (["--scale", "rank = 1", "--drop", "true"], "--scale takes PREDICATE and FACTOR"),
        (["--scale=rank = 1", "2"], "without ="),
        (["--scale", "rank = 1", "half"], "is no factor"),
        (["--set", "rank = 1", "5"], "not a duration"),
        (["--scenario", "a"], "has no edits"),
        (["--scenario", "a", "--drop", "true", "--scenario", "a", "--drop", "true"], "two"),
    ],
)
def test_what_if_usage(aligned, words, message):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["what-if", str(aligned), *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_compare_and_health(aligned):
    text = invoke("compare", aligned, aligned, "--by", "kind", "--by", "phase")
    assert "if idle time between spans were as in B" in text
    assert "averages hide" in text
    assert json.loads(invoke("compare", aligned, aligned, "--json"))["change_ns"] == 0
    assert "no rank stands out" in invoke("health", aligned, aligned)
    assert json.loads(invoke("health", aligned, aligned, "--json"))["findings"] == []


def test_merge_with_wait_rules(recorded, tmp_path):
    output = tmp_path / "eager.parquet"
    invoke("merge", recorded, "-o", output, "--eager-below", "9999999", "--rooted", "--verify")
    assert open_trace(output).header.extra["wait_rules"] == {
        "eager_below": 9999999,
        "rooted": True,
        "sparse_all_to_all": False,
    }
