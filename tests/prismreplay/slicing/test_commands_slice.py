from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from prismreplay.commands_slice import slice_
from prismreplay.slicing import campaigning, running
from tests.prismreplay.slicing.jobs import bare_graph, perform


@pytest.fixture
def call(tmp_path, monkeypatch):
    # Nothing is forked that would need torch: tasks are done by what stands for running them.
    monkeypatch.setattr(running, "perform", perform)
    monkeypatch.setattr(running, "prepare", int)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    bare_graph(tmp_path / "bare.parquet")

    def run(*words):
        app = typer.Typer()
        app.command()(slice_)
        return CliRunner().invoke(app, ["bare.parquet", *words, "--", "train.py", "--x"])

    return run


def test_the_next_command_is_told(call):
    done = call("--sandbox-size", "2", "-o", "parts")
    assert done.exit_code == 0, done.output
    assert "wrote 2 slices in parts" in done.output
    assert "prismcalib merge parts/slice-*.parquet --bare bare.parquet" in done.output
    # No group was whole: there is nothing to fit a model to.
    assert (
        "as no group was whole, no model can be fitted to others; give merge times" in done.output
    )
    assert "next: prismreplay comm-bench --nproc 4 -o table.parquet\nthen: " in done.output
    assert "--ranks-per-host 4 --comm-table table.parquet -o" in done.output


def test_a_slice_that_is_made_again_is_put_into_an_earlier_result(call):
    done = call("--sandbox-size", "2", "-o", "again", "--only", "1")
    assert done.exit_code == 0, done.output
    assert "wrote slice 1 of 2 in again" in done.output
    assert "prismcalib merge again/slice-0001*.parquet --base" in done.output


def test_json_is_the_whole_report(call):
    done = call("--sandbox-size", "3", "--json", "--devices", "1")
    report = json.loads(done.stdout)
    assert report["slices"] == [[0, 1, 2], [3]]
    assert report["timing_true"] is False
    assert [one["ranks"] for one in report["outcomes"]] == [[0, 1, 2], [3]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "1", "--refine", "1"), "--refine needs all"),
        (("--steps", "3-1"), "give the first and the last"),
        (("--steps", "x"), "give the first and the last"),
        (("--show-rank", "x"), "--show-rank"),
        (("--shm-dir", "nowhere"), "is no folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(call, words, said):
    done = call("--sandbox-size", "2", *words)
    assert done.exit_code == 2
    assert said in done.output


def test_a_recording_beside_the_graph_is_used(call, tmp_path, monkeypatch):
    (tmp_path / "bare.tensors").mkdir()
    seen = []

    def slice_job(_program, _folder, options, **_):
        seen.extend(options.tensors.sources)
        raise KeyboardInterrupt

    monkeypatch.setattr(campaigning, "slice_job", slice_job)
    call("--sandbox-size", "2")
    assert [str(path) for path in seen] == ["bare.tensors"]
