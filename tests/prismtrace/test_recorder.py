"""Spans of a running program: written aside, whole however it ends, and made one trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import polars as pl
import pytest

import prismtrace as pt
from prismtrace.assembling import LastCommunication
from prismtrace.errors import InputFileError, OutputError, RankError, ValidationError
from prismtrace.headers import SHARED_CORES
from prismtrace.recorder import CHUNK_ROWS
from prismtrace.spool import frame_of, read_spool


def record(folder, ranks=2, **options):
    for rank in range(ranks):
        record_one(folder, rank, ranks, **options)


def record_one(folder, rank, ranks, steps=3, **options):
    with pt.SpanWriter(folder / f"{rank}.spool", rank=rank, **options) as writer:
        writer.group("dp", range(ranks), desc="mesh_dp")
        for step in range(steps):
            now = 1_000_000 * step + 1000 * rank
            work = writer.span("work", now, now + 500_000, step=step, phase="forward")
            writer.communication(
                "all_reduce", "dp", step, now + 500_000, now + 600_000,
                stream="sync", bytes=64, dtype="float32", reduce_op="sum",
                step=step, phase="backward", after=[work],
            )  # fmt: skip


@pytest.mark.parametrize(
    ("cores", "shared"),
    [
        (["0-3", "0-3"], None),
        (["0", "1"], None),
        (["0-1", "0-1", "0-1"], {"ranks": 3, "cores": 2}),
        (["0", "0", "1"], {"ranks": 3, "cores": 2}),
        ([None, None], None),
    ],
)
def test_ranks_that_shared_cores_are_told(tmp_path, cores, shared):
    for rank, mine in enumerate(cores):
        facts = {} if mine is None else {"cores": mine}
        record_one(tmp_path, rank, len(cores), facts=facts)
    pt.assemble(tmp_path, tmp_path / "job.parquet")
    assert pt.open(tmp_path / "job.parquet").header.extra.get(SHARED_CORES) == shared


@pytest.mark.parametrize("background", [True, False])
def test_a_job_becomes_a_valid_trace(tmp_path, background):
    record(tmp_path, background=background)
    report = pt.assemble(tmp_path, tmp_path / "job.parquet", axis_of=lambda _, desc: desc[5:])
    assert (report.ranks, report.steps, report.nodes) == ((0, 1), (0, 1, 2), 12)
    trace = pt.open(tmp_path / "job.parquet")
    assert pt.validate(trace) == []
    header = trace.header
    assert (header.kind, header.world_size, header.axes) == ("recorded", 2, {"dp": 2})
    assert [(each.name, each.desc, each.ranks) for each in header.groups] == [
        ("dp", "mesh_dp", (0, 1))
    ]
    assert list(header.streams.values()) == ["program", "sync"]
    assert [domain.ranks for domain in header.clock] == [(0, 1)]
    rows = trace.collect().filter(rank=1)
    assert rows["deps"].to_list() == [[], [1], [2], [2, 1], [2], [2, 1]]
    assert rows["start_ns"].to_list()[2:4] == [1_001_000, 1_501_000]
    assert rows["dur_ns"].to_list()[:2] == [500_000, 100_000]


def test_a_graph_without_times(tmp_path):
    with pt.SpanWriter(tmp_path / "0.spool") as writer:
        writer.span("load", None, None)
        writer.span("train", None, None)
    header = pt.TraceHeader(kind="bare", world_size=1, ranks=(), fold_order="none")
    pt.assemble(tmp_path, tmp_path / "bare.parquet", header=header)
    trace = pt.open(tmp_path / "bare.parquet")
    assert pt.validate(trace) == []
    assert (trace.header.kind, trace.header.fold_order, trace.header.clock) == ("bare", "none", ())
    assert trace.collect()["start_ns"].null_count() == 2


def test_streams_of_groups_are_called_after_them(tmp_path):
    with pt.SpanWriter(tmp_path / "0.spool") as writer:
        one, two = writer.group("a", [0]), writer.group("b", [0])
        writer.stream("program")
        writer.stream("", group=one)
        writer.stream("send +1", group=two)
        writer.describe_group(two, "mesh_pp")
        writer.span("work", 0, 1)
    pt.assemble(tmp_path, tmp_path / "out.parquet")
    header = pt.open(tmp_path / "out.parquet").header
    assert list(header.streams.values()) == ["program", "group of 1", "mesh_pp send +1"]


def test_threads_record_at_once(tmp_path):
    rows = 3 * CHUNK_ROWS
    with pt.SpanWriter(tmp_path / "0.spool") as writer:

        def work(name):
            for at in range(rows):
                writer.span(name, at, at + 1, stream=name)

        threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = pt.assemble(tmp_path, tmp_path / "out.parquet")
    trace = pt.open(tmp_path / "out.parquet")
    assert report.nodes == 3 * rows
    assert pt.validate(trace) == []


def test_flush_writes_what_was_recorded(tmp_path):
    writer = pt.SpanWriter(tmp_path / "0.spool")
    for at in range(10):
        writer.span("work", at, at + 1)
    writer.flush()
    spool = read_spool(tmp_path / "0.spool")
    assert (len(spool.nodes), spool.ended) == (10, False)
    writer.close()
    writer.close()
    assert read_spool(tmp_path / "0.spool").ended


KILLED = """
import os, signal, sys, time
import prismtrace as pt
writer = pt.SpanWriter(sys.argv[1], rank=int(sys.argv[2]), world_size=2)
writer.group("dp", [0, 1])
for step in range(int(sys.argv[3])):
    for part in range(600):
        writer.span("work", step * 1000 + part, step * 1000 + part + 1, step=step)
    writer.communication("barrier", "dp", step, step * 1000 + 700, step * 1000 + 701,
                         stream="sync", step=step)
