"""`find_hang` on jobs that stand still in ways known beforehand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prismtrace import cli
from prismtrace.errors import InputFileError, RankError
from prismtrace.hangs import Reason, find_hang, printing
from prismtrace.hangs.report import Verdict
from prismtrace.hangs.waits import ends_of_waiting, reaching
from tests.prismtrace.flight_dumps import Recorder, json_dump, recorders, write_dumps


def blamed(report) -> dict[int, Reason]:
    return {culprit.rank: culprit.reason for culprit in report.culprits}


def train(ranks: list[Recorder], steps: int = 3) -> None:
    for _ in range(steps):
        for recorder in ranks:
            recorder.run("all_reduce")
            recorder.run("_all_gather_base", shape=(64,))


def test_a_job_that_runs_to_its_end_does_not_hang(tmp_path):
    ranks = recorders(4)
    train(ranks)
    report = find_hang(write_dumps(tmp_path, ranks))
    assert report.verdict is Verdict.NO_HANG
    assert report.culprits == ()
    assert report.groups[0].completed_by_all == 6
    assert "no hang" in report.sentence


def test_recorded_dumps_of_a_job_that_ended(data_dir):
    report = find_hang(data_dir / "flight-recorder")
    assert report.verdict is Verdict.NO_HANG
    assert {g.name: (g.ranks, g.completed_by_all) for g in report.groups} == {
        "0": ((0, 1, 2, 3), 8),
        "1": ((0, 2), 16),
        "2": ((1, 3), 16),
    }


def test_a_rank_stuck_in_computation_is_the_one_all_wait_for(tmp_path):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks:
        if recorder.rank != 2:
            recorder.run("all_reduce", "started", line=20)
    report = find_hang(write_dumps(tmp_path, ranks))
    (culprit,) = report.culprits
    assert (culprit.rank, culprit.reason) == (2, Reason.NOT_ENQUEUED)
    assert culprit.waited_for_by == (0, 1, 3)
    assert culprit.operation == "all_reduce of float32, 4096 bytes"
    assert culprit.seq == 7
    assert culprit.last_site == "train.py:10 in train_step"
    (group,) = report.groups
    assert (group.enqueued_by_all, group.completed_by_all) == (6, 6)
    assert group.pending is not None
    assert group.pending.absent == (2,)
    assert group.pending.started == (0, 1, 3)
    assert group.pending.sites == dict.fromkeys((0, 1, 3), "train.py:20 in train_step")


def test_the_wait_is_followed_through_other_groups(tmp_path):
    ranks = recorders(4, tp0=(0, 1), tp1=(2, 3))
    train(ranks)
    # 3 computes; 2 waits for it within tp1; 0 and 1 wait for both among all.
    ranks[2].run(group="tp1", state="started")
    for rank in (0, 1):
        ranks[rank].run(state="started")
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == {3: Reason.NOT_ENQUEUED}
    assert report.culprits[0].waited_for_by == (0, 1, 2)


def test_a_rank_without_a_dump_is_named(tmp_path):
    ranks = recorders(3)
    train(ranks)
    for recorder in ranks[:2]:
        recorder.run(state="started")
    report = find_hang(write_dumps(tmp_path, ranks[:2]))
    assert report.missing_ranks == (2,)
    assert report.sentence == "the dump of rank 2 is missing; ranks 0-1 wait for rank 2"
    assert blamed(report) == {2: Reason.NO_DUMP}
    assert report.culprits[0].last_site is None


def test_the_operation_that_the_rank_is_first_missing_from_is_told(tmp_path):
    ranks = recorders(8, tp2=(4, 5), dp0=(0, 2, 4, 6), dp1=(1, 3, 5, 7))
    ranks[4].run(group="tp2", state="started")
    for recorder in ranks:
        if recorder.rank not in (4, 5):
            recorder.now_ns += 1_000_000_000
            recorder.run(group=f"dp{recorder.rank % 2}", state="started")
    report = find_hang(write_dumps(tmp_path, ranks))
    (culprit,) = report.culprits
    assert (culprit.rank, culprit.group) == (5, "tp2")
    assert culprit.waited_for_by == (0, 1, 2, 3, 4, 6, 7)
    # By the program's order where clocks say otherwise.
    ranks = recorders(4, tp1=(2, 3))
    ranks[2].now_ns += 1_000_000_000
    ranks[2].run(group="tp1", state="started")
    for rank in (0, 1):
        ranks[rank].run(state="started")
    (culprit,) = find_hang(write_dumps(tmp_path / "b", ranks)).culprits
    assert (culprit.rank, culprit.group) == (3, "tp1")


def test_dumps_that_are_missing_are_told_first_where_nothing_hangs(tmp_path):
    ranks = recorders(4)
    train(ranks)
    report = find_hang(write_dumps(tmp_path, ranks[:2]))
    assert report.sentence == (
        "the dumps of ranks 2-3 are missing; no hang: every operation in the others has ended"
    )


def test_each_rank_is_told_with_its_own_reason(tmp_path):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks[:2]:
        recorder.run(state="started")
    report = find_hang(write_dumps(tmp_path, ranks[:3]))
    assert report.sentence == (
        "the dump of rank 3 is missing; the others show a hang: rank 2 (not-enqueued), "
        "rank 3 (no-dump)"
    )


def test_a_copy_put_aside_is_no_rank(tmp_path):
    ranks = recorders(2)
    train(ranks)
    paths = write_dumps(tmp_path, ranks)
    aside = paths[1].rename(tmp_path / "nccl_trace_rank_1.bak")
    with pytest.raises(RankError, match="put aside"):
        find_hang(tmp_path)
    assert find_hang([paths[0], aside], ranks={aside.name: 1}).ranks == (0, 1)


@pytest.mark.parametrize(
    "other", [{"name": "all_gather"}, {"shape": (8,)}, {"dtype": "Half"}, {"name": "barrier"}]
)
def test_another_operation_than_the_others(tmp_path, other):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks:
        recorder.run(state="started", **(other if recorder.rank == 1 else {}))
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == {1: Reason.DIFFERENT_OPERATION}
    pending = report.groups[0].pending
    assert pending is not None
    assert pending.different == (1,)
    assert pending.differences is not None
    assert pending.differences[0] != pending.differences[1]


def test_of_two_that_differ_each_is_told_what_the_other_enqueued(tmp_path):
    ranks = recorders(2)
    train(ranks)
    for recorder in ranks:
        recorder.run(state="started", shape=(8,) if recorder.rank == 1 else (2,))
    first, second = find_hang(write_dumps(tmp_path, ranks)).culprits
    assert first.reason is second.reason is Reason.DIFFERENT_OPERATION
    assert first.last_operation is not None
    assert first.last_operation.startswith(second.operation)
    assert second.last_operation is not None
    assert second.last_operation.startswith(first.operation)
    assert first.operation != second.operation


def test_a_left_out_operation_is_guessed(tmp_path):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks:
        if recorder.rank != 3:
            recorder.run("broadcast", "started", shape=(2,))
        recorder.run("all_reduce", "scheduled")
        recorder.run("all_gather", "scheduled", shape=(3,))
    report = find_hang(write_dumps(tmp_path, ranks))
    (culprit,) = report.culprits
    assert culprit.rank == 3
    assert "left out broadcast of float32, 8 bytes" in culprit.detail


def test_two_ranks_that_differ_are_both_named(tmp_path):
    ranks = recorders(2)
    ranks[0].run("all_reduce", "started")
    ranks[1].run("broadcast", "started")
    assert set(blamed(find_hang(write_dumps(tmp_path, ranks)))) == {0, 1}


def test_a_gpu_that_has_not_started_what_it_enqueued(tmp_path):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks:
        recorder.run(state="scheduled" if recorder.rank == 2 else "started")
    assert blamed(find_hang(write_dumps(tmp_path, ranks))) == {2: Reason.NOT_STARTED}


def test_started_everywhere_is_nobodys_fault(tmp_path):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks:
        recorder.run(state="started", retired=True)
    report = find_hang(write_dumps(tmp_path, ranks))
    assert report.verdict is Verdict.STALLED
    assert report.culprits == ()
    assert report.groups[0].pending is not None
    assert report.groups[0].pending.timed_out


def test_a_ring_of_sends_is_a_deadlock(tmp_path):
    ranks = recorders(4)
    train(ranks)
    for recorder in ranks:
        recorder.send((recorder.rank + 1) % 4, "started")
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == dict.fromkeys(range(4), Reason.DEADLOCK)
    assert len(report.p2p) == 4
    assert report.p2p[0].absent == (1,)


def test_a_receive_without_its_send(tmp_path):
    ranks = recorders(3, pp=(1, 2))
    train(ranks)
    ranks[2].recv(1, "started", group="pp")
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == {1: Reason.NOT_ENQUEUED}
    assert report.culprits[0].operation == "recv from 1 of float32, 4096 bytes"


def test_a_receive_of_another_size_than_was_sent(tmp_path):
    ranks = recorders(2)
    ranks[0].send(1, "started", shape=(8,))
    ranks[1].recv(0, "started", shape=(9,))
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == dict.fromkeys((0, 1), Reason.DIFFERENT_OPERATION)
    assert report.p2p[0].differences == {
        0: "send to 1 of float32, 32 bytes",
        1: "recv from 0 of float32, 36 bytes",
    }


def test_order_on_one_stream_can_be_a_deadlock(tmp_path):
    """Both send before they receive, and the operations of a pair run one after the other."""
    ranks = recorders(2)
    for recorder in ranks:
        recorder.send(1 - recorder.rank, "started")
        recorder.recv(1 - recorder.rank, "scheduled")
    assert set(blamed(find_hang(write_dumps(tmp_path, ranks))).values()) == {Reason.DEADLOCK}


def test_batched_sends_and_receives_take_the_state_of_their_launch(tmp_path):
    ranks = recorders(2)
    for recorder in ranks:
        recorder.batch(("send", 1 - recorder.rank), ("recv", 1 - recorder.rank))
    assert find_hang(write_dumps(tmp_path, ranks)).verdict is Verdict.NO_HANG
    ranks[0].batch(("send", 1), ("recv", 1), state="started")
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == {1: Reason.NOT_ENQUEUED}


def test_buffers_that_begin_at_different_operations(tmp_path):
    ranks = recorders(3, tp=(0, 1))
    for recorder in ranks:
        for _ in range(10):
            if recorder.rank < 2:
                recorder.run(group="tp")
            recorder.run()
        recorder.capacity = 8
        if recorder.rank != 1:
            recorder.run(state="started")
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == {1: Reason.NOT_ENQUEUED}
    assert report.culprits[0].seq == 11


def test_numbers_that_differ_between_ranks(tmp_path):
    """A rank counts its batched sends, too, so that its numbers run ahead."""
    ranks = recorders(3)
    for step in range(6):
        for recorder in ranks:
            if recorder.rank == 0:
                recorder.seq["0"] += 1
            recorder.run(shape=(step + 1,))
            recorder.run("_all_gather_base", shape=(step + 1, 2))
    for recorder in ranks[:2]:
        recorder.run(shape=(77,), state="started")
    report = find_hang(write_dumps(tmp_path, ranks))
    assert blamed(report) == {2: Reason.NOT_ENQUEUED}
    assert any("differently" in note for note in report.notes)


def test_gaps_are_noted_and_taken_as_done(tmp_path):
    ranks = recorders(2)
    train(ranks)
    del ranks[1].entries[2]
    report = find_hang(write_dumps(tmp_path, ranks))
    assert report.verdict is Verdict.NO_HANG
    assert any("rank 1 has no record of 1 collectives" in note for note in report.notes)


def test_json_and_lists_and_first_versions_are_read(tmp_path):
    ranks = recorders(2)
    train(ranks)
    ranks[0].run(state="started")
    assert blamed(find_hang(write_dumps(tmp_path / "json", ranks, as_json=True))) == {
        1: Reason.NOT_ENQUEUED
    }
    paths = []
    for recorder in ranks:
        entries = recorder.dump()["entries"]
        for entry in entries:
            entry["seq_id"] = entry.pop("collective_seq_id")
            for key in ("p2p_seq_id", "op_id", "process_group", "is_p2p"):
                del entry[key]
        paths.append(tmp_path / f"v1_rank{recorder.rank}.json")
        paths[-1].write_bytes(json_dump({"version": "1.5", "entries": entries}))
    report = find_hang(paths)
    assert blamed(report) == {1: Reason.NOT_ENQUEUED}
    assert report.groups[0].ranks == (0, 1)


def test_files_that_cannot_be_used(tmp_path):
    ranks = recorders(2)
    train(ranks)
    paths = write_dumps(tmp_path / "a", ranks)
    with pytest.raises(InputFileError, match="no flight-recorder dump"):
        find_hang(tmp_path)
    copy = tmp_path / "hostB_rank1"
    copy.write_bytes(paths[1].read_bytes())
    with pytest.raises(RankError, match="in two files"):
        find_hang([*paths, copy])
    nameless = tmp_path / "dump"
    nameless.write_bytes(paths[1].read_bytes())
    with pytest.raises(RankError, match="does not say") as caught:
        find_hang([nameless])
    assert "--rank dump=N" in str(caught.value.hint)
    report = find_hang([paths[0], nameless], ranks={"dump": 1})
    assert report.ranks == (0, 1)


def test_groups_that_no_dump_lists_can_be_named(tmp_path: Path):
    ranks = recorders(4, a=(0, 2))
    for recorder in ranks:
        recorder.run(state="completed")
    ranks[0].run(group="a", state="started")
    paths = []
    for recorder in ranks:
        dump = recorder.dump()
        dump["pg_config"] = {}
        paths.append(tmp_path / f"rank{recorder.rank}.json")
        paths[-1].write_bytes(json_dump(dump))
    assert find_hang(paths).verdict is Verdict.STALLED
    groups = tmp_path / "groups.json"
    groups.write_text('{"a": [0, 2]}')
    assert blamed(find_hang(paths, groups=groups)) == {2: Reason.NOT_ENQUEUED}


def test_the_command_names_the_culprit_first(tmp_path):
    ranks = recorders(4, tp0=(0, 1), tp1=(2, 3))
    train(ranks)
    ranks[2].run(group="tp1", state="started", line=31)
    write_dumps(tmp_path / "dumps", ranks[:3])
    done = CliRunner().invoke(cli.app, ["hang", str(tmp_path / "dumps")])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "the dump of rank 3 is missing; rank 2 waits for rank 3"
    assert lines[1].startswith("  copy the dumps of all hosts together")
    assert lines[3].startswith("rank 3 left no dump: it may have ended")
    assert "  waited for by rank 2" in lines
    assert "    at train.py:31 in train_step: rank 2" in lines
    assert "dumps: ranks 0-2 of a world of 4" in lines
    assert "group tp1, ranks 2-3: enqueued by all with a dump: #1, " in done.stdout
    assert "completed by all with a dump: none" in done.stdout
    done = CliRunner().invoke(cli.app, ["hang", str(tmp_path / "dumps"), "--json"])
    report = json.loads(done.stdout)
    assert report["culprits"][0]["rank"] == 3
    assert report["sentence"] == lines[0]
    twice = CliRunner().invoke(cli.app, ["hang", str(tmp_path / "dumps"), "--json", "--jobs", "2"])
    assert json.loads(twice.stdout) == report
    refused = CliRunner().invoke(cli.app, ["hang", str(tmp_path / "dumps"), "--rank", "x"])
    assert refused.exit_code == 2


def test_every_reason_is_told_and_explained(repo):
    assert set(Reason) == set(printing._REASONS)
    page = (repo / "docs/guides/hang.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == set(Reason)


def test_ends_of_waiting():
    waits = {"a": ["b"], "b": ["c"], "d": ["e"], "e": ["d"], "f": ["d", "c"]}
    assert sorted(map(sorted, ends_of_waiting(waits))) == [["c"], ["d", "e"]]
    assert reaching(waits, ["c"]) == {"a", "b", "c", "f"}
    chain = {n: [n + 1] for n in range(20_000)}
    assert ends_of_waiting(chain) == [[20_000]]


def test_an_empty_dump_is_a_missing_one(tmp_path):
    """Given by its folder or by a pattern: its rank was ended before it wrote."""
    ranks = recorders(4, tp0=(0, 1), tp1=(2, 3))
    train(ranks)
    ranks[2].run(group="tp1", state="started", line=31)
    paths = write_dumps(tmp_path / "dumps", ranks[:3])
    expected = find_hang(paths)
    (tmp_path / "dumps" / "nccl_trace_rank_3").write_bytes(b"")
    for given in (tmp_path / "dumps", str(tmp_path / "dumps" / "nccl_trace_rank_*")):
        found = find_hang(given)
        assert found.notes[0] == "empty, so taken for missing: nccl_trace_rank_3"
        assert replace(found, notes=found.notes[1:]) == expected
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "nccl_trace_rank_0").write_bytes(b"")
    with pytest.raises(InputFileError, match="it is empty") as caught:
        find_hang(alone)
    assert "without this file, its rank counts as one that left no dump" in caught.value.hint
