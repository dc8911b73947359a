"""The benchmark of several GPUs, as far as it needs none: what it refuses, keeps, and makes of numbers."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace

import polars as pl
import pytest

from benchmarks.gpu.fidelity_multi import Bench, OutOfTimeError, settings_of
from benchmarks.gpu.level_d import compare_kernels, compare_pieces, report, transfers, typical
from benchmarks.gpu.level_d_jobs import bounded, layouts_of, made_up, model_of, sandbox_sizes
from benchmarks.gpu.timed_rank import kernels_of

OPTIONS = Namespace(ranks=None, size="0.3", steps=6, repeats=2, only=None, anyway=False)


def test_without_gpus_it_says_what_it_needs(repo):
    done = subprocess.run(
        [repo / "benchmarks/gpu/fidelity_multi.sh"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs 2 GPUs, and 0 are here" in done.stderr


@pytest.mark.parametrize(
    "more", [{"ranks": 4}, {"only": "ddp,tp-pp"}, {"steps": 3}, {"only": "nothing"}], ids=str
)
def test_what_cannot_be_measured_is_refused(more, capsys):
    with pytest.raises(SystemExit, match="2"):
        settings_of(Namespace(**vars(OPTIONS) | more), 2)
    assert capsys.readouterr().err


def test_numbers_of_shared_gpus_are_marked():
    assert not settings_of(OPTIONS, 2)["meaningless"]
    shared = settings_of(Namespace(**vars(OPTIONS) | {"anyway": True}), 1)
    assert shared["meaningless"] == "2 ranks shared 1 GPUs"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_layout_can_be_cut(ranks):
    for size in ("0.3", "tiny"):
        words = model_of(size, ranks)
        flags = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        assert flags["--hidden"] % flags["--heads"] == flags["--heads"] % ranks == 0
        assert flags["--batch-size"] % flags["--microbatches"] == 0
        assert flags["--layers"] >= ranks
    assert ("tp-pp" in layouts_of(ranks)) == (ranks in (4, 6, 8))
    assert len(made_up(ranks)) > 11 * ranks
    assert sandbox_sizes(ranks, ranks)[-1] <= max(1, ranks // 2)
    assert sandbox_sizes(ranks, 1) == sandbox_sizes(ranks, 0) == [1]


def bench(tmp_path, budget=100.0, **more):
    options = {"out": tmp_path / "out", "work": tmp_path / "work", "earlier": None}
    (tmp_path / "work").mkdir(exist_ok=True)
    settings = settings_of(OPTIONS, 2)
    return Bench(Namespace(**{**options, "budget": budget, **more}), settings, 2)


def test_parts_are_kept_and_failed_ones_tried_twice(tmp_path):
    first = bench(tmp_path)
    first.measure("table", 1, lambda: [1])
    first.measure("ddp/chain", 1, lambda: 1 / 0)
    with pytest.raises(OutOfTimeError):
        first.measure("ddp/record", 1e6, list)
    text = (tmp_path / "out/level-d.md").read_text()
    assert "1 parts done, 1 parts failed" in text
    assert "ZeroDivisionError" in text
    second = bench(tmp_path)
    second.measure("table", 1e6, lambda: 1 / 0)
    assert not second.settled("ddp/chain")
    second.measure("ddp/chain", 1, lambda: 1 / 0)
    assert bench(tmp_path).settled("ddp/chain")
    assert not bench(tmp_path).settled("ddp/record")


def test_what_was_cut_short_is_not_a_failure(tmp_path):
    for _ in range(4):
        with pytest.raises(OutOfTimeError):
            bench(tmp_path, budget=10).measure("table", 1, lambda: 1 / 0)
    last = bench(tmp_path, budget=10)
    for state in ("failed", "failed"):
        assert not last.settled("table")
        last.measure("table", 1, lambda: 1 / 0)
        assert last.parts["table"]["state"] == state
    assert last.settled("table")


def test_commands_are_bounded():
    assert bounded(("echo", 3), 30, {}) == "3\n"
    with pytest.raises(RuntimeError, match="exit code 1"):
        bounded(("false",), 30, {})
    with pytest.raises(RuntimeError, match="ended after 0 s"):
        bounded(("sleep", 60), 0.05, {})


def test_results_of_another_machine_count_but_not_its_files(tmp_path):
    carried = tmp_path / "level-d.json"
    one = bench(tmp_path)
    done = {"state": "done", "tries": 1, "result": {}, "wall_s": 1}
    one.state["parts"] |= {f"ddp/{name}": done for name in ("chain", "record", "run 1 true")}
    carried.write_text(json.dumps(one.state))
    other = bench(tmp_path, earlier=carried, budget=0.0)
    with pytest.raises(OutOfTimeError, match="ddp/chain"):
        other.layout("ddp")
    assert set(other.parts) == {"ddp/run 1 true"}
    (tmp_path / "work/state.json").write_text(json.dumps({**one.state, "settings": {}}))
    with pytest.raises(SystemExit):
        bench(tmp_path)


def profile(scale, late_us=0):
    """Two steps of three matrix products, each followed by something small."""
    names = [name for _ in range(6) for name in ("sm90_gemm", "gelu")] + ["advance_96"]
    events = [
        {
            "cat": "kernel",
            "name": name,
            "ts": 100 * number + late_us * (number > 7),
            "dur": 50 * scale,
            "args": {"stream": 7},
        }
        for number, name in enumerate(names)
    ]
    return kernels_of({"traceEvents": [{"cat": "cpu_op", "name": "x"}, *events]})


def test_kernels_are_compared_by_name_and_start():
    same = compare_kernels(profile(1), profile(1))
    assert (same["kernels"], same["durations"], same["starts"]) == (6, 0, 0)
    longer = compare_kernels(profile(1), profile(1.1))
    assert longer["durations"] == pytest.approx(0.1)
    late = compare_kernels(profile(1), profile(1, late_us=20))
    assert late["starts"] == 20 / 400
    assert late["unlike_names"] == []


def trace(path, scale, transfer_ns=500):
    rows = []
    for step in range(4):
        for number in range(3):
            begin = 10_000 * step + 1000 * number
            rows.append((0, step, "compute", begin, round(600 * scale), None))
            rows.append((0, step, "all_reduce", begin + 600, 400, transfer_ns))
    names = ["rank", "step", "kind", "start_ns", "dur_ns", "transfer_ns"]
    pl.DataFrame(rows, names, orient="row").write_parquet(path)
    return path


def test_pieces_and_transfers_are_compared(tmp_path):
    true, emulated = trace(tmp_path / "a", 1), trace(tmp_path / "b", 1.1, 250)
    found = compare_pieces(true, emulated, 0)
    assert found["steps"] == 2
    assert found["durations"] == pytest.approx(0.1)
    assert found["starts"] == 0
    assert transfers(true, 0) == {"all_reduce": 0.0015}
    assert transfers(emulated, 0) == {"all_reduce": 0.00075}


def test_the_table_is_made_of_what_is_there(tmp_path):
    one = bench(tmp_path)
    run = {"step_ns": 100e6, "peak_bytes": 2**30}
    emulated = {**run, "step_ns": 101e6, "predicted_step_ns": 99e6, "interference": 0.001}
    results = {
        "run 1 true": run,
        "run 1 emulated 1": emulated,
        "run 2 emulated 1": {**emulated, "peak_bytes": 2**30 + 512},
        "run 2 true": {**run, "step_ns": 102e6},
        "losses": {"true": [2.0, 1.0], "emulated": [2.0, 1.001]},
        "compare": {
            "pieces": {"1": {"durations": 0.01, "starts": 0.002}},
            "true_transfers": {"all_reduce": 2.0},
            "emulated_transfers": {"all_reduce": 2.1},
        },
        "chain": {"wall": {"collect": 20.0, "slice": 30.0}},
    }
    for name, result in results.items():
        one.measure(f"ddp/{name}", 1, lambda result=result: result)
    lines = [line for line in report(one.state).splitlines() if line.startswith("| ddp")]
    cells = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    assert len(lines) == 1
    assert cells == [
        *("ddp", "2", "1", "101.000", "±0.99%", "99.000", "101.000", "+0.00%", "0.10%"),
        *("1,073,741,824", "1,073,741,824 / 1,073,742,336", "1.0e-03"),
        *("1.00%", "0.20%", "", "", "2.000", "2.100", "50"),
    ]
    assert typical([9.0, 9.0, 1.0, 3.0]) == 2


def test_profiles_of_all_ranks_are_told(tmp_path, run_command, repo):
    one, told = bench(tmp_path), {}
    source = repo / "tests/data/h200/ddp"
    for name, *words in (
        ("convert", "prismtrace", "convert", source, "-o", "ddp.parquet"),
        ("merge", "prismcalib", "merge", "ddp.parquet", "-o", "merged.parquet"),
    ):
        done = run_command(*words, "--json")
        assert done.returncode == 0, done.stderr
        told[name] = json.loads(done.stdout)
    one.measure("kineto/ddp", 1, lambda: {"bytes": 9, "converted": {"ddp": told}})
    (tmp_path / "work/kineto/ddp").mkdir(parents=True)
    (tmp_path / "work/kineto/ddp/rank0.json.gz").write_bytes(b"1")
    one.pack()
    assert (tmp_path / "out/kineto.tar").stat().st_size > 1
    assert "recorded 23196297, propagated 23196297 ns" in report(one.state)