writer.span("cut", 10**6, 10**6 + 1, step=int(sys.argv[3]))
writer.flush()
writer.span("lost", 10**6 + 1, 10**6 + 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_program_has_written_is_kept(tmp_path, repo):
    for rank, steps in ((0, 3), (1, 5)):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path / f"{rank}.spool"), str(rank), str(steps)],
            cwd=repo,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
    report = pt.assemble(tmp_path, tmp_path / "out.parquet")
    assert report.cut_ranks == (0, 1)
    assert report.last == (
        LastCommunication(0, "barrier", "dp", 2, killed=True),
        LastCommunication(1, "barrier", "dp", 4, killed=True),
    )
    assert report.steps == (0, 1, 2), "the steps that both ranks finished"
    assert report.nodes == 2 * 3 * 601
    assert report.dropped == 1 + 2 * 601 + 1
    assert pt.validate(pt.open(tmp_path / "out.parquet")) == []


def test_where_ranks_stood_that_hang(tmp_path):
    """Rank 0 waits in a barrier that rank 1, which ends as it should, never comes to."""
    for rank in range(3):
        writer = pt.SpanWriter(tmp_path / f"{rank}.spool", rank=rank, world_size=3)
        writer.group("dp", [0, 1])
        writer.span("work", 0, 1)
        if rank < 2:
            writer.communication("all_reduce", "dp", 0, 1, 2, stream="dp")
        if rank == 0:
            writer.communication("barrier", "dp", 1, 2, None, stream="dp")
            writer.flush()
        else:
            writer.close()
    report = pt.assemble(tmp_path, tmp_path / "out.parquet")
    assert report.cut_ranks == (0,)
    assert report.last == (
        LastCommunication(0, "barrier", "dp", 1, ended=False, killed=True),
        LastCommunication(1, "all_reduce", "dp", 0, finished=True),
        LastCommunication(2, finished=True),
    )


def test_the_end_of_a_spool_may_be_missing_anywhere(tmp_path):
    whole = tmp_path / "whole"
    with pt.SpanWriter(whole, background=False) as writer:
        for part in range(5):
            writer.span("work", part, part + 1)
            writer.flush()
    data = whole.read_bytes()
    counts = []
    for length in range(len(data)):
        (tmp_path / "cut.spool").write_bytes(data[:length])
        try:
            counts.append(len(read_spool(tmp_path / "cut.spool").nodes))
        except InputFileError:
            counts.append(-1)
    assert counts == sorted(counts)
    assert set(counts) == {-1, 0, 1, 2, 3, 4, 5}


