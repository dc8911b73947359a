"""Whatever the bytes or the structure of an input, only our own errors come out of its reader.

Together 5 000 cases a format in CI. Memory and time are bounded by what the readers refuse:
frames of more than 64 MiB, times that add up to centuries, more ranks than there are.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from random import Random

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismtrace.converters.files import convert_file
from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.errors import PrismError
from tests.prismtrace.chakra_traces import COLL, RECV, SEND, framed, metadata, node
from tests.prismtrace.test_pytorch_et import comm, document
from tests.prismtrace.test_pytorch_et import node as operator

_LONGEST_S = 5.0
_CHUNK = 25  # mutations a Hypothesis example: most of its time is its own

CHAKRA = [
    metadata(schema="1.0.1", rank=0, process_groups='{"1": {"name": "a", "ranks": "0-1"}}'),
    node(0, title="gemm", dur=5, tid=7, is_cpu_op=False, stream=3),
    node(1, COLL, "ar", dur=9, data=[0], comm_type=0, comm_size=64, pg_name="1"),
    node(2, SEND, "s", start=3, data=[0, 1], comm_dst=("int32_val", 1), comm_size=8, comm_tag=1),
    node(3, RECV, "r", data=[2], ctrl=[0], comm_src=1, comm_size=8, batch=0, step=1, phase="forward"),
    node(4, 1, "## process_group:init ##", values='["[{\\"pg_name\\": \\"0\\", \\"ranks\\": []}]"]'),
    node(5, title="x" * 200, data=list(range(5)), involved_dim=("bool_list", [True])),
]  # fmt: skip
FEEDER = {
    "workload_graph": [
        {"Id": 1, "Name": "a", "NodeType": 4, "ctrlDeps": [], "data_deps": [], "runtime": 5},
        {"Id": 2, "Name": "b", "NodeType": 7, "data_deps": [1], "comm_type": 0, "comm_size": 4,
         "is_cpu_op": False, "pg_name": "0"},
        {"Id": 3, "Name": "c", "NodeType": 5, "data_deps": [2, 1], "comm_dst": 1, "comm_tag": 0},
    ]
}  # fmt: skip
EXECUTION = json.loads(
    document(
        operator(2, "## process_group:init ##", values=['[{"pg_name": "0", "ranks": [0, 1]}]']),
        operator(3, "aten::mm", tid=1),
        comm(4, rf_id=9),
        comm(5, "wait", rf_id=10),
        operator(6, "aten::add", tid=1),
    )
)
TEXTS = {
    "chakra": framed(*CHAKRA),
    "chakra-gz": gzip.compress(framed(*CHAKRA)),
    "feeder": json.dumps(FEEDER).encode(),
    "execution": json.dumps(EXECUTION).encode(),
}
NAMES = {
    "chakra": "f.0.et",
    "chakra-gz": "f.0.et.gz",
    "feeder": "f_0.json",
    "execution": "rank0.json",
}
INTERESTING = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x0A, 0x12, 0x2A, 0x52, 0x1F, 0x8B]
ODD = [
    None,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    1e308,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    True,
    "0",
    "1" * 30,
]


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "parts").mkdir()
        yield Path(name)


def check(folder: Path, name: str, text: bytes, *, recover: bool) -> None:
    """Read a file; an answer that is no error is a table as the format has it."""
    path = folder / name
    path.write_bytes(text)
    begin = time.monotonic()
    told: PrismError | None = None
    found: tuple[RankTrace, ...] = ()
    try:
        found = convert_file(path, folder / "parts" / "0", RankOptions(recover=recover))
    except PrismError as error:
        told = error
    assert time.monotonic() - begin < _LONGEST_S
    assert found or (told is not None and told.where and told.hint)
    for trace in found:
        nodes = pl.read_parquet(trace.nodes)
        assert nodes.height == trace.rows > 0
        edges = nodes.select("index", "deps").explode("deps", empty_as_null=False)
        assert (edges["deps"] >= 1).all()
        assert (edges["deps"] <= edges["index"]).all()


def damaged(text: bytes, random: Random) -> bytes:
    """Some bytes changed, left out, put in or repeated, or the end cut off."""
    data = bytearray(text)
    for _ in range(random.choice([1, 1, 1, 2, 4, 16])):
        at = random.randrange(len(data) + 1) if data else 0
        match random.randrange(6):
            case 0:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([random.choice(INTERESTING)])
            case 2:
                del data[at : at + random.choice([1, 2, 8, 64])]
            case 3:
                data[at:at] = random.randbytes(random.choice([1, 2, 8]))
            case 4:
                data[at:at] = data[at : at + random.choice([4, 30, 100])]
            case _:
                if random.random() < 0.2:
                    del data[at:]
    return bytes(data)


def changed(value: object, random: Random) -> object:
    """A JSON document of which one part is another."""
    if random.random() < 0.12 or not isinstance(value, dict | list) or not value:
        return random.choice(ODD)
    if isinstance(value, dict):
        key = random.choice(list(value))
        match random.randrange(8):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {**value, key + "x": value[key]}
            case _:
                return {**value, key: changed(value[key], random)}
    at = random.randrange(len(value))
    match random.randrange(8):
        case 0:
            return value[:at] + value[at + 1 :]
        case 1:
            return [*value, value[at]]
        case 2:
            return value[::-1]
        case _:
            return [*value[:at], changed(value[at], random), *value[at + 1 :]]


def mutate(folder: Path, form: str, seed: int, *, structure: bool) -> None:
    random = Random(seed)
    whole = {"feeder": FEEDER, "execution": EXECUTION}.get(form)
    for _ in range(_CHUNK):
        if structure:
            document_of = changed(whole, random)
            if random.random() < 0.5:
                document_of = changed(document_of, random)
            text = json.dumps(document_of).encode()
        else:
            text = damaged(TEXTS[form], random)
        check(folder, NAMES[form], text, recover=random.random() < 0.5)


seeds = st.integers(0, 2**32)


@settings(max_examples=80)
@given(seeds)
def test_frames_of_damaged_bytes(folder, seed):
    mutate(folder, "chakra", seed, structure=False)


@pytest.mark.parametrize("form", ["chakra-gz", "feeder"])
@settings(max_examples=15)
@given(seeds)
def test_other_forms_of_damaged_bytes(folder, form, seed):
    mutate(folder, form, seed, structure=False)


@settings(max_examples=30)
@given(seeds)
def test_changed_documents(folder, seed):
    mutate(folder, "feeder", seed, structure=True)


@pytest.mark.parametrize("structure", [False, True])
@settings(max_examples=100)
@given(seeds)
def test_execution_traces(folder, structure, seed):
    mutate(folder, "execution", seed, structure=structure)


numbers = st.one_of(st.integers(0, 6), st.sampled_from([2**31, 2**62, 2**63, 2**64 - 1]))
attributes = st.dictionaries(
    st.sampled_from(
        ["comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "pg_name", "stream", "tid",
         "is_cpu_op", "rf_id", "kind", "batch", "step", "chunk", "root", "dtype", "tensor_size"]
    ),
    st.one_of(
        st.integers(-3, 9), st.sampled_from([2**31, 2**62, -(2**63)]), st.booleans(),
        st.sampled_from(["0", "1", "", "all_reduce", "send", "memcpy", "float32"]),
    ),
    max_size=5,
)  # fmt: skip


@settings(max_examples=1500)
@given(
    st.lists(
        st.tuples(numbers, st.integers(0, 9), st.lists(numbers, max_size=3),
                  st.lists(numbers, max_size=2), numbers, numbers, attributes),
        min_size=1, max_size=8,
    ),
    st.booleans(),
    st.dictionaries(
        st.sampled_from(["rank", "prismtrace", "timed", "base_ns", "world_size", "process_groups",
                         "stream_names"]),
        st.one_of(st.integers(-2, 3), st.sampled_from(["", "{}", "[]", "0-3", '{"1": 3}'])),
        max_size=4,
    ),
    st.booleans(),
)  # fmt: skip
def test_any_nodes(folder, nodes, unique, facts, recover):
    messages = [
        node(place if unique else number, kind, "x", data=data, ctrl=ctrl, start=start, dur=dur, **more)
        for place, (number, kind, data, ctrl, start, dur, more) in enumerate(nodes)
    ]  # fmt: skip
    check(folder, "g.0.et", framed(metadata(**facts), *messages), recover=recover)
