from __future__ import annotations

from prismtrace.info import GroupInfo, KindInfo, RankInfo, StepInfo, summarize
from prismtrace.trace import open_trace, write


def test_a_job_in_numbers(job):
    info = summarize(job)
    assert (info.nodes, info.start_ns, info.end_ns, info.window_ns) == (7, 1000, 1095, 95)
    assert info.critical == 2
    assert info.ranks == (RankInfo(0, 4, 1000, 1095), RankInfo(1, 3, 1000, 1095))
    assert info.kinds == (
        KindInfo("compute", 3, 85, None, None, 0),
        KindInfo("all_reduce", 2, 80, 20, 128, 0),
        KindInfo("send", 1, 10, 0, 8, 0),
        KindInfo("recv", 1, 15, 5, 8, 0),
    )
    assert info.groups == (GroupInfo(0, "world", "", "0-1", 4),)
    assert info.steps == (StepInfo(0, 5, 1000, 1085),)
    assert info.header == job.header


def test_without_times(make_trace):
    info = summarize(make_trace({}, {"kind": "barrier", "group": 0}, kind="bare"))
    assert (info.window_ns, info.critical, info.steps) == (None, 0, ())
    assert [(k.kind, k.dur_ns, k.unmatched) for k in info.kinds] == [
        ("compute", None, 0),
        ("barrier", None, 1),
    ]


def test_communications_without_a_group_are_unmatched(make_trace):
    lone = {"kind": "other_comm", "group": None, "seq": None}
    info = summarize(make_trace({}, lone, {"kind": "memcpy"}))
    assert {k.kind: k.unmatched for k in info.kinds} == {
        "compute": 0,
        "memcpy": 0,
        "other_comm": 1,
    }


def test_files_and_own_columns(job, tmp_path):
    own = job.nodes.with_columns(x_layer=job.nodes.collect()["rank"])
    write(type(job)(job.header, own), tmp_path / "run.parquet")
    info = summarize(open_trace(tmp_path))
    assert info.files == (str(tmp_path / "run.parquet"),)
    assert info.file_bytes == (tmp_path / "run.parquet").stat().st_size
    assert info.extra_columns == ("x_layer",)


def test_an_empty_trace(make_trace):
    assert summarize(make_trace()).nodes == 0
