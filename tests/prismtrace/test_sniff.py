from __future__ import annotations

import gzip
import pickle
import sqlite3
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismtrace.converters.sniff import SourceFormat, sniff, unsupported
from prismtrace.errors import InputFileError, SourceFormatError

EVENTS = b'[{"name": "a", "ph": "X", "ts": 1}]'
# GlobalMetadata{version: "0.0.4"}, Node{id: 1, name: "a", type: 4}
CHAKRA = b"\x07\x0a\x050.0.4" + b"\x07\x08\x01\x12\x01a\x18\x04"
TEXTS = {
    b'{"schemaVersion": 1, "traceEvents": []}': SourceFormat.KINETO,
    b'\n{\n  "schemaVersion": 1,\n  "deviceProperties": [': SourceFormat.KINETO,
    b"\xef\xbb\xbf " + EVENTS: SourceFormat.KINETO,
    EVENTS: SourceFormat.KINETO,
    b'{"distributedInfo": {"pg_config": []}, "version": 1': SourceFormat.KINETO,
    b'{"schema": "1.1.1-chakra.0.0.4", "pid": 3, "nodes": []}': SourceFormat.PYTORCH_ET,
    b'{"workload_graph": [{"Id": 1}]}': SourceFormat.CHAKRA_JSON,
    b'{"version": "2.10", "pg_config": {}, "entries": []}': SourceFormat.FLIGHT_RECORDER_JSON,
    b'{"1": [0, 1, 2], "2": [3]}': SourceFormat.GROUPS,
    b'{"a": 1}': SourceFormat.UNKNOWN,
    b"[1, 2]": SourceFormat.UNKNOWN,
    b"": SourceFormat.UNKNOWN,
    b"\n": SourceFormat.UNKNOWN,
    b"rank 0 started\n": SourceFormat.UNKNOWN,
    CHAKRA: SourceFormat.CHAKRA,
    CHAKRA[8:]: SourceFormat.CHAKRA,
    CHAKRA[:-1]: SourceFormat.CHAKRA,  # cut off
    CHAKRA[8:-1]: SourceFormat.UNKNOWN,
    b"dp_rank,stage,step,optype,start_ts\n0,0,0,gc,1\n": SourceFormat.OPS_CSV,
    pickle.dumps({"version": "2.10", "entries": []}): SourceFormat.FLIGHT_RECORDER,
    pickle.dumps([1, 2]): SourceFormat.UNKNOWN,
    b"SQLite format 3\0" + b"\0" * 100: SourceFormat.SQLITE,
    b"PAR1 is no parquet": SourceFormat.UNKNOWN,
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("zipped", [False, True])
def test_told_by_content(tmp_path: Path, text: bytes, zipped: bool) -> None:
    path = tmp_path / "any-name.txt"
    path.write_bytes(gzip.compress(text) if zipped else text)
    expected = TEXTS[text]
    assert sniff(path) is expected


def test_databases_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    connection.close()
    assert sniff(path) is SourceFormat.NSYS_SQLITE

    ops = pl.DataFrame({"dp_rank": [0], "stage": [0], "step": [0], "optype": ["gc"]})
    ops.write_parquet(path)
    assert sniff(path) is SourceFormat.OPS_PARQUET
    ops.drop("stage").write_parquet(path)
    assert sniff(path) is SourceFormat.UNKNOWN
    ops.write_parquet(path, metadata={"prismtrace": "{}"})
    assert sniff(path) is SourceFormat.PRISMTRACE_PARQUET


def test_recorded_files(data_dir: Path) -> None:
    expected = {
        "kineto": SourceFormat.KINETO,
        "flight-recorder": SourceFormat.FLIGHT_RECORDER,
        "nsys": SourceFormat.NSYS_SQLITE,
    }
    for folder, found in expected.items():
        for path in (data_dir / folder).rglob("*"):
            if path.is_file():
                assert sniff(path) is found, path
    assert sniff(data_dir / "chakra/chakra.0.et.gz") is SourceFormat.CHAKRA
    for path in (data_dir / "chakra/ring-allreduce-8").iterdir():
        assert sniff(path) is SourceFormat.CHAKRA
    assert sniff(data_dir / "ops/straggler/trace-ST.parquet") is SourceFormat.OPS_PARQUET
    assert sniff(data_dir / "ops/straggler/meta-ST.yaml") is SourceFormat.UNKNOWN


@given(st.binary(max_size=300))
def test_any_bytes_have_an_answer(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(data)
    assert sniff(path) in SourceFormat


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputFileError):
        sniff(tmp_path / "missing")


def test_the_error_names_what_the_file_is() -> None:
    error = unsupported(Path("a.sqlite"), SourceFormat.NSYS_SQLITE)
    assert isinstance(error, SourceFormatError)
    assert str(error) == (
        "this is an Nsight Systems export; its converter is not available in this version"
        " [a.sqlite]"
    )
    assert all(unsupported(Path("x"), f).hint for f in SourceFormat)
