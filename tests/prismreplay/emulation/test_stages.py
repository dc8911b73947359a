"""Stages are done once: until their command, what it is made from, or its files change."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from prismreplay.emulation import stages
from prismreplay.emulation.stages import Stage, StageError, inputs_digest, kept_note, run_stage


@pytest.fixture
def called(monkeypatch, tmp_path):
    """Commands that only leave a file; which of them were called."""
    lines = []

    def call(stage):
        lines.append(stage.line)
        (tmp_path / "made.parquet").write_text(stage.line)
        return json.dumps({"steps": 3})

    monkeypatch.setattr(stages, "_call", call)
    return lines


STAGE = Stage("collect", ("prismreplay", "collect", "--", "a b.py"), ("*.parquet",), ("x",))


def test_a_stage_that_was_done_is_kept(called, tmp_path):
    assert kept_note(tmp_path, STAGE) is None
    note = run_stage(tmp_path, STAGE)
    assert called == ["prismreplay collect -- 'a b.py'"]
    assert note.report == {"steps": 3}
    assert kept_note(tmp_path, STAGE) == note


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize(
    "other",
    [
        Stage(STAGE.name, (*STAGE.words, "--steps=3"), STAGE.made, STAGE.inputs),
        Stage(STAGE.name, STAGE.words, STAGE.made, ("y",)),
        Stage(STAGE.name, STAGE.words, ("*.parquet", "*.csv"), STAGE.inputs),
    ],
    ids=["words", "inputs", "files"],
)
def test_a_stage_that_differs_is_not(tmp_path, other):
    run_stage(tmp_path, STAGE)
    assert kept_note(tmp_path, other) is None


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("how", ["changed", "removed", "note damaged", "note of another version"])
def test_a_stage_whose_files_are_not_as_they_were_is_repeated(tmp_path, how, monkeypatch):
    run_stage(tmp_path, STAGE)
    if how == "changed":
        (tmp_path / "made.parquet").write_text("another")
    elif how == "removed":
        (tmp_path / "made.parquet").unlink()
    elif how == "note damaged":
        (tmp_path / "collect.json").write_text("{")
    else:
        monkeypatch.setattr(stages, "__version__", "0")
    assert kept_note(tmp_path, STAGE) is None


@pytest.mark.usefixtures("called")
def test_every_execution_has_a_token_of_its_own(tmp_path):
    assert run_stage(tmp_path, STAGE).token != run_stage(tmp_path, STAGE).token


def test_a_failing_command_speaks_for_itself(tmp_path, capfd):
    with pytest.raises(StageError) as failed:
        run_stage(tmp_path, Stage("info", ("prismtrace", "info", "nothing.parquet"), ()))
    assert failed.value.code == 1
    assert "nothing.parquet" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


_SLOW_TO_END = """
import pathlib, signal, sys, time

def main():
    def end(*_):
        time.sleep(0.6)
        pathlib.Path(sys.argv[1], "cleaned up").touch()
        sys.exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    pathlib.Path(sys.argv[1], "ready").touch()
    time.sleep(60)
"""


def test_a_second_interruption_leaves_no_stage_behind(tmp_path: Path, monkeypatch):
    (tmp_path / "slow_stage").mkdir()
    (tmp_path / "slow_stage" / "cli.py").write_text(_SLOW_TO_END)
    monkeypatch.setattr(stages, "_ROOT", str(tmp_path))

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    user = threading.Thread(target=interrupt)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        stages._call(Stage("slow", ("slow_stage", str(tmp_path)), ()))
    assert (tmp_path / "cleaned up").exists()
    user.join()


def test_a_command_is_called_with_json_before_the_program(tmp_path):
    stage = Stage("schema", ("prismtrace", "validate", "-h", "--", "x"), ())
    with pytest.raises(stages.ReplayError, match="schema did not print"):
        run_stage(tmp_path, stage)


def test_digests_tell_contents_apart(tmp_path):
    program, folder = tmp_path / "train.py", tmp_path / "bare.tensors"
    program.write_text("1")
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    before = inputs_digest([program, folder])
    assert inputs_digest([program, folder]) == before
    (folder / "manifest.json").write_text('{"complete": true}')
    assert inputs_digest([program, folder]) != before
    assert inputs_digest([program]) != inputs_digest([program], tmp_path / "train.py")
    assert inputs_digest([tmp_path / "builtin:tokens"]) != inputs_digest([])
