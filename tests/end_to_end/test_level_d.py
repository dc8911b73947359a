"""The benchmark of several GPUs, as far as it needs none: what it refuses, keeps, and makes of numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import polars as pl
import pytest

import prismtrace as pt
from benchmarks.gpu.fidelity_multi import forget_lost, plan, settings_of
from benchmarks.gpu.level_d import compare_kernels, report, same_memory, typical
from benchmarks.gpu.level_d_bench import Bench
from benchmarks.gpu.level_d_forks import Runner
from benchmarks.gpu.level_d_jobs import bounded, layouts_of, made_up, model_of, sandbox_sizes
from benchmarks.gpu.level_d_parts import EXPECTED_S, Part, Stage
from benchmarks.gpu.level_d_traces import compare_pieces, transfers
from benchmarks.gpu.timed_rank import kernels_of

OPTIONS = Namespace(
    ranks=None, size="0.3", steps=6, repeats=2, only=None, anyway=False, cold=False, earlier=None
)


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
    folders = {"out": tmp_path / "out", "work": tmp_path / "work"}
    folders["work"].mkdir(exist_ok=True)
    options = Namespace(**{**vars(OPTIONS), **folders, "budget": budget, **more})
    return Bench(options, settings_of(options, 2), 2)


def measure(one, **works):
    """Parts of one stage, by name; what became of them."""
    parts = [Part(name.replace("__", "/").replace("_", " "), work) for name, work in works.items()]
    one.measure(Stage("some", tuple(parts), at_once=2))
    return {part.name: one.parts.get(part.name, {}).get("state") for part in parts}


def test_parts_are_kept_and_failed_ones_tried_twice(tmp_path):
    first = bench(tmp_path)
    found = measure(first, table=lambda: [1], ddp__collect=lambda: 1 / 0, ddp__record=dict)
    assert found == {"table": "done", "ddp/collect": "failed", "ddp/record": "done"}
    assert first.parts["table"]["result"] == [1]
    assert first.parts["ddp/collect"]["tries"] == 2
    text = (tmp_path / "out/level-d.md").read_text()
    assert "2 parts done, 1 parts failed" in text
    assert "ZeroDivisionError" in text
    second = bench(tmp_path)
    measure(second, table=lambda: 1 / 0, ddp__collect=lambda: 3)
    assert second.parts == first.parts


def test_where_forks_fail_fresh_interpreters_are_tried(tmp_path):
    one = bench(tmp_path)

    def run():
        assert one.runner.cold
        return {}

    assert measure(one, ddp__record=run) == {"ddp/record": "done"}
    assert one.parts["ddp/record"]["tries"] == 2
    measure(one, tp__record=run, table=lambda: one.runner.cold)
    assert one.parts["tp/record"]["tries"] == 1
    assert one.parts["table"]["result"] is False


def test_what_there_is_no_time_for_is_named_and_left_out(tmp_path):
    one = bench(tmp_path, budget=EXPECTED_S["vanilla"] - 1)
    parts = (Part("vanilla", list), Part("table", list), Part("tp/kernels", list, ("tp/slices",)))
    one.measure(Stage("some", parts))
    assert set(one.parts) == {"table"}
    assert one.missing == ["vanilla", "tp/kernels (needs tp/slices)"]
    one.save()
    assert "No time was left for: vanilla, tp/kernels" in (tmp_path / "out/level-d.md").read_text()
    assert bench(tmp_path).missing == []


def test_what_was_cut_short_is_not_a_failure(tmp_path):
    late = {"budget": 15.5}
    for _ in range(4):
        assert measure(bench(tmp_path, **late), table=lambda: 1 / 0) == {"table": "cut"}
    for _ in range(2):
        assert not bench(tmp_path).settled("table")
        assert measure(bench(tmp_path, **late), table=lambda: 1 / 0) == {"table": "failed"}
    assert bench(tmp_path).settled("table")


def test_parts_end_with_the_budget(tmp_path):
    one = bench(tmp_path, budget=2.8)
    assert measure(one, ddp__compare=lambda: time.sleep(60)) == {"ddp/compare": "cut"}
    assert one.missing == ["ddp/compare"]


def test_parts_that_hang_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.level_d_parts.LONG", 0)
    monkeypatch.setattr("benchmarks.gpu.level_d_parts.MORE_S", 0.3)
    one = bench(tmp_path)
    found = measure(one, ddp__collect=lambda: time.sleep(60), table=list)
    assert found["ddp/collect"] == "failed"
    assert "KeyboardInterrupt" in one.parts["ddp/collect"]["error"]


def test_the_estimate_is_of_what_is_left(tmp_path):
    one = bench(tmp_path)
    before = one.estimate(plan(one, ["ddp"]))
    assert "runs, round 2            8 parts" in before
    assert "beyond this call's budget" in before
    one.parts["ddp/run 1 true"] = {"state": "done", "tries": 1, "wall_s": 100, "cold": False}
    assert one.expected_s(Part("tp/run 2 true", list), cold=False) == pytest.approx(111)
    assert "runs, round 1            7 parts" in one.estimate(plan(one, []))


def test_commands_are_bounded():
    assert bounded(("echo", 3), 30, {}) == "3\n"
    with pytest.raises(RuntimeError, match="exit code 1"):
        bounded(("false",), 30, {})
    with pytest.raises(RuntimeError, match="ended after 0 s"):
        bounded(("sleep", 60), 0.05, {})


def test_forks_give_what_they_print_and_leave_nobody_behind(tmp_path):
    runner = Runner("some", tmp_path)
    assert runner.fork("part", lambda: os.write(1, b"3") - 1, 30) == "3"
    with pytest.raises(RuntimeError, match="exit code 4"):
        runner.fork("part", lambda: sys.exit(4), 30)

    def run():
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(60)
        (tmp_path / "pid").write_text(str(pid))
        time.sleep(60)

    with pytest.raises(RuntimeError, match="ended after 1 s"):
        runner.fork("part", run, 1.0)
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    until = time.monotonic() + 20
    while status.exists() and "(zombie)" not in status.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_results_of_another_machine_count_but_not_its_files(tmp_path):
    carried = tmp_path / "level-d.json"
    one = bench(tmp_path)
    names = {part.name for stage in plan(one, []) for part in stage.parts} - {"machine"}
    done = {"state": "done", "tries": 1, "result": {}, "wall_s": 1}
    one.state["parts"] |= dict.fromkeys(names - {"ddp/kernels", "tp/compare"}, done)
    carried.write_text(json.dumps(one.state))
    other = bench(tmp_path, earlier=carried)
    forget_lost(other, plan(other, []))
    again = {"table", "ddp/collect", "ddp/slices", "tp/record"}
    assert names - set(other.parts) == again | {"ddp/kernels", "tp/compare"}
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


def trace(path, scale, *, cuts=(1,), groups=("dp",), skipped=()):
    """Four steps of three computations, each cut at fractions, and an all_reduce after it."""
    with pt.SpanWriter(path.with_suffix(".spool"), rank=0, world_size=2) as writer:
        for group in groups:
            writer.group(group, range(2) if group == "dp" else [0])
        for step in range(4):
            for number in range(3):
                begin, done = 10_000 * step + 1000 * number, 0
                for cut in cuts:
                    until = round(600 * scale * cut)
                    writer.span("work", begin + done, begin + until, step=step)
                    done = until
                if (step, number) not in skipped:
                    writer.communication(
                        *("all_reduce", "dp", 3 * step + number, begin + done, begin + 1000),
                        stream="sync",
                        bytes=8,
                        dtype="float32",
                        reduce_op="sum",
                        step=step,
                    )
    pt.assemble(path.with_suffix(".spool"), path)
    return path


def test_pieces_are_compared_by_the_communications_that_end_them(tmp_path):
    true = trace(tmp_path / "a.parquet", 1)
    # An event that is recorded cuts a piece; other groups have other numbers.
    emulated = trace(tmp_path / "b.parquet", 1.1, cuts=(0.25, 1), groups=("alone", "dp"))
    found = compare_pieces(true, emulated, 0)
    assert (found["steps"], found["pieces"], found["left_out"]) == (2, 8, 0)
    assert found["durations"] == pytest.approx(found["computation"]) == pytest.approx(0.1)
    assert found["starts"] == pytest.approx(60 / 2600)


def test_pieces_before_communications_of_one_run_count_to_the_next(tmp_path):
    true = trace(tmp_path / "a.parquet", 1)
    found = compare_pieces(true, trace(tmp_path / "b.parquet", 1, skipped=[(2, 1)]), 0)
    # The third is the second of those that are left, a piece and a communication later.
    assert (found["steps"], found["pieces"], found["left_out"]) == (2, 7, 1)
    assert compare_pieces(true, true, 1)["durations"] is None


def test_transfers_are_added_up(tmp_path):
    rows = [
        (rank, step, "all_reduce", 500 * (rank + 1))
        for rank in range(2)
        for step in range(4)
        for _ in range(3)
    ]
    names = ["rank", "step", "kind", "transfer_ns"]
    pl.DataFrame(rows, names, orient="row").write_parquet(tmp_path / "a.parquet")
    assert transfers(tmp_path / "a.parquet", 0) == {"all_reduce": 0.0015}


def test_memory_is_compared_in_words():
    assert same_memory({7}, {7}) == "equal"
    assert same_memory({7, 9}, {7}) == "equal to one of the true ones"
    assert same_memory({7, 9}, {7, 9}) == "equal to true ones"
    assert same_memory({1024, 4096}, {1024, 4608}) == "+512 bytes from the nearest"
    assert same_memory(set(), {7}) == ""


def test_the_tables_are_made_of_what_is_there(tmp_path):
    one = bench(tmp_path)
    run = {"step_ns": 100e6, "peak_bytes": 2**30}
    device = {"operations": 40, "issuing_ns": 4_000_000}
    emulated = {
        **run,
        "step_ns": 101e6,
        "predicted_step_ns": 99e6,
        "interference": 0.001,
        "wall_s": 5,
        "ranks": [{"rank": 0, "device": device}],
        "steps": [{}] * 4,
    }
    pieces = {"durations": 0.01, "starts": 0.002, "computation": 0.03, "left_out": 0}
    results = {
        "run 1 true": run,
        "run 1 emulated 1": emulated,
        "run 2 emulated 1": {**emulated, "peak_bytes": 2**30 + 512},
        "run 2 true": {**run, "step_ns": 102e6},
        "losses true": [2.0, 1.0],
        "losses emulated": [2.0, 1.001],
        "record": {"step_ns": 102.01e6},
        "compare": {
            "pieces": {"1": pieces},
            "true_transfers": {"all_reduce": 2.0},
            "emulated_transfers": {"all_reduce": 2.1},
        },
        "collect": {"wall_s": 20.0},
        "slices": {"wall_s": 30.0},
    }
    done = {"state": "done", "tries": 1, "wall_s": 1}
    for name, result in results.items():
        one.parts[f"ddp/{name}"] = {**done, "result": result}
    lines = [line for line in report(one.state).splitlines() if line.startswith("| ddp")]
    times, rest = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert times == [
        *("ddp", "2", "1", "2 and 2", "101.000", "±0.99%", "99.000", "101.000", "+0.00%", "0.10%"),
        *("100.0", "1.0", "55"),
    ]
    assert rest == [
        *("ddp", "1", "1,073,741,824", "1,073,741,824 / 1,073,742,336"),
        *("+512 bytes from the nearest", "1.0e-03", "1.00%", "0.20%", "+3.00%", "0"),
        *("–", "–", "2.000", "2.100", "+1.00%"),
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
    result = {"bytes": 9, "converted": {"ddp": told}}
    one.parts["kineto/ddp"] = {"state": "done", "tries": 1, "wall_s": 1, "result": result}
    (tmp_path / "work/kineto/ddp").mkdir(parents=True)
    (tmp_path / "work/kineto/ddp/rank0.json.gz").write_bytes(b"1")
    (tmp_path / "out").mkdir()
    one.pack()
    assert (tmp_path / "out/kineto.tar").stat().st_size > 1
    assert "recorded 23196297, propagated 23196297 ns" in report(one.state)
