"""The table of communication times: reductions, interpolation, what it does not know."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismcalib.comm_logs import Reading
from prismcalib.comm_samples import SCHEMA
from prismcalib.comm_table import CommTable, Operation, read_comm_logs
from prismcalib.errors import CommLogError
from prismtrace.errors import InputFileError, OutputError
from tests.prismcalib.nccl_logs import modern


def table(*rows, kind="all_reduce", dtype="float32", ranks=8, hosts=1):
    """Rows are (bytes, ns) or (bytes, ns, in_place)."""
    full = [
        (kind, dtype, ranks, hosts, size, more[0] if more else True, time, None)
        for size, time, *more in rows
    ]
    samples = pl.DataFrame(full, schema=SCHEMA, orient="row")
    return CommTable.of([Reading(Path("log"), samples, {})])


def ask(times, size, **more):
    operation = {"kind": "all_reduce", "dtype": "float32", "ranks": 8, "hosts": 1, "bytes": size}
    return times.estimate(Operation(**operation | more))


def test_measured_sizes_are_given_back():
    times = table((1000, 50), (2000, 60), (4000, 100))
    for size, time in ((1000, 50), (2000, 60), (4000, 100)):
        assert ask(times, size) == (time, 1.0, 1.0, False, False)


def test_between_two_sizes_the_line_is_straight_in_logs():
    times = table((1000, 100), (4000, 400))
    assert ask(times, 2000)[:1] == (200,)
    power = table(*[(10**k, round(7 * 10 ** (0.5 * k))) for k in range(2, 9, 2)])
    found = ask(power, 10**5)
    assert found.time_ns == pytest.approx(7 * 10**2.5, abs=1)
    # Points on a line say that the line is right.
    assert found.low == pytest.approx(1, abs=1e-2)
    assert not found.extrapolated


def test_a_bend_is_doubt():
    times = table((100, 100), (1000, 100), (10000, 1000))
    found = ask(times, 3000)
    assert found.low < 0.6
    assert found.high > 1.7


def test_in_place_is_preferred_where_torch_works_in_place():
    both = [(1000, 50, True), (1000, 58, False)]
    assert ask(table(*both), 1000) == (50, 1.0, pytest.approx(1.16), False, False)
    gathers = table(*both, kind="all_gather")
    assert ask(gathers, 1000, kind="all_gather").time_ns == 58
    only = table((1000, 58, False))
    assert ask(only, 1000).time_ns == 58


def test_several_logs_give_a_median():
    merged = table(*[(1000, time) for time in (50, 70, 55)])
    assert merged.times["samples"].to_list() == [3]
    assert ask(merged, 1000) == (55, pytest.approx(50 / 55), pytest.approx(70 / 55), False, False)


def test_beyond_the_ends_it_says_so():
    times = table((1000, 100), (2000, 100), (4000, 200))
    small, large = ask(times, 100), ask(times, 40000)
    assert small.time_ns == 100
    assert large.time_ns == 2000
    assert small.extrapolated
    assert large.extrapolated
    assert large.high == pytest.approx(10**0.25, rel=0.01)
    single = table((1000, 100))
    assert ask(single, 10**6).time_ns == 100
    # Never steeper than bandwidth alone, nor falling.
    assert ask(table((1000, 100), (2000, 900)), 4000).time_ns == 1800
    assert ask(table((1000, 900), (2000, 100)), 4000).time_ns == 100


def test_other_ranks_and_hosts_are_not_guessed():
    times = table((1000, 100))
    assert ask(times, 1000, ranks=4) is None
    assert ask(times, 1000, hosts=2) is None
    assert ask(times, 1000, kind="all_gather") is None
    assert ask(times, 0) is None


def test_another_dtype_is_better_than_none():
    times = table((1000, 100))
    found = ask(times, 1000, dtype="bfloat16")
    assert (found.time_ns, found.other_dtype) == (100, True)


def test_a_barrier_has_neither_payload_nor_dtype():
    times = table((0, 7_000), kind="barrier")
    assert ask(times, 0, kind="barrier", dtype=None) == (7_000, 1, 1, False, False)
    assert times.estimate(Operation("barrier", None, 8, 1, -1)).time_ns == 7_000
    assert times.estimate(Operation("barrier", None, 4, 1, -1)) is None


def test_pairs_use_any_number_of_ranks():
    one, two = table((1000, 10), kind="send", ranks=8), table((1000, 30), kind="send", hosts=2)
    both = CommTable(pl.concat([one.times, two.times]))
    for kind in ("send", "recv"):
        assert ask(both, 1000, kind=kind, ranks=2).time_ns == 10
        assert ask(both, 1000, kind=kind, ranks=2, hosts=2).time_ns == 30


@given(
    st.lists(
        st.tuples(st.integers(1, 2**40), st.integers(1, 2**40)),
        min_size=1,
        max_size=8,
        unique_by=lambda row: row[0],
    ),
    st.integers(1, 2**42),
)
def test_estimates_stay_between_their_neighbours(rows, size):
    found = ask(table(*rows), size)
    assert 0 < found.low <= 1 <= found.high
    inside = min(rows)[0] <= size <= max(rows)[0]
    assert found.extrapolated != inside
    if inside:
        below = max(row for row in rows if row[0] <= size)[1]
        above = min(row for row in rows if row[0] >= size)[1]
        assert min(below, above) - 1 <= found.time_ns <= max(below, above) + 1


def test_from_logs_to_file_and_back(tmp_path):
    logs = []
    for name, ranks, hosts in (("one", 8, 1), ("two", 16, 2)):
        path = tmp_path / f"{name}.log"
        path.write_text(
            modern([(1 << 20, 40.0, 39.0), (1 << 24, 340.0, 339.0)], ranks=ranks, hosts=hosts)
        )
        logs.append(path)
    times = read_comm_logs(logs)
    assert times.sources == ("one.log", "two.log")
    times.write(tmp_path / "table.parquet")
    again = CommTable.open(tmp_path / "table.parquet")
    assert again.times.equals(times.times)
    assert again.sources == times.sources
    assert ask(again, 1 << 20, ranks=16, hosts=2).time_ns == 39_000
    # The same files in another order make the same table.
    read_comm_logs(logs[::-1]).write(tmp_path / "other.parquet")
    assert (tmp_path / "other.parquet").read_bytes() == (tmp_path / "table.parquet").read_bytes()
    with pytest.raises(OutputError):
        times.write(tmp_path / "none" / "table.parquet")


def test_files_that_are_no_table(tmp_path):
    with pytest.raises(InputFileError):
        CommTable.open(tmp_path / "no.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(InputFileError):
        CommTable.open(tmp_path / "text.parquet")
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(CommLogError, match="not a table"):
        CommTable.open(tmp_path / "other.parquet")


def test_processor_time_of_operations(tmp_path):
    text = "kind,dtype,ranks,hosts,bytes,time_ns,cpu_ns\n"
    lines = ["all_reduce,float32,8,1,1000,500,100", "all_reduce,float32,8,1,4000,700,400"]
    lines += ["all_gather,float32,8,1,4000,700,"]
    log = tmp_path / "times.csv"
    log.write_text(text + "\n".join(lines) + "\n")
    times = read_comm_logs([log])
    times.write(tmp_path / "table.parquet")
    times = CommTable.open(tmp_path / "table.parquet")

    def cpu(kind, size, ranks=8):
        return times.cpu_ns(Operation(kind, "float32", ranks, 1, size))

    assert [cpu("all_reduce", size) for size in (1000, 2000, 4000, 0)] == [100, 200, 400, 0]
    assert cpu("all_reduce", 1000, ranks=4) == 0
    assert cpu("all_gather", 4000) == 0
