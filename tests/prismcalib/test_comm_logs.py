"""Logs of nccl-tests in every layout, tables of comm-bench, and what is wrong with some."""

from __future__ import annotations

import json

import polars as pl
import pytest

from prismcalib.comm_logs import Assumed, read_comm_log
from prismcalib.errors import CommLogError
from prismtrace.errors import InputFileError
from prismtrace.schema import Kind
from tests.prismcalib.nccl_logs import as_json, modern, of_2017, of_2019

# Size, out of place, in place: large enough that bandwidths have digits to be checked.
ROWS = [(1 << 20, 40.0, 39.0), (1 << 22, 100.0, 98.0), (1 << 24, 340.0, 338.0)]


@pytest.fixture
def read(tmp_path):
    def reading(text, name="log.txt", **assumed):
        path = tmp_path / name
        path.write_text(text)
        return read_comm_log(path, assumed=Assumed(**assumed))

    return reading


def expected(kind="all_reduce", dtype="float32", ranks=8, hosts=1):
    return [
        (kind, dtype, ranks, hosts, size, in_place, round(time * 1e3), None)
        for size, *times in ROWS
        for in_place, time in zip((False, True), times, strict=True)
    ]


def test_current_layout(read):
    assert read(modern(ROWS)).samples.rows() == expected()


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("alltoall", "all_to_all"),
        ("sendrecv", "send"),
        ("broadcast", "broadcast"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
    ],
)
def test_every_test(read, test, kind):
    assert read(modern(ROWS, test=test)).samples.rows() == expected(kind)


def test_several_hosts_and_types(read):
    log = modern(ROWS, ranks=16, hosts=4, dtype="bfloat16", itemsize=2)
    assert read(log).samples.rows() == expected(dtype="bfloat16", ranks=16, hosts=4)


def test_groups_that_run_at_once(read):
    """NCCL_TESTS_SPLIT: 16 ranks in 8 groups of two, one on each of two hosts."""
    log = modern(ROWS, ranks=16, hosts=2, color=8)
    assert read(log).samples.rows() == expected(ranks=2, hosts=2)


def test_timestamps(read):
    assert read(modern(ROWS, timestamps=True)).samples.rows() == expected()


def test_2019(read):
    log = of_2019(ROWS)
    assert read(log, "all_gather_perf.8.log").samples.rows() == expected("all_gather")
    assert read(log, kind=Kind.ALL_GATHER).samples.rows() == expected("all_gather")
    with pytest.raises(CommLogError, match="does not name the test") as caught:
        read(log)
    assert "--kind" in caught.value.hint


def test_2017(read):
    log = of_2017(ROWS)
    assert read(log, kind=Kind.ALL_REDUCE).samples.rows() == expected(ranks=4)


def test_json(read):
    log = as_json(ROWS, test="all_reduce", ranks=16, ngpus=8)
    assert read(log, "out.json").samples.rows() == expected(ranks=16, hosts=2)


def test_what_launchers_add(read):
    noise = "node-0:12:12 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"
    lines = modern(ROWS, named=False).splitlines()
    lines = [noise, "+ mpirun -np 8 ./build/all_reduce_perf -b 1M -e 16M -f 2", *lines, noise]
    assert read("\n".join(lines)).samples.rows() == expected()
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in lines)
    assert read(tagged).samples.rows() == expected()
    numbered = "\n".join(f"0: {line}" for line in lines)
    assert read(numbered).samples.rows() == expected()


def test_several_tests_in_one_log(read):
    log = modern(ROWS) + modern(ROWS, test="all_gather", ranks=4) + modern(ROWS, test="alltoallv")
    reading = read(log)
    assert reading.samples.rows() == expected() + expected("all_gather", ranks=4)
    assert reading.skipped == {"of alltoallv_perf, which no operation of a trace is like": 3}