def test_a_damaged_byte_ends_the_spool_there(tmp_path):
    path = tmp_path / "0.spool"
    with pt.SpanWriter(path, background=False) as writer:
        writer.span("work", 0, 1)
        writer.flush()
        writer.span("work", 1, 2)
    data = bytearray(path.read_bytes())
    data[-30] ^= 0xFF
    path.write_bytes(data)
    spool = read_spool(path)
    assert len(spool.nodes) == 1
    assert spool.broken_bytes > 0


def test_a_forked_process_writes_nothing(tmp_path):
    writer = pt.SpanWriter(tmp_path / "0.spool", background=False)
    writer.span("before", 0, 1)
    child = os.fork()
    if child == 0:
        for at in range(3 * CHUNK_ROWS):
            writer.span("child", at, at + 1)
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.span("after", 1, 2)
    writer.close()
    rows = read_spool(tmp_path / "0.spool").nodes
    assert [row[2] for row in rows] == ["before", "after"]


def test_a_slow_disk_makes_the_program_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("prismtrace.recorder.MOST_CHUNKS", 2)
    writer = pt.SpanWriter(tmp_path / "0.spool")
    held = threading.Event()
    write = writer._write_frame

    def slow(chunk):
        held.wait(10)
        write(chunk)

    writer._write_frame = slow
    recorded = []

    def work():
        for at in range(6 * CHUNK_ROWS):
            writer.span("work", at, at + 1)
            recorded.append(at)

    thread = threading.Thread(target=work)
    thread.start()
    limit = time.monotonic() + 10
    while len(recorded) < 3 * CHUNK_ROWS and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(recorded) <= 5 * CHUNK_ROWS
    held.set()
    thread.join()
    writer.close()
    assert len(read_spool(tmp_path / "0.spool").nodes) == 6 * CHUNK_ROWS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_told(background):
    writer = pt.SpanWriter("/dev/full", background=background)
    writer.span("work", 0, 1)
    with pytest.raises(OutputError, match="No space left"):
        writer.flush()
    with pytest.raises(OutputError, match="No space left"):
        writer.close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        pt.SpanWriter(tmp_path / "file" / "0.spool")


