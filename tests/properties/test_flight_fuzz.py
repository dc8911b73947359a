"""Damaged and made-up flight-recorder dumps: an answer or a PrismError, nothing else, and soon."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import prismtrace as pt
from prismtrace.converters.flight.pickled import PlainPickleError, load_plain
from prismtrace.converters.flight.reading import read_dump
from prismtrace.errors import PrismError
from prismtrace.hangs import find_hang
from tests.prismtrace.flight_dumps import json_dump, recorders


def _dumps() -> list[dict[str, Any]]:
    ranks = recorders(2, a=(0, 1))
    for recorder in ranks:
        recorder.run()
        recorder.run("_all_gather_base", group="a", shape=(4,))
        recorder.batch(("send", 1 - recorder.rank), ("recv", 1 - recorder.rank))
        recorder.send(1 - recorder.rank, "started")
    ranks[0].run("broadcast", "started")
    return [recorder.dump() for recorder in ranks]


DUMPS = _dumps()
PICKLED = [pickle.dumps(DUMPS[0], protocol) for protocol in (2, 4, 5)]
FILES = [*PICKLED, json_dump(DUMPS[0])]
OPCODES = bytes(ord(op.code) for op in pickletools.opcodes)

edits = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.sampled_from(["set", "cut", "put", "copy"]),
        st.binary(max_size=6) | st.sampled_from(OPCODES).map(lambda code: bytes([code])),
    ),
    min_size=1,
    max_size=6,
)
quick = settings(
    max_examples=2500,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def edited(data: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    for place, what, piece in changes:
        at = place % (len(data) + 1)
        if what == "set":
            data = data[:at] + piece + data[at + len(piece) :]
        elif what == "cut":
            data = data[:at] + data[at + 8 * len(piece) :]
        elif what == "put":
            data = data[:at] + piece + data[at:]
        else:
            data = data[:at] + data[at // 2 : at // 2 + 40] + data[at:]
    return data


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "rank_0"


@quick
@given(st.sampled_from(FILES), edits)
def test_changed_bytes(path, data, changes):
    path.write_bytes(edited(data, changes))
    refusal = refused(lambda: (read_dump(path), find_hang(path)))
    assert refusal is None or (refusal.where and refusal.hint)


def refused(call: Callable[[], object]) -> PrismError | None:
    try:
        call()
    except PrismError as error:
        return error
    return None


numbers = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**70, -(2**63), 1.5, float("inf")])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.sampled_from(["", "nccl:send 0->9", "[0, 5]", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
steps = st.lists(st.integers(0, 50), min_size=1, max_size=4)


def replaced(dump: Any, path: list[int], value: Any) -> Any:
    """The dump with something in it replaced, found by positions."""
    dump = copy.deepcopy(dump)
    inside = dump
    for depth, step in enumerate(path):
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            break
        key = keys[step % len(keys)]
        last = depth == len(path) - 1 or not isinstance(inside[key], dict | list)
        if last:
            inside[key] = value
            break
        inside = inside[key]
    return dump


@quick
@given(st.lists(st.tuples(st.integers(0, 1), steps, values), min_size=1, max_size=4))
def test_changed_values(tmp_path, changes):
    dumps = list(DUMPS)
    for rank, where, value in changes:
        dumps[rank] = replaced(dumps[rank], where, value)
    paths = [tmp_path / "rank_0", tmp_path / "rank_1"]
    for one, dump in zip(paths, dumps, strict=True):
        one.write_bytes(pickle.dumps(dump, 2))
    refusal = refused(lambda: find_hang(paths))
    assert refusal is None or (refusal.where and refusal.hint)


@settings(quick, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1), steps, values), min_size=1, max_size=2))
@example([(0, [0], None), (1, [32, 39, 3], None)])  # a collective that one rank does not name
def test_changed_values_converted(tmp_path, changes):
    dumps = list(DUMPS)
    for rank, where, value in changes:
        dumps[rank] = replaced(dumps[rank], where, value)
    paths = [tmp_path / "rank_0", tmp_path / "rank_1"]
    for one, dump in zip(paths, dumps, strict=True):
        one.write_bytes(json.dumps(dump).encode())
    out = tmp_path / "out.parquet"
    refusal = refused(lambda: pt.convert(paths, out, unmatched="keep"))
    if refusal is not None:
        assert refusal.where
        assert refusal.hint
    else:
        assert [v for v in pt.validate(pt.open(out)) if v.severity == "error"] == []


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@given(plain, st.integers(2, 5))
def test_plain_pickles_are_read_as_they_are(value, protocol):
    assert load_plain(pickle.dumps(value, protocol)) == value


def test_memory_and_time_stay_small_for_bombs():
    many = b"\x80\x02]q\x00(" + b"h\x00" * 100_000 + b"e."
    assert len(load_plain(many)) == 100_000
    far = b"\x80\x02Nr\xff\xff\xff\xff."  # a place in the memo that would take 32 GB as an array
    assert load_plain(far) is None
    deep = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    assert len(load_plain(deep)) == 1
    key = b"\x80\x02}" + b")" + b"\x85" * 3 + b"Ns."
    for bad in (key, b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx", b"", b"\x80"):
        with pytest.raises(PlainPickleError):
            load_plain(bad)
