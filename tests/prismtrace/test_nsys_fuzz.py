"""Whatever an export holds: a result or one of our errors, soon and in little memory.

5 000 cases: 2 000 whole conversions of exports with changed bytes or cells, and 3 000 payloads,
texts of ranges and facts of sessions.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prismtrace.converters.nsys import convert_processes
from prismtrace.converters.nsys.database import open_database
from prismtrace.converters.nsys.nccl import Call, Payloads, communicators, records_of_calls
from prismtrace.converters.nsys.session import read_session
from prismtrace.converters.nsys.tables import read_tables
from prismtrace.converters.rank_trace import RankOptions
from prismtrace.errors import PrismError, TraceError
from tests.prismtrace.nsys_exports import (
    PEER,
    SCHEMAS,
    SIZED,
    TABLES,
    payload,
    small_export,
    two_streams,
)

VALUES = st.one_of(
    st.none(),
    st.sampled_from([0, 1, -1, 2, 7, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 1_700]),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "step 3", "backward", "é\0"]
    ),
    st.binary(max_size=60),
)
WHOLE = settings(max_examples=500, suppress_health_check=list(HealthCheck))
QUICK = settings(max_examples=1_000, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    return two_streams(small_export()).write(folder / "whole.sqlite", page_bytes=512)


def convert_or_refuse(path: Path, *, recover: bool) -> None:
    options = RankOptions(recover=recover, grain="kernel" if recover else "communication")
    check(outcome(lambda: convert_processes(path, path.with_name("part"), options, 0)))


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except PrismError as error:
        return error


def check(found: Any) -> None:
    assert found
    if isinstance(found, PrismError):
        assert isinstance(found, TraceError)
        assert found.where
        assert found.hint


@WHOLE
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 20), recover=st.booleans())
def test_changed_bytes(export: Path, seed: int, changes: int, recover: bool) -> None:
    chance = random.Random(seed)
    data = bytearray(export.read_bytes())
    used = [at for at, byte in enumerate(data) if byte]
    for _ in range(changes):
        at = chance.choice(used)
        data[at] = chance.choice(
            (0, 1, 255, chance.randrange(256), data[at] ^ 1 << chance.randrange(8))
        )
    if chance.random() < 0.1:
        del data[chance.randrange(len(data)) :]
    path = export.with_name("bytes.sqlite")
    path.write_bytes(data)
    convert_or_refuse(path, recover=recover)


@settings(WHOLE, max_examples=1_000)
@given(seed=st.integers(0, 2**32), recover=st.booleans())
def test_changed_pages(export: Path, seed: int, recover: bool) -> None:
    """Pages that point at each other in circles must not be walked for ever: tables only."""
    chance = random.Random(seed)
    data = bytearray(export.read_bytes())
    pages = len(data) // 512
    for _ in range(chance.randint(1, 4)):
        source, target = chance.randrange(pages) * 512, chance.randrange(1, pages) * 512
        if chance.random() < 0.5:
            data[target : target + 512] = data[source : source + 512]
        else:  # an interior page whose children are random pages
            kids = [chance.randrange(1, pages + 1) for _ in range(chance.randint(1, 60))]
            cells = b"".join(kid.to_bytes(4, "big") + bytes([n + 1]) for n, kid in enumerate(kids))
            start = 512 - len(cells)
            head = (
                bytes([5, 0, 0]) + len(kids).to_bytes(2, "big") + start.to_bytes(2, "big") + b"\0"
            )
            head += kids[0].to_bytes(4, "big")
            offsets = b"".join((start + 5 * n).to_bytes(2, "big") for n in range(len(kids)))
            if len(head) + len(offsets) <= start:
                page = (head + offsets).ljust(start, b"\0") + cells
                data[target : target + 512] = page
    path = export.with_name("pages.sqlite")
    path.write_bytes(data)
    check(outcome(lambda: read_only(path, recover=recover)))


def read_only(path: Path, *, recover: bool) -> Any:
    counts: Counter[str] = Counter()
    with open_database(path, path.with_name("x"), counts, recover=recover) as database:
        return read_session(database, counts), read_tables(database, ("gridX",), counts)


@WHOLE
@given(data=st.data())
def test_changed_cells(export: Path, data: st.DataObject) -> None:
    path = export.with_name("cells.sqlite")
    path.write_bytes(export.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        for _ in range(data.draw(st.integers(1, 12))):
            table = data.draw(st.sampled_from(sorted(TABLES)))
            column = data.draw(st.sampled_from(TABLES[table].split(","))).split()[0]
            change(connection, table, column, data)
        connection.commit()
    convert_or_refuse(path, recover=data.draw(st.booleans()))


def change(connection: sqlite3.Connection, table: str, column: str, data: st.DataObject) -> None:
    """A cell, a whole column, a column or a table that is not there, rows twice."""
    what = data.draw(st.sampled_from(["cell"] * 6 + ["column", "drop", "table", "twice"]))
    value = data.draw(VALUES)
    try:
        if what == "table":
            connection.execute(f"DROP TABLE {table}")
        elif what == "drop":
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        elif what == "twice":
            connection.execute(f"INSERT INTO {table} SELECT * FROM {table}")  # noqa: S608
        else:
            row = data.draw(st.integers(0, 8))
            where = f"WHERE rowid = (SELECT rowid FROM {table} LIMIT 1 OFFSET {row})"  # noqa: S608
            query = f"UPDATE {table} SET {column} = ? {where if what == 'cell' else ''}"  # noqa: S608
            connection.execute(query, (value,))
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):
        pass  # gone already, or not a value for this column


def schemas() -> Any:
    entries = [
        (schema, name, kind, 8 * index or None, index)
        for schema, fields in SCHEMAS.items()
        for index, (kind, name) in enumerate(fields)
    ]
    return SimpleNamespace(
        columns=lambda _: ("schemaid", "name", "type", "offset", "idx"), rows=lambda _: entries
    )


PAYLOADS = Payloads(schemas(), Counter())
BYTES = st.one_of(
    st.binary(max_size=80),
    st.builds(
        payload, st.just(PEER), st.integers(0, 9), st.integers(0, 2**64 - 1), st.integers(0, 9)
    ),
    st.builds(payload, st.just(SIZED), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
JSON = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["[" * 10_000, "null", "{}", '{"Root": 1e999}', '{"Rank": "' + "9" * 5_000 + '"}']
    ),
    st.builds(
        lambda name, value: f'{{"{name}": {value}}}',
        st.sampled_from(["NCCL communicator ID", "Peer rank", "Message size [bytes]"]),
        st.one_of(st.integers(), st.floats(), st.just('"1,024"'), st.just("[1]"), st.just('"٣"')),
    ),
)


@settings(QUICK, max_examples=2_000)
@given(text=st.one_of(st.none(), JSON), binary=st.one_of(st.none(), BYTES))
def test_payloads(text: str | None, binary: bytes | None) -> None:
    found = PAYLOADS.decode(text, binary)
    for name, value in found.items():
        assert isinstance(value, str if name == "reduce_op" else int)
        assert name == "reduce_op" or 0 <= value < 2**64


NAMES = ["ncclSend", "ncclRecv", "ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "ncclCommCount"]
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "communicator": st.integers(0, 3), "peer": st.integers(0, 3), "position": st.integers(0, 3),
        "size": st.integers(0, 3), "nbytes": st.integers(0, 2**40), "reduce_op": st.text(max_size=3),
    },
)  # fmt: skip


@QUICK
@given(
    calls=st.lists(
        st.builds(Call, st.integers(0, 99), st.integers(0, 99), st.sampled_from(NAMES), FIELDS),
        max_size=12,
    ),
    launches=st.lists(st.integers(0, 99), max_size=5).map(sorted),
    around=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=2).map(sorted),
)
def test_calls(calls: list[Call], launches: list[int], around: list[tuple[int, int]]) -> None:
    ordered = sorted(calls, key=lambda call: call.start_ns)
    records = records_of_calls(ordered, around, launches, Counter())
    assert len(records) <= len(calls)
    assert len({group.name for group in communicators(ordered)}) <= 4


def interior(child: int, children: int = 60) -> bytes:
    """A page of a table's tree that names one child many times."""
    cells = b"".join(child.to_bytes(4, "big") + bytes([n + 1]) for n in range(children))
    start = 512 - len(cells)
    head = bytes([5, 0, 0]) + children.to_bytes(2, "big") + start.to_bytes(2, "big") + b"\0"
    offsets = b"".join((start + 5 * n).to_bytes(2, "big") for n in range(children))
    return (head + child.to_bytes(4, "big") + offsets).ljust(start, b"\0") + cells


@pytest.mark.parametrize("table", ["KERNEL", "RUNTIME"])
def test_a_tree_that_would_take_for_ever_to_walk(export: Path, table: str) -> None:
    with closing(sqlite3.connect(export)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = connection.execute(query, (f"CUPTI_ACTIVITY_KIND_{table}",)).fetchone()
    data = bytearray(export.read_bytes())
    place = slice((root - 1) * 512, root * 512)
    last = len(data) // 512 + 1
    data += data[place]
    for _ in range(17):  # 60**17 rows
        data += interior(last)
        last += 1
    data[place] = interior(last)
    data[28:32] = (len(data) // 512).to_bytes(4, "big")
    path = export.with_name("deep.sqlite")
    path.write_bytes(data)
    found = outcome(lambda: read_only(path, recover=False))
    assert isinstance(found, TraceError)
    assert "damaged or cut short" in found.message