def test_a_value_that_is_no_number(tmp_path):
    writer = pt.SpanWriter(tmp_path / "0.spool")
    writer.span("work", object(), None)
    with pytest.raises(ValidationError, match="neither number nor text"):
        writer.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"phase": "sideways"}, "a recorded phase is no Enum, one of forward"),
        ({"step": "three"}, "a recorded step is no Int32"),
        ({"step": 2**40}, "a recorded step is no Int32"),
    ],
)
def test_values_are_checked_when_the_trace_is_made(tmp_path, values, message):
    with pt.SpanWriter(tmp_path / "0.spool") as writer:
        writer.span("work", 0, 1, **values)
    with pytest.raises(ValidationError, match=message):
        pt.assemble(tmp_path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_span_that_ends_before_it_starts(tmp_path):
    with pt.SpanWriter(tmp_path / "0.spool") as writer:
        writer.span("work", 5, 3)
    with pytest.raises(ValidationError, match="'work' ends before it starts") as caught:
        pt.assemble(tmp_path, tmp_path / "out.parquet")
    assert "rank=0 index=0" in str(caught.value)


def test_spools_that_do_not_belong_together(tmp_path):
    for number in range(2):
        pt.SpanWriter(tmp_path / f"{number}.spool", rank=3, world_size=4).close()
    with pytest.raises(RankError, match="two spools are of rank 3"):
        pt.assemble(tmp_path, tmp_path / "out.parquet")
    header = pt.TraceHeader(kind="recorded", world_size=2, ranks=())
    with pytest.raises(RankError, match="outside the world of 2 ranks"):
        pt.assemble(tmp_path / "0.spool", tmp_path / "out.parquet", header=header)


def test_what_is_no_spool(tmp_path):
    with pytest.raises(InputFileError, match=r"holds no \.spool file"):
        pt.assemble(tmp_path, tmp_path / "out.parquet")
    (tmp_path / "0.spool").write_bytes(b"not a spool at all, but long enough")
    with pytest.raises(InputFileError, match="not a spool"):
        pt.assemble(tmp_path, tmp_path / "out.parquet")
    (tmp_path / "0.spool").write_bytes(frame_of([{"spool": 99, "rank": 0}]))
    with pytest.raises(ValidationError, match="version 99"):
        pt.assemble(tmp_path, tmp_path / "out.parquet")
    (tmp_path / "0.spool").write_bytes(frame_of([{"spool": 1, "rank": 0}, [77, 1]]))
    with pytest.raises(ValidationError, match="make no sense"):
        pt.assemble(tmp_path, tmp_path / "out.parquet")


def test_the_output_is_no_spool(tmp_path):
    record(tmp_path, ranks=1)
    with pytest.raises(OutputError, match="one of the inputs"):
        pt.assemble(tmp_path, tmp_path / "0.spool")


def test_messages_with_tags_are_numbered_without_gaps(tmp_path):
    for rank, kind in enumerate(("send", "recv")):
        with pt.SpanWriter(tmp_path / f"{rank}.spool", rank=rank) as writer:
            writer.group("pp", [0, 1])
            for seq in (0, 5 << 32, 1, (5 << 32) + 1):
                writer.communication(
                    kind, "pp", seq, None, None, stream="p2p", peer=1 - rank, bytes=4
                )
    header = pt.TraceHeader(kind="bare", world_size=2, ranks=())
    pt.assemble(tmp_path, tmp_path / "out.parquet", header=header)
    trace = pt.open(tmp_path / "out.parquet")
    assert trace.nodes.select("seq").collect()["seq"].to_list() == [0, 2, 1, 3] * 2
    assert pt.validate(trace) == []


@pytest.mark.parametrize(
    ("other_end", "begins"), [(260, 200), (130, 130)], ids=["queued", "beside the one ahead"]
)
def test_a_communication_begins_when_the_one_ahead_is_over(tmp_path, other_end, begins):
    for rank, end in enumerate((250, other_end)):
        with pt.SpanWriter(tmp_path / f"{rank}.spool", rank=rank) as writer:
            writer.add_fact({"queued": True})
            writer.group("dp", [0, 1])
            for seq, times in enumerate([(100, 200 if rank == 0 else 120), (110, end)]):
                writer.communication("barrier", "dp", seq, *times, stream="sync")
    report = pt.assemble(tmp_path, tmp_path / "out.parquet")
    rows = pt.open(report.output).collect().filter(rank=0)
    assert rows["start_ns"].to_list() == [100, begins]
    assert (rows["start_ns"] + rows["dur_ns"]).to_list() == [200, 250]
    assert report.policies == {"queued-communication": 2}


def test_a_send_is_over_when_its_receiver_has_the_data(tmp_path):
    """Its program waits for all sends at the end of the step, and sees them end only there."""
    for rank in range(2):
        kind, ends = ("send", (900, 900)) if rank == 0 else ("recv", (150, 320))
        with pt.SpanWriter(tmp_path / f"{rank}.spool", rank=rank) as writer:
            writer.add_fact({"queued": True})
            writer.group("pp", [0, 1])
            for seq, begin, end in zip((0, 1), (100, 300), ends, strict=True):
                writer.communication(
                    kind, "pp", seq, begin, end, stream="p2p", peer=1 - rank, bytes=4
                )
    report = pt.assemble(tmp_path, tmp_path / "out.parquet")
    rows = pt.open(report.output).collect()
    ends = (rows["start_ns"] + rows["dur_ns"]).to_list()
    assert rows["start_ns"].to_list() == [100, 300] * 2
    assert ends == [150, 320] * 2
    assert report.policies == {"queued-communication": 2}


def test_the_recorder_needs_neither_polars_nor_torch(repo):
    code = "import sys, prismtrace.recorder; print({'polars', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_progress_counts_ranks(tmp_path):
    record(tmp_path, ranks=3)
    seen = []
    pt.assemble(tmp_path, tmp_path / "out.parquet", progress=seen.append)
    assert seen == [1, 1, 1]
    assert pl.read_parquet(tmp_path / "out.parquet").height == 18