def test_lines_that_do_not_count(read):
    lines = modern([(0, 5.0, 5.0), *ROWS]).splitlines()
    last = next(at for at in range(len(lines) - 1, 0, -1) if lines[at].strip()[0].isdigit())
    broken = lines[last].replace("      0", "      3", 1)
    more = [lines[last].rsplit("  ", 2)[0], lines[last].replace("338.00", "    N/A"), broken]
    reading = read("\n".join([*lines[: last + 1], *more]))
    assert reading.skipped == {
        "of no bytes": 1,
        "cut short": 1,
        "without a time": 1,
        "with wrong results": 1,
    }
    assert reading.samples.height == 8


def test_csv_and_its_json(read):
    text = "kind,dtype,ranks,hosts,bytes,time_ns,in_place\nall_reduce,float32,8,1,64,20500,true\n"
    row = ("all_reduce", "float32", 8, 1, 64, True, 20500, None)
    assert read(text).samples.rows() == [row]
    plain = "kind, dtype, ranks, hosts, bytes, time_ns\nrecv, half, 2, 1, 64, 2050.4\n"
    assert read(plain).samples.rows() == [("send", "float16", 2, 1, 64, False, 2050, None)]
    samples = [dict(zip(read(text).samples.columns, row, strict=True))]
    assert read(json.dumps(samples)).samples.rows() == [row]
    assert read(json.dumps({"samples": samples})).samples.rows() == [row]


def test_the_number_of_ranks_has_to_fit(read):
    log = modern(ROWS, ranks=8)
    cut = "\n".join(line for line in log.splitlines() if "Rank  7" not in line)
    with pytest.raises(CommLogError, match="not those of all_reduce on 7 ranks") as caught:
        read(cut)
    assert "log.txt:" in caught.value.where
    assert read(cut, ranks=8).samples.rows() == expected()
    with pytest.raises(CommLogError, match="bandwidths"):
        read(log, kind=Kind.ALL_GATHER)


def test_processes_that_do_not_know_of_each_other(read):
    """nccl-tests built without MPI=1: every process is rank 0 of its own."""
    log = modern(ROWS, ranks=8)
    for rank in range(8):
        log = log.replace(f"Rank {rank:2d} ", "Rank  0 ")
    with pytest.raises(CommLogError, match="8 processes call themselves rank 0") as caught:
        read(log)
    assert "MPI=1" in caught.value.hint
    with pytest.raises(CommLogError, match="one device only"):
        read(modern([(1024, 5.0, 5.0)], ranks=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no measured time"),
        ("nothing of use\n", "no measured time"),
        ("{", "broken JSON"),
        ('{"results": 3}', "not of nccl-tests"),
        ('{"results": []}', "holds no result"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nall_reduce,float32,8,1,64,\n", "time_ns is missing"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nallreduce,float32,8,1,64,5\n", "unknown kind"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nall_reduce,f3,8,1,64,5\n", "unknown data type"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nall_reduce,half,1,1,64,5\n", "at least two ranks"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nall_reduce,half,2,3,64,5\n", "as many hosts"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nall_reduce,half,2,1,6.4,5\n", "bytes is '6.4'"),
        ("kind,dtype,ranks,hosts,bytes,time_ns\nall_reduce,half,2,1,64,-5\n", "takes time"),
    ],
)  # fmt: skip
def test_broken_files(read, text, message):
    with pytest.raises(CommLogError, match=message) as caught:
        read(text)
    assert "log.txt" in caught.value.where


def test_no_list_of_devices(read):
    log = "\n".join(line for line in modern(ROWS).splitlines() if "Rank" not in line)
    with pytest.raises(CommLogError, match="does not list the devices") as caught:
        read(log)
    assert "--ranks" in caught.value.hint
    assert read(log, ranks=8, hosts=1).samples.rows() == expected()


def test_times_of_the_cpu_are_none(read):
    log = modern(ROWS).replace("   time", "cputime")
    with pytest.raises(CommLogError, match="6 of the CPU only"):
        read(log)


def test_missing_file(tmp_path):
    with pytest.raises(InputFileError, match="No such file"):
        read_comm_log(tmp_path / "no.log")


def test_samples_have_the_schema(read):
    assert read(modern(ROWS)).samples.schema["time_ns"] == pl.Int64
