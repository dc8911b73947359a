from __future__ import annotations

import json
import re
import subprocess
import sys

import polars as pl
import pytest
from typer.testing import CliRunner

from prismtrace import arguments, cli
from prismtrace.exporting import ExportFormat
from prismtrace.schema import MODELS, json_schema
from prismtrace.trace import METADATA_KEY, write


def call(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture
def path(job, tmp_path):
    write(job, tmp_path / "run.parquet")
    return tmp_path / "run.parquet"


# --- info -----------------------------------------------------------------------------


def test_info_for_people(path):
    done = call("info", path)
    assert done.exit_code == 0
    for text in ("calibrated, format 1.0.0", "0-1 of 2", "2 nodes", "all_reduce", "world"):
        assert text in done.stdout


def test_info_for_programs(path):
    done = call("info", path, "--json")
    facts = json.loads(done.stdout)
    assert (facts["nodes"], facts["header"]["ranks"]) == (7, "0-1")
    assert [kind["kind"] for kind in facts["kinds"]] == ["compute", "all_reduce", "send", "recv"]


def test_long_tables_are_cut_and_say_so(make_trace, tmp_path):
    write(make_trace(*({"rank": rank} for rank in range(20))), tmp_path / "a.parquet")
    assert "... and 4 more (--json lists all)" in call("info", tmp_path).stdout


# --- validate -------------------------------------------------------------------------


def test_validate_good(path):
    done = call("validate", path)
    assert (done.exit_code, done.stdout) == (0, "valid\n")
    assert json.loads(call("validate", path, "--json").stdout) == {"valid": True, "violations": []}


@pytest.fixture
def broken(make_trace, tmp_path):
    rows = [{"start_ns": 1}] * 8 + [{"kind": "send", "group": 0}]
    write(make_trace(*rows), tmp_path / "broken.parquet")
    return tmp_path / "broken.parquet"


def test_validate_lists_every_rule_with_count_and_rows(broken):
    done = call("validate", broken, "--limit", 2)
    assert done.exit_code == 1
    assert "error: half-timed (8x)" in done.stdout
    assert "error: p2p-without-peer (1x)" in done.stdout
    assert "2 rules broken, 0 warnings" in done.stdout
    assert len(re.findall(r"rank=0 index=\d", done.stdout)) == 3


def test_validate_for_programs(broken):
    done = call("validate", broken, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["valid"] is False
    counts = {violation["rule"]: violation["count"] for violation in found["violations"]}
    assert counts == {"half-timed": 8, "p2p-without-peer": 1}
    assert found["violations"][1]["rows"][0] == {
        "id": 0,
        "rank": 0,
        "index": 0,
        "start_ns": 1,
        "dur_ns": None,
    }


def test_warnings_alone_are_no_failure(make_trace, tmp_path):
    rows = [{"start_ns": 0, "dur_ns": 5}, {"start_ns": 4, "dur_ns": 5}]
    write(make_trace(*rows, kind="recorded"), tmp_path / "a.parquet")
    done = call("validate", tmp_path / "a.parquet")
    assert done.exit_code == 0
    assert "warning: overlap (1x)" in done.stdout


def test_validate_counts_values_that_do_not_fit(make_trace, tmp_path):
    trace = make_trace({}, {})
    frame = trace.collect().with_columns(step=pl.Series([2**40, 2**41]))
    metadata = {METADATA_KEY: trace.header.model_dump_json()}
    frame.write_parquet(tmp_path / "a.parquet", metadata=metadata)
    assert "step-out-of-range (2x)" in call("validate", tmp_path / "a.parquet").stdout


# --- schema ---------------------------------------------------------------------------


def test_schema_prints_one_or_all():
    assert json.loads(call("schema", "edge").stdout) == json_schema("edge")
    assert set(json.loads(call("schema").stdout)) == set(MODELS)
    assert call("schema", "nothing").exit_code == 2


def test_schema_writes_files(tmp_path):
    done = call("schema", "--write", tmp_path)
    assert [line.rpartition("/")[2] for line in done.stdout.split()] == [
        f"{name}.schema.json" for name in MODELS
    ]
    assert len(list(tmp_path.iterdir())) == len(MODELS)


def test_names_spelled_out_for_speed_are_complete():
    """The enums of the command repeat names whose modules are slow to load."""
    assert {name.value for name in cli.SchemaName} == set(MODELS)
    assert {name.value for name in cli.Target} == {name.value for name in ExportFormat}


# --- export ---------------------------------------------------------------------------


def test_export_perfetto(path, tmp_path):
    assert call("export", path, "-o", tmp_path / "run.json").exit_code == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert {event["pid"] for event in content["traceEvents"]} == {0, 1}


def test_export_of_some_ranks(path, tmp_path):
    words = ["export", path, "--to", "node-link", "-o", tmp_path / "run.json", "--ranks", "1"]
    assert call(*words).exit_code == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert {node["rank"] for node in content["nodes"]} == {1}


@pytest.mark.parametrize("ranks", ["0-", "a", "3-1"])
def test_ranks_that_are_none(ranks, path, tmp_path):
    done = call("export", path, "-o", tmp_path / "run.json", "--ranks", ranks)
    assert done.exit_code == 2
    assert "--ranks" in done.stderr


def test_ranks_that_are_not_there(path, tmp_path, run_command):
    done = run_command("prismtrace", "export", path, "-o", tmp_path / "x.json", "--ranks", "0-9")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: ranks 2-9 are not in the trace [{path}]",
        "  hint: it has ranks 0-1",
    ]
    assert not (tmp_path / "x.json").exists()


# --- convert: how its flags are read --------------------------------------------------


@pytest.mark.parametrize(
    ("given", "files", "ranks"),
    [
        ([], ["a"], {}),
        (["3"], ["a"], {"a": 3}),
        (["a=0", "b=1"], ["a", "b"], {"a": 0, "b": 1}),
        (["odd=name.json=7"], ["odd=name.json"], {"odd=name.json": 7}),
    ],
)
def test_ranks_of_files(given, files, ranks):
    assert arguments.ranks_of_files(given, files) == ranks


@pytest.fixture
def two_files(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    return [tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "run.parquet"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--rank", "x"),
        ("--rank", "a="),
        ("--rank", "3"),
        ("--comm-kernel", "my_ar"),
        ("--comm-kernel", "x=compute"),
        ("--comm-kernel", "x=nothing"),
        ("--comm-kernel", "(=send"),
        ("--grain", "operator"),
        ("--unmatched", "guess"),
        ("--jobs", "-1"),
    ],
)
def test_wrong_flags_are_wrong_usage(flag, value, two_files, tmp_path):
    done = call("convert", *two_files, flag, value)
    assert done.exit_code == 2
    assert flag in done.stderr
    assert not (tmp_path / "run.parquet").exists()


def test_convert_reports_what_it_did(data_dir, tmp_path):
    words = ["convert", data_dir / "kineto" / "dlrm8", "-o", tmp_path / "run.parquet"]
    done = call(*words)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"wrote {tmp_path / 'run.parquet'} (")
    assert "0-7 of 8" in done.stdout
    assert "1 (number 10)" in done.stdout
    report = json.loads(call(*words, "--grain", "kernel", "--json").stdout)
    assert (report["world_size"], report["steps"]) == (8, [10])
    assert sum(report["matched"].values()) == 8
    assert call("validate", tmp_path / "run.parquet").exit_code == 0


# --- all commands ---------------------------------------------------------------------

BAD_FILES = {
    "absent.parquet": (None, "no such file"),
    "empty.parquet": (b"", "not a readable Parquet file"),
    "text.parquet": (b"{}", "not a readable Parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize(
    "command", [["info"], ["validate"], ["export", "-o", "out.json"]], ids=lambda c: c[0]
)
def test_bad_files_end_with_one_clear_message(name, command, tmp_path, run_command):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = run_command("prismtrace", *command, name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}")
    assert f"[{name}]" in done.stderr.splitlines()[0]
    assert not (tmp_path / "out.json").exists()


def test_help_loads_nothing_heavy():
    """Start-up stays quick when a module at the top imports none of these."""
    code = (
        "import sys\nfrom prismtrace import cli\n"
        "try:\n    cli.app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'polars', 'pydantic', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
