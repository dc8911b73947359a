"""`prismreplay emulate` as a person calls it: wrong words, a program that fails, a whole chain."""

from __future__ import annotations

import json
from importlib import util

import pytest

from tests.end_to_end.commands import assert_refused

needs_torch = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--world-size", 4, "--sandbox", "4", "--", "train.py"], "there are 4 ranks"),
        (["--world-size", 4, "--sandbox", "x", "--", "train.py"], "--sandbox x"),
        (["--world-size", 4, "--local-world-size", 8, "--", "train.py"], "--local-world-size"),
        (["--world-size", 0, "--", "train.py"], "--world-size"),
        (["--world-size", 4], "SCRIPT.py"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(words, place, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(call("prismreplay", "emulate", *words), place, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_there_is_refused(call, tmp_path):
    words = ["--world-size", 4, "-o", tmp_path / "work", "--", tmp_path / "nothing.py"]
    assert_refused(call("prismreplay", "emulate", *words), "nothing.py")
    assert list(tmp_path.iterdir()) == []


@needs_torch
def test_a_stage_that_fails_ends_the_chain_with_its_own_words(run_command, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no data')")
    done = run_command(
        "prismreplay", "emulate", "--world-size", 2, "--devices", 1, "-o", "work", "--", "fails.py"
    )
    assert done.returncode == 1
    assert "error: rank 0" in done.stderr
    assert "note: collect failed" in done.stderr
    assert "1/5 collect" in done.stdout
    assert "slice" not in done.stdout


@needs_torch
def test_a_small_job_is_emulated_and_stays_done(run_command, repo):
    program = [repo / "examples" / "train_gpt.py", "--steps", 3, "--layers", 1, "--hidden", 16]
    words = ["prismreplay", "emulate", "--world-size", 2, "--devices", 1, "-o", "work", "--json"]
    done = run_command(*words, "--", *program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first = json.loads(done.stdout)
    assert [stage["kept"] for stage in first["stages"]] == [False] * 5
    found = first["findings"]
    assert len(found["losses"]["0"]) == 3
    assert found["predicted_step_ns"] > 0
    assert found["emulated_step_ns"] > 0
    assert found["peak_memory"]["0"] > 0
    assert sum(found["basis"].values()) == pytest.approx(1)

    done = run_command(*words, "--", *program)
    again = json.loads(done.stdout)
    assert [stage["kept"] for stage in again["stages"]] == [True] * 5
    assert again["findings"] == found
