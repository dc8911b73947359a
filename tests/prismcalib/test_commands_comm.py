"""The commands comm-table and coarsen, and what merge and predict say about estimates."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from prismcalib import synth
from prismcalib.cli import app
from prismcalib.comm_costs import CostReport
from prismcalib.comm_model import fit_comm_model
from prismcalib.comm_table import Operation
from prismcalib.commands_comm import print_costs
from prismcalib.errors import CoarsenError, CommLogError
from tests.prismcalib.nccl_logs import modern

ROWS = [(1 << k, 20.0 + (1 << k) / 2e5, 19.0 + (1 << k) / 2e5) for k in range(16, 29, 2)]
JOB = synth.JobSpec(pp=2, tp=2, dp=2, microbatches=2, steps=2)


def run(*arguments, json_too=True):
    """Output of a command as text, and parsed as JSON."""
    plain = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert plain.exit_code == 0, plain.output
    if not json_too:
        return plain.output, None
    parsed = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    return plain.output, json.loads(parsed.output)


@pytest.fixture
def logs(tmp_path):
    """Logs of groups of two, within a host and between hosts, and of the world."""
    paths = []
    for name, options in {
        "all_gather": {"test": "all_gather", "ranks": 2},
        "reduce_scatter": {"test": "reduce_scatter", "ranks": 2},
        "sendrecv": {"test": "sendrecv", "ranks": 2, "hosts": 2},
        "world": {"ranks": 8, "hosts": 2},
    }.items():
        path = tmp_path / f"{name}.log"
        path.write_text(modern(ROWS, **options))
        paths.append(path)
    return paths


def test_from_logs_to_a_prediction(logs, tmp_path):
    text, summary = run("comm-table", *logs, "-o", tmp_path / "table.parquet")
    assert f"{4 * len(ROWS)} operations measured in 4 files" in text
    assert [curve["sizes"] for curve in summary["curves"]] == [len(ROWS)] * 4
    assert {fit["link"] for fit in summary["model"]} == {"within a host", "between hosts"}

    slices = synth.cut_into_slices(JOB, tmp_path / "slices", 2, virtual="none")
    flags = ["--comm-table", tmp_path / "table.parquet", "--ranks-per-host", 4]
    text, report = run("merge", *slices, *flags, "-o", tmp_path / "job.parquet")
    assert "transfers that no slice measured, with 4 ranks per host" in text
    assert report["comm_costs"]["from_table"] == report["sources"]["table"] > 0

    text, prediction = run("predict", tmp_path / "job.parquet", "--draws", 0)
    found = prediction["estimates"]
    assert "not all transfers were measured: the step lies between" in text
    assert found["low_ns"] < prediction["step_ns"] < found["high_ns"]
    assert found["unknown"] == {}


def test_a_model_alone(tmp_path):
    slices = synth.cut_into_slices(JOB, tmp_path / "slices", 2, virtual="none")
    output = ["-o", tmp_path / "job.parquet"]
    text, report = run("merge", *slices, "--ranks-per-host", 4, *output)
    assert report["comm_costs"]["table"] == []
    assert "their error is unknown" in text
    text, _ = run("predict", tmp_path / "job.parquet", "--draws", 0)
    assert "how far ring is off nobody knows" in text


def test_logs_that_do_not_say_everything(tmp_path):
    bare = tmp_path / "unnamed.txt"
    lines = modern(ROWS, named=False).splitlines()
    bare.write_text("\n".join(line for line in lines if "Rank" not in line))
    output = ["-o", tmp_path / "table.parquet"]
    with pytest.raises(CommLogError, match="does not name the test"):
        run("comm-table", bare, *output)
    assert not (tmp_path / "table.parquet").exists()
    said = ["--kind", "all_reduce", "--ranks", 8, "--hosts", 1]
    _, summary = run("comm-table", bare, *said, *output)
    assert summary["curves"][0]["ranks"] == 8
    wrong = CliRunner().invoke(app, ["comm-table", str(bare), "--kind", "x", *map(str, output)])
    assert wrong.exit_code == 2


def test_coarsen(tmp_path):
    synth.write_job(JOB, tmp_path / "run")
    run("merge", tmp_path / "run", "-o", tmp_path / "job.parquet", json_too=False)
    for grain in ("exact", "microbatch"):
        output = tmp_path / f"{grain}.parquet"
        text, report = run("coarsen", tmp_path / "job.parquet", "--grain", grain, "-o", output)
        assert f"{grain} grain" in text
        assert "largest change of any time: 0 ns" in text
        assert report["rows_after"] < report["rows_before"]
        assert output.exists()
    assert "a tenth slower" in text
    with pytest.raises(CoarsenError):
        run("coarsen", tmp_path / "run", "--grain", "microbatch", "-o", tmp_path / "x.parquet")


def test_a_bandwidth_that_the_times_do_not_tell_is_unknown(capsys):
    measured = [
        (Operation("all_gather", "float32", 4, 1, size), 50_000.0) for size in (2**10, 2**15, 2**20)
    ]
    report = CostReport(
        ranks_per_host=4,
        table=(),
        from_table=0,
        from_model=1,
        extrapolated=0,
        other_dtype=0,
        left={},
        fits=fit_comm_model(measured).fits,
        doubts=(),
    )
    print_costs(report)
    printed = capsys.readouterr().out
    assert "unknown" in printed
    assert "nothing tells what larger operations than those measured take" in printed
